// bench_io.cc - `strata bench io`: what disks give to the NVMe tier, and the settings that get most of it.
//
// Each path is read, written, and both at once, through the queue that the tier uses (libs/io), at several depths and
// piece sizes: a file of its own, written once before, is moved for a fixed time each, in several rounds over all of
// them. Then the transfers of an update (io_pipeline.h) run with the setting that the rates speak for and with the
// tier's default. What follows from the rates is in io_advice.h; docs/bench_io.md explains the output.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "host_memory/host_memory.h"
#include "io/alignment.h"
#include "io/in_memory.h"
#include "io/load.h"
#include "tools/commands.h"
#include "tools/io_advice.h"
#include "tools/io_pipeline.h"

namespace strata::cli {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr unsigned kDepths[] = {1, 4, 16, 32};
constexpr uint64_t kPieces[] = {kMiB / 8, kMiB, 4 * kMiB};
constexpr uint64_t kMemory = kPipelineMemory;
static_assert(kMemory >= 32 * 4 * kMiB);  // the deepest queue of the largest pieces
constexpr int kPipelineTimes = 5;         // as long as another measurement: it has to fill and to drain

struct DiskResult : AdvisedDisk {
  std::string engine;
  uint64_t alignment = 0;
  bool direct = true;
  std::vector<Rates> rates;
};

struct Failure {
  int error;  // an errno, or 0
  std::string what;
};

[[noreturn]] void raise(int error, const std::string& what) { throw Failure{error, what}; }

std::string mib(uint64_t bytes) { return std::to_string(bytes / kMiB) + " MiB"; }

// A new file without a name, so that however the process ends, nothing is left. -1 and errno where it cannot be made.
int open_nameless(const std::string& directory) {
  const int fd = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0) return fd;
  // Not every file system has O_TMPFILE, and they differ in how they say so.
  const std::string path = directory + "/strata-bench-io-" + std::to_string(::getpid());
  const int named = ::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

// The file that is moved; gone when this is.
class BenchFile {
 public:
  BenchFile(const std::string& directory, uint64_t bytes) : fd_(std::make_shared<io::Fd>(open_nameless(directory))) {
    if (!*fd_) raise(errno, "make a file in " + directory);
    const int error = ::posix_fallocate(fd_->get(), 0, static_cast<off_t>(bytes));
    if (error) raise(error, "take " + mib(bytes) + " in " + directory);
    direct_ = ::fcntl(fd_->get(), F_SETFL, O_DIRECT) == 0;
    if (direct_ && io::find_direct_rule(fd_->get(), &rule_) != 0) rule_ = {};
  }
  BenchFile(const BenchFile&) = delete;
  const std::shared_ptr<io::Fd>& fd() const { return fd_; }
  bool direct() const { return direct_; }
  uint64_t alignment() const { return rule_.offset; }
  uint64_t file_system() const {
    struct stat s {};
    return ::fstat(fd_->get(), &s) == 0 ? s.st_dev : 0;
  }

 private:
  std::shared_ptr<io::Fd> fd_;
  bool direct_ = false;
  io::DirectRule rule_;
};

class Bench {
 public:
  Bench(const BenchIoArgs& args, const std::string& path, const std::shared_ptr<char>& memory)
      : args_(args), bytes_(args.file_mib * kMiB), memory_(memory), file_(path, bytes_), path_(path) {}

  DiskResult run() {
    DiskResult result;
    result.path = path_;
    result.in_memory = io::is_in_memory(path_);
    result.alignment = file_.alignment();
    result.direct = file_.direct();
    result.file_system = file_.file_system();
    result.engine = fill();
    constexpr size_t kinds = std::size(kDepths) * std::size(kPieces);
    std::vector<Round> rounds[kinds];
    for (unsigned n = 0; n < args_.rounds; ++n) {
      for (size_t k = 0; k < kinds; ++k) rounds[k].push_back(round(depth_of(k), piece_of(k)));
    }
    for (size_t k = 0; k < kinds; ++k) result.rates.push_back(rates_of(depth_of(k), piece_of(k), rounds[k]));
    result.advice = confirm(advise(result.rates));
    return result;
  }

 private:
  static unsigned depth_of(size_t kind) { return kDepths[kind / std::size(kPieces)]; }
  static uint64_t piece_of(size_t kind) { return kPieces[kind % std::size(kPieces)]; }

  static io::Queue::Options options(unsigned depth, uint64_t piece) {
    io::Queue::Options options;
    options.depth = depth;
    options.block_bytes = piece;
    options.deadline = std::chrono::seconds(60);
    return options;
  }

