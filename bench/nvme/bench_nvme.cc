// bench_nvme.cc - offload_nvme against the disk: nvme_read_vs_limit, nvme_write_vs_limit, nvme_mixed_vs_limit.
//
//   bench_nvme read|write|mixed [DIRECTORY]
//
// The tier moves a region through its ABI; fio (io_uring, direct, 1 MiB, depth 32) and a loop of direct
// preads and pwrites of 1 MiB move the same bytes of the same file, the region's own segment. They take turns in
// changing order; the figure is the tier's median rate over the better of the two others'. Mixed is half reads and half
// writes at once.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <map>

#include "bench/nvme/limits.h"
#include "bench/nvme/tier.h"

namespace strata::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kRounds = 9;

std::string segment_in(const std::string& directory) {
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.path().filename() == "segment-0") return entry.path();
  }
  die("no segment in " + directory);
}

int run(const std::string& what, const std::string& parent) {
  const Folder folder(parent);
  std::map<std::string, std::vector<double>> rates;
  {
    Tier tier(folder.path);
    const std::string file = segment_in(folder.path);
    const std::pair<std::string, std::function<double()>> contenders[] = {
        {"tier", [&] { return tier.rate(what); }},
        {"fio", [&] { return fio_rate(what, file); }},
        {"loop", [&] { return loop_rate(what, file, tier.memory()); }},
    };
    for (int round = 0; round < kRounds; ++round) {
      for (int k = 0; k < 3; ++k) {
        const auto& [name, measure] = contenders[(round + k) % 3];
        rates[name].push_back(measure());
      }
    }
  }
  std::map<std::string, double> mbs;
  for (const auto& [name, values] : rates) {
    mbs[name] = median(values) / 1e6;
    std::printf("%-5s median %7.0f MB/s, %.0f to %.0f\n", name.c_str(), mbs[name],
                *std::min_element(values.begin(), values.end()) / 1e6,
                *std::max_element(values.begin(), values.end()) / 1e6);
  }
  const double ratio = mbs["tier"] / std::max(mbs["fio"], mbs["loop"]);
  std::printf(
      "{\"name\": \"nvme_%s_vs_limit\", \"value\": %.3f, \"target\": 0.97, \"pass\": %s, \"tier_mb_s\": %.0f, "
      "\"fio_mb_s\": %.0f, \"loop_mb_s\": %.0f}\n",
      what.c_str(), ratio, ratio >= 0.97 ? "true" : "false", mbs["tier"], mbs["fio"], mbs["loop"]);
  return 0;
}

}  // namespace
}  // namespace strata::bench

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what != "read" && what != "write" && what != "mixed") {
    std::fprintf(stderr, "usage: bench_nvme read|write|mixed [DIRECTORY]\n");
    return 2;
  }
  return strata::bench::run(what, argc > 2 ? argv[2] : std::filesystem::temp_directory_path().string());
}
