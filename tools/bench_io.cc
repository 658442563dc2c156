// bench_io.cc - `strata bench io`: what disks give to the NVMe tier, and the settings that get most of it.
//
// Each path is read, written, and both at once, through the queue that the tier uses (libs/io), at several depths and
// piece sizes: a file of its own, written once before, is moved for a fixed time each. The recommendation is the
// smallest depth and piece within 3 percent of the best mixed rate, and shares in proportion to the mixed rates.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <iomanip>
#include <iostream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <vector>

#include "host_memory/host_memory.h"
#include "io/alignment.h"
#include "io/queue.h"
#include "tools/commands.h"

namespace strata::cli {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr unsigned kDepths[] = {1, 4, 16, 32};
constexpr uint64_t kPieces[] = {kMiB / 8, kMiB, 4 * kMiB};
constexpr uint64_t kMemory = 128 * kMiB;  // the deepest queue of the largest pieces
constexpr double kGoodEnough = 0.97;

struct Rates {
  unsigned depth;
  uint64_t piece;
  double read, write, mixed;  // bytes per second
};

struct DiskResult {
  std::string path, engine;
  uint64_t alignment = 0;
  bool direct = true;
  std::vector<Rates> rates;
  Rates best{};
};

struct Failure {
  int error;
  std::string what;
};

[[noreturn]] void raise(int error, const std::string& what) { throw Failure{error, what}; }

// The file that is moved; gone when this is.
class BenchFile {
 public:
  BenchFile(const std::string& directory, uint64_t bytes)
      : path_(directory + "/strata-bench-io-" + std::to_string(::getpid())) {
    const int flags = O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC;
    fd_ = std::make_shared<io::Fd>(::open(path_.c_str(), flags | O_DIRECT, 0600));
    direct_ = bool(*fd_);
    if (!direct_ && errno == EINVAL) fd_ = std::make_shared<io::Fd>(::open(path_.c_str(), flags, 0600));
    if (!*fd_) raise(errno, "make " + path_);
    const int error = ::posix_fallocate(fd_->get(), 0, static_cast<off_t>(bytes));
    if (error) {
      ::unlink(path_.c_str());
      raise(error, "take " + std::to_string(bytes) + " bytes in " + path_);
    }
    if (direct_ && io::find_direct_rule(fd_->get(), &rule_) != 0) rule_ = {};
  }
  ~BenchFile() { ::unlink(path_.c_str()); }
  BenchFile(const BenchFile&) = delete;
  const std::shared_ptr<io::Fd>& fd() const { return fd_; }
  bool direct() const { return direct_; }
  uint64_t alignment() const { return rule_.offset; }

 private:
  const std::string path_;
  std::shared_ptr<io::Fd> fd_;
  bool direct_ = true;
  io::DirectRule rule_;
};

class Bench {
 public:
  Bench(const BenchIoArgs& args, const std::string& path, char* memory)
      : seconds_(args.seconds), bytes_(args.file_mib * kMiB), memory_(memory), file_(path, bytes_), path_(path) {}

  DiskResult run() {
    DiskResult result;
    result.path = path_;
    result.alignment = file_.alignment();
    result.direct = file_.direct();
    {
      io::Queue queue(options(32, kMiB));
      result.engine = queue.uses_ring() ? "io_uring" : "threads (" + queue.remark() + ")";
      file_slot_ = queue.attach(file_.fd());
      move(queue, true, true, 32, kMiB, bytes_ / kMiB);  // what was never written reads faster than it should
    }
    for (const unsigned depth : kDepths) {
      for (const uint64_t piece : kPieces) {
        io::Queue queue(options(depth, piece));
        file_slot_ = queue.attach(file_.fd());
        Rates r{depth, piece, 0, 0, 0};
        r.read = move(queue, false, false, depth, piece, 0);
        r.write = move(queue, true, true, depth, piece, 0);
        r.mixed = move(queue, false, true, depth, piece, 0);
        result.rates.push_back(r);
      }
    }
    result.best = best_of(result.rates);
    return result;
  }

 private:
  static io::Queue::Options options(unsigned depth, uint64_t piece) {
    io::Queue::Options options;
    options.depth = depth;
    options.block_bytes = piece;
    options.deadline = std::chrono::seconds(60);
    return options;
  }

