// bench_nvme.cc - offload_nvme against the disk: nvme_read_vs_limit, nvme_write_vs_limit, nvme_mixed_vs_limit.
//
//   bench_nvme read|write|mixed [DIRECTORY]
//
// The tier moves a region through its ABI; fio (io_uring, direct, 1 MiB, depth 32) and a loop of direct
// preads and pwrites of 1 MiB move the same bytes of the same file, the region's own segment. They take turns in
// changing order; the figure is the tier's median rate over the better of the two others'. Mixed is half reads and half
// writes at once.
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>

#include "core/plugins/event.h"
#include "core/plugins/host.h"
#include "host_memory/host_memory.h"
#include "strata/iface/offload.h"
#include "strata/plugin.h"

namespace strata::bench {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kBytes = uint64_t{256} << 20, kPiece = uint64_t{1} << 20;
constexpr int kRounds = 9;

[[noreturn]] void die(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(1);
}

void expect_ok(const Status& status) {
  if (!status.ok()) die(status.text());
}

strata_option option(const char* key, strata_option_type type, int64_t i, const char* s) {
  return {sizeof(strata_option), STRATA_ABI_MINOR, key, type, 0, i, 0, s};
}

class Tier {
 public:
  explicit Tier(const std::string& directory)
      : host_([](strata_log_level, const std::string&,
                 const std::string& text) { std::fprintf(stderr, "%s\n", text.c_str()); },
              STRATA_LOG_INFO, 2) {
    void* handle = dlopen(STRATA_PLUGIN_DIR "/offload_nvme.so", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == nullptr) die(dlerror());
    const auto entry = reinterpret_cast<strata_plugin_entry_fn>(dlsym(handle, STRATA_PLUGIN_ENTRY));
    api_ = static_cast<const strata_offload_api*>(entry(STRATA_ABI_MINOR)->get_interface(STRATA_OFFLOAD));
    const strata_option items[] = {option("nvme_path", STRATA_OPT_STRING, 0, directory.c_str())};
    const strata_options options = {sizeof(options), STRATA_ABI_MINOR, items, 1, sizeof(strata_option)};
    strata_open_args args{};
    args.struct_size = sizeof(args);
    args.host = host_.c();
    args.options = &options;
    args.job = "bench";
    args.world = args.local_world = 1;
    args.deadline_ns = 60'000'000'000;
    expect_ok(take_failure(api_->open(&args, &self_)));
    expect_ok(take_failure(api_->alloc(self_, kBytes, "bench", &region_)));
  }
  ~Tier() { api_->close(self_); }
  Tier(const Tier&) = delete;

  void run(const std::string& what, char* memory) {
    if (what != "mixed") {
      const strata_io_args io = {sizeof(io), STRATA_ABI_MINOR, region_, 0, kBytes, memory};
      expect_ok(take_failure((what == "read" ? api_->read : api_->write)(self_, &io, nullptr)));
      return;
    }
    const Event done[] = {Event::create(), Event::create()};
    for (const int half : {0, 1}) {
      const uint64_t at = half * kBytes / 2;
      const strata_io_args io = {sizeof(io), STRATA_ABI_MINOR, region_, at, kBytes / 2, memory + at};
      expect_ok(take_failure((half == 0 ? api_->read : api_->write)(self_, &io, done[half].get())));
    }
    for (const Event& each : done) expect_ok(each->wait(std::chrono::seconds(60)));
  }

 private:
  Host host_;
  const strata_offload_api* api_ = nullptr;
  strata_offload* self_ = nullptr;
  strata_region region_ = 0;
};

void loop(const std::string& what, const std::string& file, char* memory) {
  const int fd = ::open(file.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
  if (fd < 0) die(file + ": " + std::strerror(errno));
  for (uint64_t at = 0; at < kBytes; at += kPiece) {
    const bool read = what == "read" || (what == "mixed" && at / kPiece % 2 == 0);
    const auto offset = static_cast<off_t>(at);
    const ssize_t n = read ? ::pread(fd, memory + at, kPiece, offset) : ::pwrite(fd, memory + at, kPiece, offset);
    if (n != static_cast<ssize_t>(kPiece)) die(file + ": " + std::strerror(errno));
  }
  ::close(fd);
}

// fio's own clock, without its start.
double fio_rate(const std::string& what, const std::string& file) {
  const std::string rw = what == "mixed" ? "rw" : what;
  const std::string command =
      "fio --name=bench --filename=" + file + " --rw=" + rw + " --bs=1M --ioengine=io_uring --direct=1 --iodepth=32 " +
      "--size=" + std::to_string(kBytes) + " --overwrite=1 --fallocate=none --invalidate=0 --output-format=json";
  std::FILE* pipe = ::popen(command.c_str(), "r");
  std::string text;
  char buffer[4096];
  for (size_t n; pipe && (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, n);
  if (!pipe || ::pclose(pipe) != 0) die("this failed: " + command);
  const auto job = nlohmann::json::parse(text.substr(text.find('{')))["jobs"][0];
  double bytes = 0, seconds = 0;
  for (const char* side : {"read", "write"}) {
    bytes += job[side]["io_bytes"].get<double>();
    seconds = std::max(seconds, job[side]["runtime"].get<double>() / 1e3);
  }
  return bytes / seconds;
}

template <class Fn>
double rate(const Fn& fn) {
  const auto begin = std::chrono::steady_clock::now();
  fn();
  return static_cast<double>(kBytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string segment_in(const std::string& directory) {
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.path().filename() == "segment-0") return entry.path();
  }
  die("no segment in " + directory);
}

int run(const std::string& what, const std::string& parent) {
  std::string directory = parent + "/bench-nvme-XXXXXX";
  if (!::mkdtemp(directory.data())) die(directory + ": " + std::strerror(errno));
  std::map<std::string, std::vector<double>> rates;
  {
    Tier tier(directory);
    const std::string file = segment_in(directory);
    auto* memory = static_cast<char*>(host_memory::allocate(kBytes));  // as device_host gives it to the core
    if (!memory) die("no memory");
    for (uint64_t i = 0; i < kBytes; ++i) memory[i] = static_cast<char>(i * 2654435761u >> 13);
    tier.run("write", memory);
    const std::pair<std::string, std::function<double()>> contenders[] = {
        {"tier", [&] { return rate([&] { tier.run(what, memory); }); }},
        {"fio", [&] { return fio_rate(what, file); }},
        {"loop", [&] { return rate([&] { loop(what, file, memory); }); }},
    };
    for (int round = 0; round < kRounds; ++round) {
      for (int k = 0; k < 3; ++k) {
        const auto& [name, measure] = contenders[(round + k) % 3];
        rates[name].push_back(measure());
      }
    }
    host_memory::release(memory, kBytes);
  }
  fs::remove_all(directory);
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
