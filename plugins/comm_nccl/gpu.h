// gpu.h - what comm_nccl asks of the GPU besides NCCL: memory, streams, marks on them, and sums in rank order.
//
// All of CUDA is behind this class, so that a test can put another GPU in its place. Failures are thrown.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "strata/types.h"

namespace comm_nccl {

// What the ranks sent for one sum: rank r's elements at slots + slot_of(r) * stride, but this rank's own at `own`.
struct Parts {
  const char* own;
  const char* slots;
  uint64_t stride;
  int rank;
  int world;
};

class Gpu {
 public:
  // The GPU `device_id`, or the local rank's where it is -1. All kernels are loaded when this returns: the driver may
  // wait for running kernels before it loads one, and a collective runs until its peers come.
  static std::unique_ptr<Gpu> open(int64_t device_id, int32_t local_rank);
  ~Gpu();

  int ordinal() const;
  // Makes this GPU the current one of the thread until the result goes.
  std::shared_ptr<void> enter() const;

  struct Place {
    cudaStream_t stream;
    bool wait;  // the caller's call ends when the work does
  };
  // The caller's stream, or our own.
  Place place(const strata_stream* stream) const;
  cudaStream_t own_stream() const;
  // INVALID_ARGUMENT when the GPU cannot read `ptr`.
  void require_reach(const void* ptr, const char* what) const;

  void* allocate(uint64_t bytes);
  void release(void* ptr);
  void zero(void* ptr, uint64_t bytes);  // done at return

  // A point on a stream, to ask about later. Forgotten marks are used again.
  cudaEvent_t mark(cudaStream_t stream);
  bool reached(cudaEvent_t mark) const;
  void forget(cudaEvent_t mark);
  void wait_for(cudaStream_t stream, cudaEvent_t mark);
  // Calls fn(arg, error) once the stream comes to this point; `error` is NULL or the device's words, [call].
  void when_reached(cudaStream_t stream, void (*fn)(void* arg, const char* error), void* arg);

  void copy(void* out, const void* in, uint64_t bytes, cudaStream_t stream);
  // As libs/rank_sum: fp32, rank order, rounded once. `out` may be parts.own when the dtypes are the same.
  void sum(const Parts& parts, strata_dtype in_dtype, void* out, strata_dtype out_dtype, uint64_t count,
           cudaStream_t stream);

 private:
  struct State;
  explicit Gpu(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace comm_nccl
