// bench_nvme_step.cc - the update of a step with optimizer state on disk: nvme_step_vs_limit, nvme_bytes_vs_formula.
//
//   bench_nvme_step step [DIRECTORY ["KEY = VALUE"...]]    further keys of [zero_optimization.offload_optimizer]
//   bench_nvme_step update PATHS ["LINE"...]               PATHS as in nvme_path; further lines of the manifest
//   bench_nvme_step bytes [DIRECTORY]
//
// step: 64 units of 4 Mi bf16 params, all fp32 state on the disk, no computation but the update; from the norm to the
// end of strata_wait. Its bytes over that time against the fastest that anybody moves half reads and half writes on
// that disk: fio, a plain loop, and the tier itself, by two long transfers at once or by the update's own transfers
// without an update; and against what the update alone takes with the same state in host memory: the limit is the
// slower of both. They take turns in one run.
//
// update: the median MB/s of three updates of 8 such units, alone.
//
// bytes: what a step reads and writes by the engine's counters and by the kernel's (/proc/self/io), over the formula:
// 12 bytes per param each way, 10 of them on disk with the split master, less the share that cpu_state_budget keeps.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/engine/run.h"
#include "bench/nvme/limits.h"
#include "bench/nvme/tier.h"

namespace strata::bench {
namespace {

constexpr uint32_t kUnits = 8, kLongUnits = 64;       // in a long step, the first read and the last write are little
constexpr uint64_t kParams = uint64_t{kUnits} << 22;  // of Run::Shape's own

constexpr int kRounds = 7;

// `offload`: lines of [zero_optimization.offload_optimizer]; `sections`: further ones.
Run::Shape shape_of(const std::string& offload, const std::string& sections = "") {
  return {.offload = offload, .threads = 0, .sections = sections};
}

// Seconds of the update, which begins with the norm: the last gradients are reduced after strata_step, and are no
// update.
double step(Run& run) {
  run.gradients();
  check(strata_step(run.engine, nullptr), "step");
  strata_step_info norm;
  STRATA_INIT(&norm);
  check(strata_get_step_info(run.engine, &norm), "step info");
  const double begin = now();
  check(strata_wait(run.engine), "wait");
  return now() - begin;
}

struct Bytes {
  uint64_t read = 0, written = 0;
};

Bytes counted(const Run& run) {
  strata_counters c;
  STRATA_INIT(&c);
  check(strata_get_counters(run.engine, STRATA_COUNT_TOTAL, &c), "counters");
  return {c.tier_read[2], c.tier_write[2]};
}

std::string nvme_at(const std::string& path) { return "device = \"nvme\"\nnvme_path = \"" + path + "\"\n"; }

// A file of kBytes on the disk, written once.
std::string make_file(const std::string& folder, char* memory) {
  const std::string file = folder + "/limit";
  const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ::posix_fallocate(fd, 0, static_cast<off_t>(kBytes)) != 0) die(file + ": " + std::strerror(errno));
  ::close(fd);
  (void)loop_rate("write", file, memory);
  return file;
}

// Bytes per second of half reads and half writes, by name.
using Movers = std::map<std::string, std::function<double()>>;

// Every one in each round, in changing order: what each gave.
std::map<std::string, std::vector<double>> by_turns(const Movers& movers) {
  std::map<std::string, std::vector<double>> rates;
  const std::vector<Movers::value_type> all(movers.begin(), movers.end());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t k = 0; k < all.size(); ++k) {
      const auto& [name, measure] = all[(round + k) % all.size()];
      rates[name].push_back(measure());
    }
  }
  return rates;
}

// As many bytes in a row as the pipeline's: what lies behind a disk may take a burst faster.
double mixed_rate(Tier& tier) {
  constexpr uint64_t kTimes = 2 * kPipelined / kBytes;
  double seconds = 0;
  for (uint64_t k = 0; k < kTimes; ++k) seconds += static_cast<double>(kBytes) / tier.rate("mixed");
  return static_cast<double>(kTimes * kBytes) / seconds;
}

