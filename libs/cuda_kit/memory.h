// memory.h - device memory of one GPU from a pool that keeps what it got, and what kernels may be pointed at.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace strata::cuda_kit {

// A stream-ordered pool. Freed memory stays in it: after the first step no allocation reaches the driver. The caller
// has made the device current. Any thread.
class Pool {
 public:
  explicit Pool(int ordinal);
  ~Pool();
  Pool(const Pool&) = delete;

  // Usable by work enqueued on `stream` from here on; 256-aligned at least. The result is CUDA's, for the caller to
  // put into words: cudaErrorMemoryAllocation when there is not enough.
  cudaError_t allocate(void** out, uint64_t bytes, cudaStream_t stream);
  // Reused by other streams only when `stream` has come to this point.
  cudaError_t release(void* ptr, cudaStream_t stream) { return cudaFreeAsync(ptr, stream); }

  // Bytes taken from the device and not handed out.
  uint64_t slack() const;

 private:
  cudaMemPool_t pool_ = nullptr;
};

// Memory of a pool for the length of a call, in the order of a stream.
class Scratch {
 public:
  Scratch(Pool& pool, uint64_t bytes, cudaStream_t stream);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  void* data() const { return data_; }

 private:
  Pool& pool_;
  cudaStream_t stream_;
  void* data_ = nullptr;
};

// Whether kernels of GPU `ordinal` can be given this pointer: its own memory, or page-locked host memory. Ordinary host
// memory cannot, though some systems would allow it: a step there is a hundred times slower than it looks.
bool kernels_reach(const void* ptr, int ordinal);

// Throws INVALID_ARGUMENT naming `what` when they do not, or when it is not at a multiple of `alignment`.
void require_reach(const void* ptr, int ordinal, const char* what, uint64_t alignment = 1);

}  // namespace strata::cuda_kit
