// memory.h - what device_cuda has handed out: device memory from a pool, page-locked host memory, each under a budget.
//
// Every method expects the device to be current (cuda_kit::Context::Scope) and may be called from any thread: a mutex
// guards the lists and is held over the driver's work, which is for the planning phase; a step allocates nothing.
#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "cuda_kit/memory.h"

namespace strata::device_cuda {

inline constexpr uint64_t kAlignment = 256;
inline constexpr uint64_t kPinnedAlignment = 4096;

class Memory {
 public:
  // 0: no budget.
  Memory(int ordinal, uint64_t device_budget, uint64_t pinned_budget);
  ~Memory();
  Memory(const Memory&) = delete;

  // Usable on every stream at return. Throws RESOURCE_EXHAUSTED with the bytes wanted and free. 0 bytes give NULL.
  void* allocate(uint64_t bytes);
  void* allocate_pinned(uint64_t bytes);
  // False when it was not given out here, or not any more. Nothing enqueued may still use the memory.
  bool release(void* ptr);
  bool release_pinned(void* ptr);

  struct Bytes {
    uint64_t total, free;
  };
  Bytes device_bytes();  // of the device, or of the budget where that is less

  cuda_kit::Pool& pool() { return pool_; }

 private:
  struct Handed {
    std::unordered_map<void*, uint64_t> pieces;  // address to bytes
    uint64_t bytes = 0;
    uint64_t budget = 0;

    uint64_t left() const { return budget == 0 ? UINT64_MAX : budget - bytes; }
    void add(void* ptr, uint64_t size);
    bool remove(void* ptr);
  };
  Bytes device_bytes_locked() const;
  [[noreturn]] void out_of_device_memory(uint64_t bytes) const;

  const int ordinal_;
  cuda_kit::Pool pool_;
  cudaStream_t stream_ = nullptr;  // orders what the pool does; no kernel runs on it
  std::mutex mutex_;
  Handed device_, pinned_;
};

}  // namespace strata::device_cuda
