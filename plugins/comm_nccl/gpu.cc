// gpu.cc - see gpu.h.
#include "gpu.h"

#include <mutex>
#include <vector>

#include "cuda_kit/context.h"
#include "cuda_kit/error.h"
#include "cuda_kit/memory.h"
#include "cuda_kit/stream.h"
#include "kernels.h"

namespace comm_nccl {

using strata::cuda_kit::check;
using strata::cuda_kit::Context;

struct Gpu::State {
  explicit State(Context opened) : context(std::move(opened)) {}
  Context context;
  cudaStream_t own = nullptr;
  std::mutex mutex;  // marks are forgotten by the watcher
  std::vector<cudaEvent_t> marks;
};

std::unique_ptr<Gpu> Gpu::open(int64_t device_id, int32_t local_rank) {
  auto state = std::make_unique<State>(Context::open(device_id, local_rank));
  std::unique_ptr<Gpu> gpu(new Gpu(std::move(state)));
  const auto current = gpu->enter();
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "priorities of streams");
  check(cudaStreamCreateWithPriority(&gpu->state_->own, cudaStreamNonBlocking, greatest), "making a stream");
  check(load_sums(), "loading the kernels of sums");
  return gpu;
}

Gpu::Gpu(std::unique_ptr<State> state) : state_(std::move(state)) {}

Gpu::~Gpu() {
  const auto current = enter();
  for (cudaEvent_t mark : state_->marks) cudaEventDestroy(mark);
  if (state_->own) cudaStreamDestroy(state_->own);
}

int Gpu::ordinal() const { return state_->context.ordinal(); }

std::shared_ptr<void> Gpu::enter() const { return std::make_shared<Context::Scope>(state_->context); }

Gpu::Place Gpu::place(const strata_stream* stream) const {
  const auto work = strata::cuda_kit::work_on(stream, state_->own, ordinal());
  return {work.stream, work.wait};
}

cudaStream_t Gpu::own_stream() const { return state_->own; }

void Gpu::require_reach(const void* ptr, const char* what) const {
  strata::cuda_kit::require_reach(ptr, ordinal(), what);
}

void* Gpu::allocate(uint64_t bytes) {
  void* out = nullptr;
  check(cudaMalloc(&out, bytes), "allocating ", bytes, " bytes on GPU ", ordinal());
  return out;
}

void Gpu::release(void* ptr) { check(cudaFree(ptr), "freeing ", ptr); }

void Gpu::zero(void* ptr, uint64_t bytes) {
  check(cudaMemsetAsync(ptr, 0, bytes, state_->own), "clearing ", bytes, " bytes");
  check(cudaStreamSynchronize(state_->own), "clearing ", bytes, " bytes");
}

cudaEvent_t Gpu::mark(cudaStream_t stream) {
  cudaEvent_t event = nullptr;
  {
    std::lock_guard lock(state_->mutex);
    if (!state_->marks.empty()) {
      event = state_->marks.back();
      state_->marks.pop_back();
    }
  }
  if (!event) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "making an event");
  const cudaError_t error = cudaEventRecord(event, stream);
  if (error != cudaSuccess) forget(event);
  check(error, "recording an event");
  return event;
}

bool Gpu::reached(cudaEvent_t mark) const {
  const cudaError_t error = cudaEventQuery(mark);
  if (error == cudaErrorNotReady) {
    cudaGetLastError();  // an answer, not a failure
    return false;
  }
  check(error, "GPU ", ordinal());
  return true;
}

void Gpu::forget(cudaEvent_t mark) {
  std::lock_guard lock(state_->mutex);
  state_->marks.push_back(mark);
}

void Gpu::wait_for(cudaStream_t stream, cudaEvent_t mark) {
  check(cudaStreamWaitEvent(stream, mark, 0), "making a stream wait");
}

namespace {

struct Callback {
  void (*fn)(void*, const char*);
  void* arg;
};

void CUDART_CB call_back(cudaStream_t, cudaError_t error, void* arg) {
  const std::unique_ptr<Callback> callback(static_cast<Callback*>(arg));
  callback->fn(callback->arg, error == cudaSuccess ? nullptr : cudaGetErrorString(error));
}

}  // namespace

// Not cudaLaunchHostFunc, which is not called after an error of the device; see cuda_kit/stream.h.
void Gpu::when_reached(cudaStream_t stream, void (*fn)(void*, const char*), void* arg) {
  auto callback = std::make_unique<Callback>(Callback{fn, arg});
  check(cudaStreamAddCallback(stream, call_back, callback.get(), 0), "asking to be called when a stream is done");
  callback.release();
}

void Gpu::copy(void* out, const void* in, uint64_t bytes, cudaStream_t stream) {
  check(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDefault, stream), "copying ", bytes, " bytes");
}

void Gpu::sum(const Parts& parts, strata_dtype in_dtype, void* out, strata_dtype out_dtype, uint64_t count,
              cudaStream_t stream) {
  check(launch_sum(parts, in_dtype, out, out_dtype, count, stream), "the sum of ", count, " elements");
}

}  // namespace comm_nccl
