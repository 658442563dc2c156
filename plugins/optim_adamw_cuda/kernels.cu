// kernels.cu - one fused update: gradient, master, moments in; master, moments, weight out. See kernels.h.
//
// A thread takes four elements that lie together, one 16-byte access per fp32 array; single elements where a span is
// cut off, or where the arrays are not aligned alike. Loads come before stores of the same elements: the gradient and
// the weight may be the same memory.
#include <algorithm>

#include "adamw/formula.h"
#include "kernels.h"

namespace strata::adamw {
namespace {

constexpr unsigned kThreads = 256;
constexpr uint64_t kMaxBlocks = 0x7FFFFFFF;

template <int N>
__device__ void load(const float* p, float (&x)[N]) {
  if constexpr (N == 4) {
    const float4 four = *reinterpret_cast<const float4*>(p);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    x[0] = *p;
  }
}
template <int N>
__device__ void load(const uint16_t* p, uint16_t (&x)[N]) {
  if constexpr (N == 4) {
    const ushort4 four = *reinterpret_cast<const ushort4*>(p);
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    x[0] = *p;
  }
}
template <int N>
__device__ void store(float* p, const float (&x)[N]) {
  if constexpr (N == 4) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    *p = x[0];
  }
}
template <int N>
__device__ void store(uint16_t* p, const uint16_t (&x)[N]) {
  if constexpr (N == 4) {
    *reinterpret_cast<ushort4*>(p) = make_ushort4(x[0], x[1], x[2], x[3]);
  } else {
    *p = x[0];
  }
}

template <Grad G, int N>
__device__ void load_grad(const Job& job, uint64_t i, float (&g)[N]) {
  if constexpr (G == kGradF32) {
    load(static_cast<const float*>(job.grad) + i, g);
  } else {
    uint16_t raw[N];
    load(static_cast<const uint16_t*>(job.grad) + i, raw);
#pragma unroll
    for (int k = 0; k < N; ++k) g[k] = G == kGradBf16 ? from_bf16<One>(raw[k]) : from_f16<One>(raw[k]);
  }
}

template <Form M, int N>
__device__ void load_master(const Job& job, uint64_t i, float (&p)[N]) {
  if constexpr (M == kSplitBf16) {
    uint16_t high[N], low[N];
    load(static_cast<const uint16_t*>(job.weight) + i, high);
    load(static_cast<const uint16_t*>(job.master) + i, low);
#pragma unroll
    for (int k = 0; k < N; ++k) p[k] = join<One>(high[k], low[k]);
  } else {
    load(static_cast<const float*>(M == kSplitF32 ? job.weight : job.master) + i, p);
  }
}

// The master and the weight of canonical values.
template <Form M, int N>
__device__ void store_master(void* weight, void* master, uint64_t i, const float (&p)[N]) {
  if constexpr (M == kWholeF32 || M == kSplitF32) {
    store(static_cast<float*>(weight) + i, p);
  } else {
    uint16_t rounded[N];
#pragma unroll
    for (int k = 0; k < N; ++k) {
      rounded[k] = static_cast<uint16_t>(M == kWholeF16 ? f16_away<One>(p[k]) : bf16_away<One>(p[k]));
    }
    store(static_cast<uint16_t*>(weight) + i, rounded);
  }
  if constexpr (M == kSplitBf16) {
    uint16_t low[N];
#pragma unroll
    for (int k = 0; k < N; ++k) low[k] = static_cast<uint16_t>(__float_as_uint(p[k]));
    store(static_cast<uint16_t*>(master) + i, low);
  }
  if constexpr (!is_split(M)) store(static_cast<float*>(master) + i, p);
}

template <Grad G, Form M, int N>
__device__ void update_at(const Job& job, const Scalars<One>& s, uint64_t i) {
  float g[N], p[N], m[N], v[N];
  load_grad<G>(job, i, g);
  load_master<M>(job, i, p);
  load(job.exp_avg + i, m);
  load(job.exp_avg_sq + i, v);
#pragma unroll
  for (int k = 0; k < N; ++k) p[k] = update<One>(g[k], p[k], m[k], v[k], s);
  store(job.exp_avg + i, m);
  store(job.exp_avg_sq + i, v);
  store_master<M>(job.weight, job.master, i, p);
}

// The span of a tile. Spans without elements have no tiles and are never found.
__device__ const TiledSpan& span_of(const Job& job, uint64_t tile) {
  const TiledSpan* spans = job.spans ? job.spans : job.inline_spans;
  uint32_t low = 0, high = job.span_count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (spans[middle].first_tile <= tile ? low : high) = middle;
  }
  return spans[low];
}

