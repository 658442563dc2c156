// kernels.cu - the sum of what all ranks sent: widened to fp32, added in rank order from rank 0's own value, rounded
// once to nearest even, any NaN stored as the one of its type. The bits of libs/rank_sum.
#include "kernels.h"
#include "numbers/numbers.h"

namespace comm_nccl {
namespace {

using namespace strata::numbers;

constexpr int kThreads = 256;
constexpr int kElements = 8;  // of a thread at once: 16 bytes of 16-bit numbers
constexpr uint64_t kMaxBlocks = 2048;

struct F32 {
  using Raw = uint32_t;
  __device__ static float widen(Raw x) { return __uint_as_float(x); }
  __device__ static Raw narrow(float x) {
    const uint32_t bits = __float_as_uint(x);
    return is_nan(bits) ? kNaN32 : bits;
  }
};
struct Bf16 {
  using Raw = uint16_t;
  __device__ static float widen(Raw x) { return __uint_as_float(from_bf16(x)); }
  __device__ static Raw narrow(float x) { return to_bf16(__float_as_uint(x), STRATA_ROUND_EVEN); }
};
struct F16 {
  using Raw = uint16_t;
  __device__ static float widen(Raw x) { return __uint_as_float(from_f16(x)); }
  __device__ static Raw narrow(float x) { return to_f16(__float_as_uint(x), STRATA_ROUND_EVEN); }
};

template <class Raw>
struct alignas(16) Vector {
  Raw values[kElements];
};

template <class Raw>
__device__ const Raw* part_of(const Parts& parts, int rank) {
  return reinterpret_cast<const Raw*>(rank == parts.rank ? parts.own
                                                         : parts.slots + static_cast<uint64_t>(rank) * parts.stride);
}

template <class In, class Out>
__device__ typename Out::Raw sum_one(const Parts& parts, uint64_t i) {
  using Raw = typename In::Raw;
  float total = In::widen(part_of<Raw>(parts, 0)[i]);
  for (int r = 1; r < parts.world; ++r) total = __fadd_rn(total, In::widen(part_of<Raw>(parts, r)[i]));
  return Out::narrow(total);
}

// `vectors` groups of kElements by whole loads, which need aligned parts; the rest, or all, one by one.
template <class In, class Out>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(Parts parts, typename Out::Raw* out, uint64_t vectors, uint64_t count) {
  using RawIn = typename In::Raw;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  for (uint64_t v = first; v < vectors; v += step) {
    float total[kElements];
    for (int r = 0; r < parts.world; ++r) {
      const Vector<RawIn> in = reinterpret_cast<const Vector<RawIn>*>(part_of<RawIn>(parts, r))[v];
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        const float value = In::widen(in.values[k]);
        total[k] = r == 0 ? value : __fadd_rn(total[k], value);
      }
    }
    Vector<typename Out::Raw> result;
#pragma unroll
    for (int k = 0; k < kElements; ++k) result.values[k] = Out::narrow(total[k]);
    reinterpret_cast<Vector<typename Out::Raw>*>(out)[v] = result;
  }
  for (uint64_t i = vectors * kElements + first; i < count; i += step) out[i] = sum_one<In, Out>(parts, i);
}

bool aligned(const void* ptr) { return reinterpret_cast<uintptr_t>(ptr) % alignof(Vector<uint32_t>) == 0; }

template <class In, class Out>
cudaError_t launch(const Parts& parts, void* out, uint64_t count, cudaStream_t stream) {
  const bool whole = aligned(parts.own) && aligned(parts.slots) && parts.stride % 16 == 0 && aligned(out);
  const uint64_t vectors = whole ? count / kElements : 0;
  const uint64_t work = whole ? vectors + kElements : count;
  const uint64_t blocks = (work + kThreads - 1) / kThreads;
  sum_kernel<In, Out><<<static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreads, 0, stream>>>(
      parts, static_cast<typename Out::Raw*>(out), vectors, count);
  return cudaGetLastError();
}

template <class In>
cudaError_t launch_to(const Parts& parts, void* out, strata_dtype out_dtype, uint64_t count, cudaStream_t stream) {
  if (out_dtype == STRATA_F32) return launch<In, F32>(parts, out, count, stream);
  if (out_dtype == STRATA_BF16) return launch<In, Bf16>(parts, out, count, stream);
  return launch<In, F16>(parts, out, count, stream);
}

template <class In>
cudaError_t load_from() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, sum_kernel<In, F32>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, sum_kernel<In, Bf16>);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, sum_kernel<In, F16>);
  return error;
}

}  // namespace

cudaError_t load_sums() {
  cudaError_t error = load_from<F32>();
  if (error == cudaSuccess) error = load_from<Bf16>();
  if (error == cudaSuccess) error = load_from<F16>();
  return error;
}

cudaError_t launch_sum(const Parts& parts, strata_dtype in_dtype, void* out, strata_dtype out_dtype, uint64_t count,
                       cudaStream_t stream) {
  if (in_dtype == STRATA_F32) return launch_to<F32>(parts, out, out_dtype, count, stream);
  if (in_dtype == STRATA_BF16) return launch_to<Bf16>(parts, out, out_dtype, count, stream);
  return launch_to<F16>(parts, out, out_dtype, count, stream);
}

}  // namespace comm_nccl