int step_vs_limit(const std::string& parent, const std::string& settings) {
  const Folder folder(parent);
  Tier tier(folder.path, 500, kParams / kUnits * kLongUnits * 12);  // as many bytes as the state
  const std::string file = make_file(folder.path, tier.memory());
  Run::Shape on_disk = shape_of(nvme_at(folder.path) + settings), in_memory = shape_of("device = \"cpu\"\n");
  on_disk.units = kLongUnits;
  Run disk(0, 1, "bench-disk", 2, on_disk), host(0, 1, "bench-ram", 2, in_memory);
  check(strata_commit(disk.engine), "commit");
  check(strata_commit(host.engine), "commit");
  for (int warm = 0; warm < 2; ++warm) (void)(step(disk) + step(host));
  const Bytes before = counted(disk);
  step(disk);
  const Bytes after = counted(disk);
  const auto bytes = static_cast<double>(after.read - before.read + after.written - before.written);
  std::map<std::string, double> mbs;
  for (const auto& [name, rates] : by_turns({{"step", [&] { return bytes / step(disk); }},
                                             {"memory", [&] { return bytes * kUnits / kLongUnits / step(host); }},
                                             {"fio", [&] { return fio_rate("mixed", file); }},
                                             {"loop", [&] { return loop_rate("mixed", file, tier.memory()); }},
                                             {"tier", [&] { return mixed_rate(tier); }},
                                             {"pipeline", [&] { return tier.pipeline_rate(); }}})) {
    mbs[name] = median(rates) / 1e6;
    std::printf("%-8s median %7.0f MB/s, %.0f to %.0f\n", name.c_str(), mbs[name],
                *std::min_element(rates.begin(), rates.end()) / 1e6,
                *std::max_element(rates.begin(), rates.end()) / 1e6);
  }
  const double disk_best = std::max({mbs["fio"], mbs["loop"], mbs["tier"], mbs["pipeline"]});
  const double value = mbs["step"] / std::min(disk_best, mbs["memory"]);
  std::printf("a step: %.0f MB in %.3f s, in memory %.3f s, at the disk's rate %.3f s\n", bytes / 1e6,
              bytes / 1e6 / mbs["step"], bytes / 1e6 / mbs["memory"], bytes / 1e6 / disk_best);
  std::printf(
      "{\"name\": \"nvme_step_vs_limit\", \"value\": %.3f, \"target\": 0.95, \"pass\": %s, \"unit\": \"x\", "
      "\"better\": \"higher\", \"step_mb_s\": %.0f, \"memory_mb_s\": %.0f, \"fio_mb_s\": %.0f, \"loop_mb_s\": %.0f, "
      "\"tier_mb_s\": %.0f, \"pipeline_mb_s\": %.0f, \"against\": \"the slower of the update in host memory and the "
      "disk: the best mixed rate of fio, a loop, the tier and its pipeline\"}\n",
      value, value >= 0.95 ? "true" : "false", mbs["step"], mbs["memory"], mbs["fio"], mbs["loop"], mbs["tier"],
      mbs["pipeline"]);
  return 0;
}

int update(const std::string& paths, const std::string& lines) {
  Run run(0, 1, "bench-update", 2, shape_of(nvme_at(paths) + lines));
  check(strata_commit(run.engine), "commit");
  step(run);
  std::vector<double> rates;
  for (int k = 0; k < 3; ++k) rates.push_back(24.0 * kParams / step(run) / 1e6);
  std::printf("{\"update_mb_s\": %.1f}\n", median(rates));
  return 0;
}

Bytes of_kernel() {
  std::ifstream in("/proc/self/io");
  Bytes bytes;
  std::string word;
  while (in >> word) {
    if (word == "read_bytes:") in >> bytes.read;
    if (word == "write_bytes:") in >> bytes.written;
  }
  return bytes;
}

int bytes(const std::string& parent) {
  struct Case {
    const char* name;
    std::string offload, rest;
    uint64_t each_way;
  };
  const std::string split = "[optimizer.params]\nstate_layout = \"split\"\n";
  const Case cases[] = {
      {"full state", "", "", 12 * kParams},
      {"split master", "", split, 10 * kParams},
      {"half of the state in memory", "cpu_state_budget = " + std::to_string(6 * kParams) + "\n", "", 6 * kParams}};
  double worst = 0;
  for (const Case& one : cases) {
    const Folder folder(parent);
    Run run(0, 1, "bench-bytes", 2, shape_of(nvme_at(folder.path) + one.offload, one.rest));
    check(strata_commit(run.engine), "commit");
    run.step();
    const Bytes before = counted(run), kernel = of_kernel();
    constexpr uint64_t kSteps = 3;
    for (uint64_t s = 0; s < kSteps; ++s) run.step();
    const Bytes after = counted(run), kernel_after = of_kernel();
    const auto over = [&](uint64_t moved) {
      const double ratio = static_cast<double>(moved) / static_cast<double>(kSteps * one.each_way);
      worst = std::max(worst, std::max(ratio, 1 / std::max(ratio, 1e-9)));
      return ratio;
    };
    std::printf("%-28s counters: read %.6f, written %.6f; kernel: read %.6f, written %.6f of the formula\n", one.name,
                over(after.read - before.read), over(after.written - before.written),
                over(kernel_after.read - kernel.read), over(kernel_after.written - kernel.written));
  }
  std::printf(
      "{\"name\": \"nvme_bytes_vs_formula\", \"value\": %.6f, \"target\": 1.0, \"unit\": \"x\", "
      "\"better\": \"lower\", \"against\": \"12 (split master: 10) bytes per param each way, less what is kept\"}\n",
      worst);
  return 0;
}

}  // namespace
}  // namespace strata::bench

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "", parent = argc > 2 ? argv[2] : "/tmp";
  std::string settings;
  for (int i = 3; i < argc; ++i) settings += std::string(argv[i]) + "\n";
  if (what == "step") return strata::bench::step_vs_limit(parent, settings);
  if (what == "update" && argc > 2) return strata::bench::update(parent, settings);
  if (what == "bytes") return strata::bench::bytes(parent);
  std::fprintf(stderr,
               "usage: bench_nvme_step step|bytes [DIRECTORY [\"KEY = VALUE\"...]], or update PATHS [\"LINE\"...]\n");
  return 2;
}