  // Writes the file once: what was never written reads faster than it should. What drives the disk, in words.
  std::string fill() {
    io::Queue queue(options(kDefaultDepth, kDefaultPiece));
    const io::QueueFile file = queue.attach(file_.fd());
    for (uint64_t at = 0; at < bytes_; at += kMemory) {
      const int error = queue.transfer({true, file, at, memory_.get(), std::min(kMemory, bytes_ - at), {}, memory_});
      if (error) raise(error, "write the file in " + path_);
    }
    return queue.uses_ring() ? "io_uring" : "threads (" + queue.remark() + ")";
  }

  Round round(unsigned depth, uint64_t piece) {
    io::Queue queue(options(depth, piece));
    const io::QueueFile file = queue.attach(file_.fd());
    const auto rate = [&](bool reads, bool writes) {
      uint64_t written = bytes_;
      const io::Load load{file, bytes_, memory_, depth, piece, reads, writes, &written};
      const io::LoadResult result = io::run_load(queue, load, length(args_.seconds));
      if (result.error) raise(result.error, std::string(reads ? "read" : "write") + " the file in " + path_);
      return result.rate;
    };
    return {rate(true, false), rate(false, true), rate(true, true)};
  }

  // The pipeline runs once a round where there is nothing to compare.
  Advice confirm(const Advice& advice) {
    std::vector<PipelineRound> rounds;
    for (unsigned n = 0; n < args_.rounds; ++n) {
      const double candidate = advice.has_candidate() ? pipeline_rate(advice.candidate) : 0;
      const double by_default = pipeline_rate(advice.by_default);
      rounds.push_back({advice.has_candidate() ? candidate : by_default, by_default});
    }
    return cli::confirm(advice, rounds);
  }

  // Memory is registered, as the tier's.
  double pipeline_rate(const Rates& setting) {
    io::Queue queue(options(setting.depth, setting.piece));
    const Pipeline pipeline{queue.attach(file_.fd()), bytes_, memory_.get()};
    const bool registered = queue.register_memory(memory_.get(), kMemory) == 0;
    const io::LoadResult result = run_pipeline(queue, pipeline, length(kPipelineTimes * args_.seconds));
    if (registered) queue.unregister_memory(memory_.get());
    if (result.error) raise(result.error, "read and write the file in " + path_);
    return result.rate;
  }

  static std::chrono::nanoseconds length(double seconds) { return std::chrono::nanoseconds(int64_t(seconds * 1e9)); }

