// memory.h - the memory of a simulated GPU: addresses that only device operations can read.
//
// There are two mappings of one size. What `alloc` returns is an address in the first, where nothing can be read or
// written: a host access ends in SIGSEGV. The same offset of the second holds the bytes, and `resolve` goes from one to
// the other. Fresh and freed memory is 0xFF in every byte, which is NaN in every float type. Between two allocations
// there is a gap that belongs to nobody, and an access that is not inside of one live allocation is an error.
//
// Allocations have an owner (the device or the collective that is open on this GPU), which frees what it left.
// Threads: any. Lookups share the lock, so that two operations on the device are ordered by the program under test and
// not by this class: a thread checker sees the race that a missing wait makes.
#pragma once

#include <cstdint>
#include <map>
#include <shared_mutex>

namespace gpu_sim {

// Host memory that an operation may touch.
enum class HostMemory { kPinned, kAny };

class Memory {
 public:
  static constexpr uint64_t kAlignment = 256;

  explicit Memory(uint64_t budget);
  ~Memory();
  Memory(const Memory&) = delete;

  // Both throw an Error; bytes 0 gives nullptr. `fill` is the byte that device memory is filled with.
  void* alloc(uint64_t bytes, uint64_t alignment, uint8_t fill, const void* owner);
  void* alloc_pinned(uint64_t bytes, const void* owner);
  // False when `ptr` is no allocation of that kind.
  bool free(const void* ptr);
  bool free_pinned(const void* ptr);
  void free_all_of(const void* owner);

  uint64_t budget() const { return budget_; }
  uint64_t free_bytes() const;
  bool is_device(const void* ptr) const;

  // Where [ptr, ptr + bytes) can be read and written. Throws an Error that says what is wrong with the range.
  char* resolve(const void* ptr, uint64_t bytes, HostMemory host) const;

 private:
  struct Block {
    uint64_t bytes;
    const void* owner;
  };
  using Blocks = std::map<uint64_t, Block>;  // by address; of device memory by offset
  static bool covers(const Blocks& blocks, uint64_t begin, uint64_t bytes);
  uint64_t find_gap(uint64_t bytes, uint64_t alignment) const;
  void erase(Blocks::iterator block);

  const uint64_t budget_;
  const uint64_t mapped_;
  char* addresses_;
  char* bytes_;
  mutable std::shared_mutex mutex_;
  Blocks blocks_, pinned_;
  uint64_t used_ = 0;
};

}  // namespace gpu_sim