  // `count` pieces, or 0: as many as fit into the time. Bytes per second; first and second are whether pieces are
  // written, in turns.
  double move(io::Queue& queue, bool first, bool second, unsigned depth, uint64_t piece, uint64_t count) {
    std::mutex mutex;
    std::condition_variable ended;
    std::vector<char*> places;
    for (unsigned i = 0; i < depth; ++i) places.push_back(memory_ + i * piece);
    uint64_t moved = 0;
    int error = 0;
    const auto begin = std::chrono::steady_clock::now();
    const auto until = begin + std::chrono::duration<double>(seconds_);
    std::unique_lock lock(mutex);
    for (uint64_t n = 0; (count ? n < count : std::chrono::steady_clock::now() < until) && !error; ++n) {
      ended.wait(lock, [&] { return !places.empty(); });
      char* const place = places.back();
      places.pop_back();
      lock.unlock();
      queue.submit({n % 2 ? second : first, file_slot_, n % (bytes_ / piece) * piece, place, piece,
                    [&, place](int e, uint64_t bytes) {
                      std::lock_guard inner(mutex);
                      moved += bytes;
                      if (!error) error = e;
                      places.push_back(place);
                      ended.notify_all();
                    }});
      lock.lock();
    }
    ended.wait(lock, [&] { return places.size() == depth; });
    if (error) raise(error, std::string(first ? "write" : "read") + " the file in " + path_);
    return static_cast<double>(moved) / std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

  static Rates best_of(std::vector<Rates> rates) {
    double most = 0;
    for (const Rates& r : rates) most = std::max(most, r.mixed);
    std::stable_sort(rates.begin(), rates.end(), [](const Rates& a, const Rates& b) {
      return std::pair(a.depth, a.piece) < std::pair(b.depth, b.piece);
    });
    return *std::find_if(rates.begin(), rates.end(), [most](const Rates& r) { return r.mixed >= kGoodEnough * most; });
  }

  const double seconds_;
  const uint64_t bytes_;
  char* const memory_;
  BenchFile file_;
  io::QueueFile file_slot_;
  const std::string path_;
};

// The settings of the manifest that go with the results.
std::string recommend(const std::vector<DiskResult>& disks) {
  unsigned depth = 1;
  uint64_t piece = 0;
  std::string paths, weights;
  for (const DiskResult& disk : disks) {
    depth = std::max(depth, disk.best.depth);
    piece = std::max(piece, disk.best.piece);
    paths += (paths.empty() ? "" : ", ") + disk.path;
    weights += (weights.empty() ? "" : ", ") + std::to_string(static_cast<int64_t>(disk.best.mixed / 1e6 + 1));
  }
  std::string text = "[zero_optimization.offload_optimizer]\ndevice = \"nvme\"\nnvme_path = \"" + paths +
                     "\"\n\n[plugin.offload_nvme]\nqueue_depth = " + std::to_string(depth) +
                     "\nblock_bytes = " + std::to_string(piece) + "\n";
  if (disks.size() > 1) text += "weights = \"" + weights + "\"\n";
  return text;
}

void print_table(const DiskResult& disk) {
  std::cout << disk.path << ": " << disk.engine << ", alignment " << disk.alignment
            << (disk.direct ? "" : ", no direct I/O: the page cache is measured, too") << "\n"
            << "  depth   piece KiB    read MB/s   write MB/s   mixed MB/s\n"
            << std::fixed << std::setprecision(0);
  for (const Rates& r : disk.rates) {
    std::cout << std::setw(7) << r.depth << std::setw(12) << r.piece / 1024 << std::setw(13) << r.read / 1e6
              << std::setw(13) << r.write / 1e6 << std::setw(13) << r.mixed / 1e6
              << (r.depth == disk.best.depth && r.piece == disk.best.piece ? "  <-\n" : "\n");
  }
}

nlohmann::json to_json(const Rates& r) {
  return {{"depth", r.depth},
          {"piece_bytes", r.piece},
          {"read_bytes_per_s", r.read},
          {"write_bytes_per_s", r.write},
          {"mixed_bytes_per_s", r.mixed}};
}

void print_json(const std::vector<DiskResult>& disks) {
  nlohmann::json all = {{"disks", nlohmann::json::array()}, {"manifest", recommend(disks)}};
  for (const DiskResult& disk : disks) {
    nlohmann::json one = {{"path", disk.path},     {"engine", disk.engine},      {"alignment", disk.alignment},
                          {"direct", disk.direct}, {"best", to_json(disk.best)}, {"rates", nlohmann::json::array()}};
    for (const Rates& r : disk.rates) one["rates"].push_back(to_json(r));
    all["disks"].push_back(one);
  }
  std::cout << all.dump(2) << "\n";
}

}  // namespace

int bench_io(const BenchIoArgs& args) {
  const auto free = [](char* p) { host_memory::release(p, kMemory); };
  const std::unique_ptr<char, decltype(free)> memory(static_cast<char*>(host_memory::allocate(kMemory)), free);
  if (!memory) return report({STRATA_RESOURCE_EXHAUSTED, "no memory for " + std::to_string(kMemory) + " bytes"});
  host_memory::touch(memory.get(), kMemory);
  std::vector<DiskResult> disks;
  for (const std::string& path : args.paths) {
    try {
      disks.push_back(Bench(args, path, memory.get()).run());
    } catch (const Failure& f) {
      return report({STRATA_UNAVAILABLE, f.what + ": " + std::strerror(f.error)});
    }
    if (!args.json) print_table(disks.back());
  }
  if (args.json) {
    print_json(disks);
  } else {
    std::cout << "\nIn the manifest (the smallest depth and piece within 3 % of the best mixed rate):\n\n"
              << recommend(disks);
  }
  return 0;
}

}  // namespace strata::cli
