// bench_nvme_step.cc - the update of a step with optimizer state on disk: nvme_step_vs_limit, nvme_bytes_vs_formula.
//
//   bench_nvme_step step [DIRECTORY ["KEY = VALUE"...]]    further keys of [zero_optimization.offload_optimizer]
//   bench_nvme_step bytes [DIRECTORY]
//
// step: 8 units of 4 Mi bf16 params, all fp32 state on the disk, no computation but the update; from strata_step to the
// end of strata_wait. Its bytes over that time, against the best mixed rate of fio and a plain loop on the same disk,
// and against what the update alone takes with the same state in host memory: the limit is the slower of both. They
// take turns in one run.
// bytes: what a step reads and writes by the engine's counters and by the kernel's (/proc/self/io), over the formula:
// 12 bytes per param each way, 10 of them on disk with the split master, less the share that cpu_state_budget keeps.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "bench/engine/run.h"
#include "bench/nvme/limits.h"

namespace strata::bench {
namespace {

constexpr uint64_t kParams = uint64_t{8} << 22;  // of Run::Shape's own
constexpr int kRounds = 7;

// `offload`: lines of [zero_optimization.offload_optimizer]; `sections`: further ones.
Run::Shape shape_of(const std::string& offload, const std::string& sections = "") {
  return {.offload = offload, .threads = 0, .sections = sections};
}

// Seconds of the update.
double step(Run& run) {
  run.gradients();
  const double begin = now();
  run.update();
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

std::string on_disk(const std::string& path) { return "device = \"nvme\"\nnvme_path = \"" + path + "\"\n"; }

// A file of kBytes on the disk, written once.
std::string make_file(const std::string& folder, char* memory) {
  const std::string file = folder + "/limit";
  const int fd = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ::posix_fallocate(fd, 0, static_cast<off_t>(kBytes)) != 0) die(file + ": " + std::strerror(errno));
  ::close(fd);
  (void)loop_rate("write", file, memory);
  return file;
}

int step_vs_limit(const std::string& parent, const std::string& settings) {
  const Folder folder(parent);
  auto* memory = static_cast<char*>(std::aligned_alloc(4096, kBytes));
  if (!memory) die("no memory");
  std::memset(memory, 1, kBytes);
  const std::string file = make_file(folder.path, memory);
  std::vector<double> nvme, ram, fio, loop;
  double moved = 0;  // in a step
  {
    Run disk(0, 1, "bench-disk", 2, shape_of(on_disk(folder.path) + settings));
    Run host(0, 1, "bench-ram", 2, shape_of("device = \"cpu\"\n"));
    check(strata_commit(disk.engine), "commit");
    check(strata_commit(host.engine), "commit");
    for (int warm = 0; warm < 2; ++warm) (void)(step(disk) + step(host));
    const std::function<void()> contenders[] = {[&] { nvme.push_back(step(disk)); }, [&] { ram.push_back(step(host)); },
                                                [&] { fio.push_back(fio_rate("mixed", file)); },
                                                [&] { loop.push_back(loop_rate("mixed", file, memory)); }};
    for (int round = 0; round < kRounds; ++round) {
      for (int k = 0; k < 4; ++k) contenders[(round + k) % 4]();
    }
    const Bytes all = counted(disk);
    moved = static_cast<double>(all.read + all.written) / (2 + kRounds);
  }
  std::free(memory);
  const double bytes = moved, best = std::max(median(fio), median(loop));
  const double of_disk = bytes / best, limit = std::max(of_disk, median(ram)), took = median(nvme);
  std::printf(
      "update with state on disk %.3f s (%.0f MB/s), in memory %.3f s; the disk alone %.3f s (fio %.0f, loop %.0f "
      "MB/s)\n",
      took, bytes / took / 1e6, median(ram), of_disk, median(fio) / 1e6, median(loop) / 1e6);
  std::printf(
      "{\"name\": \"nvme_step_vs_limit\", \"value\": %.3f, \"target\": 0.95, \"pass\": %s, \"unit\": \"x\", "
      "\"better\": \"higher\", \"step_s\": %.4f, \"limit_s\": %.4f, \"memory_s\": %.4f, \"disk_mb_s\": %.0f, "
      "\"against\": \"the slower of the disk's mixed rate and the update in host memory\"}\n",
      limit / took, limit / took >= 0.95 ? "true" : "false", took, limit, median(ram), best / 1e6);
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
    Run run(0, 1, "bench-bytes", 2, shape_of(on_disk(folder.path) + one.offload, one.rest));
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
  if (what == "bytes") return strata::bench::bytes(parent);
  std::fprintf(stderr, "usage: bench_nvme_step step|bytes [DIRECTORY [\"KEY = VALUE\"...]]\n");
  return 2;
}
