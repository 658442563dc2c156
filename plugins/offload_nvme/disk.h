// disk.h - one nvme_path of one rank: its directory, its queue, and the segment files in which regions get room.
//
// A segment is a file of at most `segment_bytes`; runs of it are allotted in whole blocks, with their disk space taken
// at once (fallocate), so that a later write finds room. A freed run is used again; a segment without runs is removed.
//
// A segment that somebody else links (a checkpoint keeps its bytes) is as good as read-only: nothing of it is allotted,
// it does not grow, and whoever wants to write what he has of it takes fresh room. What is free in it until it is let
// go, or the link is, is spare.
//
// What makes, grows and removes files ends at the deadline of transfers (patience.h).
//
// Threads: any, except for `measure` and what registers memory.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "io/alignment.h"
#include "io/queue.h"
#include "job_dir.h"

namespace strata::offload_nvme {

struct Segment {
  std::string path;
  io::QueueFile file;
  uint64_t end = 0, used = 0;
  std::map<uint64_t, uint64_t> holes;  // offset -> bytes
};

struct Run {
  Segment* segment = nullptr;
  uint64_t offset = 0, bytes = 0;
};

class Disk {
 public:
  struct Settings {
    uint64_t segment_bytes = uint64_t{1} << 30;
    bool fast_init = false;
    io::Queue::Options queue;
    uint64_t probe_bytes = uint64_t{64} << 20;  // of the file that is written and read at open
  };
  // Makes the directory, finds out how files are accessed, starts the queue. Raises when the path cannot be used.
  Disk(std::string path, const Owner& owner, const Settings& settings, const LogFn& log);
  Disk(const Disk&) = delete;

  const std::string& path() const { return path_; }
  const io::DirectRule& rule() const { return rule_; }
  io::Queue& queue() { return *queue_; }
  static uint64_t host_bytes();  // that it keeps
  // What is free on its file system, which one that is, and what will be free once nobody measures at this path.
  struct Room {
    uint64_t free, probes;
    unsigned long file_system;
  };
  Room room();
  uint64_t free_bytes() const;
  std::string text_of(int error) const;  // of a transfer

  // Transfers of this memory, which stays until it is unregistered, cost less from now on, if the kernel allows.
  void register_memory(void* memory, uint64_t bytes);
  void unregister_memory(void* memory) { queue_->unregister_memory(memory); }

  // `bytes` is at most segment_bytes, in multiples of `block`. Contents zero, if asked for. Raises RESOURCE_EXHAUSTED.
  Run take(uint64_t bytes, bool zeros);
  void give(const Run& run);
  void copy(const Run& from, const Run& to, uint64_t offset, uint64_t bytes);
  bool is_linked(const Segment& segment) const;  // or cannot be asked
  uint64_t spare_bytes() const;

  static constexpr unsigned kMeasured = 8;  // pieces on their way: enough for any disk to be as fast as it can
  struct Speed {
    double read = 0, write = 0, mixed = 0;  // bytes per second
    double latency = 0;                     // seconds, of one small read
  };
  // Writes and reads the probe file for about this long, and removes it; 0: removes it. Raises what the disk says.
  // Takes kMeasured pieces of a MiB meanwhile.
  Speed measure(std::chrono::milliseconds length);

 private:
  int open_file(const std::string& file, int flags, std::shared_ptr<const io::Fd>* out);
  int allocate(const Segment& segment, int mode, uint64_t offset, uint64_t bytes);
  void open_probe();
  void remove_probe();
  void start_queue();
  Run allot(uint64_t bytes, bool* used_before);
  Segment* add_segment();
  void remove_segment(Segment* segment);
  void grow(Segment* segment, uint64_t bytes);
  void zero(const Run& run, bool used_before);
  // `memory` has kMeasured pieces; `filled` is how far the file has been written.
  double rate(bool read, bool write, std::chrono::nanoseconds length, const std::shared_ptr<char>& memory,
              uint64_t* filled);
  double latency(const std::shared_ptr<char>& memory, uint64_t filled);

  const std::string path_;
  const Settings settings_;
  const LogFn log_;
  Patience patience_;
  JobDir directory_;
  bool direct_ = true;     // O_DIRECT
  bool allocates_ = true;  // fallocate
  bool refused_memory_ = false;
  io::DirectRule rule_;
  const std::shared_ptr<char> zeros_;
  io::QueueFile probe_;
  uint64_t probe_bytes_ = 0;
  uint64_t segments_made_ = 0;
  mutable std::mutex mutex_;  // of the segments; not held while the queue is waited for, whose threads call `give`
  std::vector<std::unique_ptr<Segment>> segments_;
  std::unique_ptr<io::Queue> queue_;  // goes first
};

// A run of a disk; it is given back when the last who uses it lets go.
struct Room {
  Room(Disk* d, const Run& r) : disk(d), run(r) {}
  ~Room() { disk->give(run); }
  Room(const Room&) = delete;

  Disk* const disk;
  const Run run;
  mutable std::atomic<uint32_t> writes{0};  // under way
};

}  // namespace strata::offload_nvme