template <Grad G, Form M>
__global__ void __launch_bounds__(kThreads) step(const __grid_constant__ Job job) {
  if (job.apply && *job.apply == 0) return;
  const TiledSpan& span = span_of(job, blockIdx.x);
  const float* f = (job.scalars ? job.scalars : job.inline_scalars) + span.scalar_set * kUsedScalars;
  const Scalars<One> s = {job.grad_scale ? *job.grad_scale : job.grad_scale_value,
                          f[kMove1],
                          f[kMove2],
                          f[kStepSize],
                          f[kEpsHat],
                          f[kDecay],
                          f[kL2]};
  const uint64_t tile = span.offset / kTile + (blockIdx.x - span.first_tile);
  const uint64_t begin = max(span.offset, tile * kTile), end = min(span.offset + span.length, (tile + 1) * kTile);
  uint64_t single = begin;
  if (job.together && begin % 4 == 0) {
    single += (end - begin) / 4 * 4;
    for (uint64_t i = begin + 4 * threadIdx.x; i < single; i += 4 * kThreads) update_at<G, M, 4>(job, s, i);
  }
  for (uint64_t i = single + threadIdx.x; i < end; i += kThreads) update_at<G, M, 1>(job, s, i);
}

// --- export and import ------------------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    export_split(float* out, const uint16_t* weight, const uint16_t* low, uint64_t count) {
  const uint64_t threads = uint64_t{gridDim.x} * kThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += threads) {
    out[i] = join<One>(weight[i], low[i]);
  }
}

__global__ void __launch_bounds__(kThreads) import_moment(float* moment, const float* in, uint64_t count) {
  const uint64_t threads = uint64_t{gridDim.x} * kThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += threads) {
    moment[i] = canonical<One>(in[i]);
  }
}

template <Form M>
__global__ void __launch_bounds__(kThreads) import_master(void* weight, void* master, const float* in, uint64_t count) {
  const uint64_t threads = uint64_t{gridDim.x} * kThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += threads) {
    const float p[1] = {canonical<One>(in[i])};
    store_master<M>(weight, master, i, p);
  }
}

// --- tables -----------------------------------------------------------------------------------------------------

template <class Function>
const void* kernel(Function* function) {
  return reinterpret_cast<const void*>(function);
}

#define STRATA_FORMS(G)                                                                                              \
  {                                                                                                                  \
    kernel(step<G, kWholeF32>), kernel(step<G, kWholeBf16>), kernel(step<G, kWholeF16>), kernel(step<G, kSplitF32>), \
        kernel(step<G, kSplitBf16>)                                                                                  \
  }
const void* const step_kernels[kGrads][kForms] = {STRATA_FORMS(kGradF32), STRATA_FORMS(kGradBf16),
                                                  STRATA_FORMS(kGradF16)};
#undef STRATA_FORMS
const void* const import_kernels[kForms] = {kernel(import_master<kWholeF32>), kernel(import_master<kWholeBf16>),
                                            kernel(import_master<kWholeF16>), kernel(import_master<kSplitF32>),
                                            kernel(import_master<kSplitBf16>)};

cudaError_t load_kernel(const void* function) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, function);
}

cudaError_t launch_over(const void* function, void** args, uint64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const uint64_t blocks = std::min((count - 1) / kThreads + 1, kMaxBlocks);
  return cudaLaunchKernel(function, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), args, 0, stream);
}

}  // namespace

cudaError_t load_kernels() {
  for (const void* function : {kernel(export_split), kernel(import_moment)}) {
    if (const cudaError_t error = load_kernel(function)) return error;
  }
  for (int form = 0; form < kForms; ++form) {
    if (const cudaError_t error = load_kernel(import_kernels[form])) return error;
    for (int grad = 0; grad < kGrads; ++grad) {
      if (const cudaError_t error = load_kernel(step_kernels[grad][form])) return error;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_step(Grad grad, Form form, const Job& job, uint64_t tiles, cudaStream_t stream) {
  if (tiles == 0) return cudaSuccess;
  if (tiles > kMaxBlocks) return cudaErrorInvalidConfiguration;  // 2.2e12 elements: beyond any memory
  void* args[] = {const_cast<Job*>(&job)};
  return cudaLaunchKernel(step_kernels[grad][form], dim3(static_cast<unsigned>(tiles)), dim3(kThreads), args, 0,
                          stream);
}

cudaError_t launch_export_split(float* out, const uint16_t* weight, const uint16_t* low, uint64_t count,
                                cudaStream_t stream) {
  void* args[] = {&out, &weight, &low, &count};
  return launch_over(kernel(export_split), args, count, stream);
}

cudaError_t launch_import_moment(float* moment, const float* in, uint64_t count, cudaStream_t stream) {
  void* args[] = {&moment, &in, &count};
  return launch_over(kernel(import_moment), args, count, stream);
}

cudaError_t launch_import_master(Form form, void* weight, void* master, const float* in, uint64_t count,
                                 cudaStream_t stream) {
  void* args[] = {&weight, &master, &in, &count};
  return launch_over(import_kernels[form], args, count, stream);
}

}  // namespace strata::adamw