  const BenchIoArgs& args_;
  const uint64_t bytes_;
  const std::shared_ptr<char> memory_;
  BenchFile file_;
  const std::string path_;
};

// As a manifest anywhere can name it: the directory itself, symbolic links resolved.
std::string absolute(const std::string& path) {
  std::error_code error;
  const std::string found = std::filesystem::canonical(path, error);
  if (error) raise(error.value(), path);
  if (found.find(',') != std::string::npos) raise(0, found + ": nvme_path separates directories by commas");
  return found;
}

bool is_chosen(const DiskResult& disk, const Rates& r) {
  return r.depth == disk.advice.chosen().depth && r.piece == disk.advice.chosen().piece;
}

void print_table(const DiskResult& disk) {
  std::cout << disk.path << ": " << disk.engine << ", alignment " << disk.alignment
            << (disk.direct ? "" : ", no direct I/O: the page cache is measured, too") << "\n"
            << (disk.in_memory
                    ? "warning: it lies in RAM (tmpfs): this measures no disk, and tmpfs takes transfers that "
                      "a disk's file system refuses as not aligned\n"
                    : "")
            << "  depth   piece KiB    read MB/s   write MB/s   mixed MB/s  +- %\n"
            << std::fixed << std::setprecision(0);
  for (const Rates& r : disk.rates) {
    std::cout << std::setw(7) << r.depth << std::setw(12) << r.piece / 1024 << std::setw(13) << r.read / 1e6
              << std::setw(13) << r.write / 1e6 << std::setw(13) << r.mixed / 1e6 << std::setw(6) << r.spread * 100
              << (is_chosen(disk, r) ? "  <-\n" : "\n");
  }
}

// The pipeline's settings and rates: the default's, and the candidate's where it is another.
std::vector<std::pair<Rates, double>> pipelines(const Advice& advice) {
  std::vector<std::pair<Rates, double>> all = {{advice.by_default, advice.pipeline.by_default}};
  if (advice.has_candidate()) all.push_back({advice.candidate, advice.pipeline.candidate});
  return all;
}

void print_pipelines(const DiskResult& disk) {
  std::cout << "  the pipeline of an update: MB/s, seconds per 1e9 params, with the split master\n";
  for (const auto& [setting, rate] : pipelines(disk.advice)) {
    const StepSeconds seconds = seconds_per_billion(rate);
    std::cout << std::setw(7) << setting.depth << std::setw(12) << setting.piece / 1024 << std::setw(13) << rate / 1e6
              << std::setprecision(2) << std::setw(13) << seconds.full << std::setw(13) << seconds.split
              << std::setprecision(0) << (is_chosen(disk, setting) ? "  <-\n" : "\n");
  }
}

nlohmann::json to_json(const Rates& r) {
  return {{"depth", r.depth},
          {"piece_bytes", r.piece},
          {"read_bytes_per_s", r.read},
          {"write_bytes_per_s", r.write},
          {"mixed_bytes_per_s", r.mixed},
          {"mixed_spread", r.spread}};
}

nlohmann::json pipelines_to_json(const Advice& advice) {
  nlohmann::json all = nlohmann::json::array();
  for (const auto& [setting, rate] : pipelines(advice)) {
    const StepSeconds seconds = seconds_per_billion(rate);
    all.push_back({{"depth", setting.depth},
                   {"piece_bytes", setting.piece},
                   {"bytes_per_s", rate},
                   {"s_per_1e9_params", seconds.full},
                   {"s_per_1e9_params_split", seconds.split}});
  }
  return all;
}

std::string manifest_of(const std::vector<DiskResult>& disks) { return manifest_text({disks.begin(), disks.end()}); }

void print_json(const std::vector<DiskResult>& disks) {
  nlohmann::json all = {{"disks", nlohmann::json::array()}, {"manifest", manifest_of(disks)}};
  for (const DiskResult& disk : disks) {
    nlohmann::json one = {{"path", disk.path},
                          {"in_memory", disk.in_memory},
                          {"engine", disk.engine},
                          {"alignment", disk.alignment},
                          {"direct", disk.direct},
                          {"noise", disk.advice.noise},
                          {"advice", disk.advice.reason},
                          {"chosen", to_json(disk.advice.chosen())},
                          {"pipeline", pipelines_to_json(disk.advice)},
                          {"rates", nlohmann::json::array()}};
    for (const Rates& r : disk.rates) one["rates"].push_back(to_json(r));
    all["disks"].push_back(one);
  }
  std::cout << all.dump(2) << "\n";
}

void check_room(const std::string& directory, uint64_t bytes) {
  struct statvfs s {};
  if (::statvfs(directory.c_str(), &s) != 0) raise(errno, "ask for free space of " + directory);
  const uint64_t free = uint64_t{s.f_bavail} * s.f_frsize;
  if (s.f_blocks == 0 || free >= bytes) return;  // no blocks: a file system that does not say
  raise(0, directory + ": needs " + mib(bytes) + ", " + mib(free) + " are free; --file-mib takes less");
}

// Every path as its disk; raises for one that cannot be used, before anything is written.
std::vector<std::string> directories(const std::vector<std::string>& paths, uint64_t bytes) {
  std::vector<std::string> found;
  for (const std::string& path : paths) {
    found.push_back(absolute(path));
    if (std::count(found.begin(), found.end(), found.back()) > 1) raise(0, found.back() + " is named twice");
    check_room(found.back(), bytes);
  }
  return found;
}

}  // namespace

int bench_io(const BenchIoArgs& args) {
  const std::shared_ptr<char> memory = host_memory::allocate_shared(kMemory);
  if (!memory) return report({STRATA_RESOURCE_EXHAUSTED, "no memory for " + std::to_string(kMemory) + " bytes"});
  host_memory::touch(memory.get(), kMemory);
  std::vector<DiskResult> disks;
  try {
    for (const std::string& path : directories(args.paths, args.file_mib * kMiB)) {
      disks.push_back(Bench(args, path, memory).run());
      if (!args.json) print_table(disks.back()), print_pipelines(disks.back());
    }
  } catch (const Failure& f) {
    return report({STRATA_UNAVAILABLE, f.what + (f.error ? std::string(": ") + std::strerror(f.error) : "")});
  }
  if (args.json) {
    print_json(disks);
  } else {
    std::cout << "\nIn the manifest:\n\n" << manifest_of(disks);
  }
  return 0;
}

}  // namespace strata::cli
