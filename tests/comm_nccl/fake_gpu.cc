// fake_gpu.cc - comm_nccl's GPU made of host memory and threads; see plugins/comm_nccl/gpu.h for what each call means.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>

#include "fake_stream.h"
#include "plugin_kit/error.h"
#include "plugins/comm_nccl/gpu.h"
#include "rank_sum/rank_sum.h"

namespace comm_nccl {
namespace {

using Mark = std::shared_ptr<std::atomic<bool>>;

fake::Stream& stream_of(cudaStream_t stream) { return *reinterpret_cast<fake::Stream*>(stream); }

const Mark& mark_of(cudaEvent_t mark) { return *reinterpret_cast<Mark*>(mark); }

}  // namespace

struct Gpu::State {
  fake::Stream own;
  std::mutex mutex;
  std::list<Mark> marks;
};

// Local rank 7 has no GPU, so that a test can see what a rank without one does.
std::unique_ptr<Gpu> Gpu::open(int64_t device_id, int32_t) {
  if (device_id == 7) strata::plugin_kit::raise(STRATA_FAILED_PRECONDITION, "no GPU is visible");
  return std::unique_ptr<Gpu>(new Gpu(std::make_unique<State>()));
}

Gpu::Gpu(std::unique_ptr<State> state) : state_(std::move(state)) {}
Gpu::~Gpu() = default;

int Gpu::ordinal() const { return 0; }
std::shared_ptr<void> Gpu::enter() const { return nullptr; }
cudaStream_t Gpu::own_stream() const { return reinterpret_cast<cudaStream_t>(&state_->own); }

Gpu::Place Gpu::place(const strata_stream* stream) const {
  if (!stream || stream->domain == STRATA_CPU) return {own_stream(), true};
  return {static_cast<cudaStream_t>(stream->native), false};
}

void Gpu::require_reach(const void* ptr, const char* what) const {
  if (reinterpret_cast<uintptr_t>(ptr) < 4096) {
    strata::plugin_kit::raise(STRATA_INVALID_ARGUMENT, what, " is neither memory of GPU 0 nor page-locked");
  }
}

void* Gpu::allocate(uint64_t bytes) { return std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096); }
void Gpu::release(void* ptr) { std::free(ptr); }
void Gpu::zero(void* ptr, uint64_t bytes) { std::memset(ptr, 0, bytes); }

cudaEvent_t Gpu::mark(cudaStream_t stream) {
  const auto mark = std::make_shared<std::atomic<bool>>(false);
  stream_of(stream).push([mark] { mark->store(true); });
  std::lock_guard lock(state_->mutex);
  state_->marks.push_back(mark);
  return reinterpret_cast<cudaEvent_t>(&state_->marks.back());
}

bool Gpu::reached(cudaEvent_t mark) const { return mark_of(mark)->load(); }

void Gpu::forget(cudaEvent_t mark) {
  std::lock_guard lock(state_->mutex);
  state_->marks.remove_if([&](const Mark& m) { return &m == &mark_of(mark); });
}

void Gpu::wait_for(cudaStream_t stream, cudaEvent_t mark) {
  stream_of(stream).push([waited = mark_of(mark)] {
    while (!waited->load()) std::this_thread::yield();
  });
}

void Gpu::when_reached(cudaStream_t stream, void (*fn)(void*, const char*), void* arg) {
  stream_of(stream).push([fn, arg] { fn(arg, nullptr); });
}

void Gpu::copy(void* out, const void* in, uint64_t bytes, cudaStream_t stream) {
  stream_of(stream).push([out, in, bytes] { std::memcpy(out, in, bytes); });
}

void Gpu::sum(const Parts& parts, strata_dtype in_dtype, void* out, strata_dtype out_dtype, uint64_t count,
              cudaStream_t stream) {
  stream_of(stream).push([=] {
    std::vector<const void*> in;
    for (int r = 0; r < parts.world; ++r) {
      in.push_back(r == parts.rank ? parts.own : parts.slots + static_cast<uint64_t>(r) * parts.stride);
    }
    strata::rank_sum::sum(strata::rank_sum::Isa::kScalar, in.data(), parts.world, in_dtype, out, out_dtype, count,
                          false);
  });
}

}  // namespace comm_nccl
