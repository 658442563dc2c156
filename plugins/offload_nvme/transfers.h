// transfers.h - moves bytes between regions and memory.
//
// Whole blocks with memory that is aligned as the disks want it go straight between the two, all extents at once. What
// is left at either end, or lies crooked in memory, goes through a buffer of this instance, done when the call returns:
// its first and last block are read, changed and written. One such transfer at a time, so that neighbours who share a
// block do not undo each other.
//
// With checksums, each block's hash is taken before it is written and compared after it is read.
#pragma once

#include <atomic>
#include <mutex>

#include "plugin_kit/error.h"
#include "regions.h"

namespace strata::offload_nvme {

class Transfers {
 public:
  Transfers(const strata_host* host, const Regions& regions, uint64_t memory_alignment);
  Transfers(const Transfers&) = delete;

  static constexpr uint32_t kMostInFlight = 1024;
  static uint64_t host_bytes();  // that it keeps
  bool is_full() const { return in_flight_.load(std::memory_order_relaxed) >= kMostInFlight; }

  // `done` NULL: the bytes have moved on return. Raises what can be known before anything is under way.
  void move(bool write, const std::shared_ptr<Region>& region, uint64_t offset, uint64_t bytes, char* buffer,
            strata_event* done);

 private:
  struct Job;
  using EndFn = std::function<void(const plugin_kit::Error&)>;
  // `memory` keeps `buffer`; NULL: the host does.
  void start(bool write, const std::shared_ptr<Region>& region, uint64_t offset, uint64_t bytes, char* buffer,
             std::shared_ptr<const void> memory, EndFn ended);
  void move_now(bool write, const std::shared_ptr<Region>& region, uint64_t offset, uint64_t bytes, char* buffer,
                std::shared_ptr<const void> memory);
  void by_buffer(bool write, const std::shared_ptr<Region>& region, uint64_t offset, uint64_t bytes, char* memory);
  void end_part(const std::shared_ptr<Job>& job, const Places::Part& part, int error, uint64_t moved);
  void compare_hashes(Job* job) const;

  const strata_host* host_;
  const Regions& regions_;
  const strata_sync_api* sync_;
  const uint64_t block_, memory_alignment_;
  std::atomic<uint32_t> in_flight_{0};
  std::mutex buffer_mutex_;
  std::shared_ptr<char> buffer_;  // made when it is first needed
};

}  // namespace strata::offload_nvme
