// kernels.cu - cast, accumulate, square_sums and find_nonfinite, with the bits of device_host.
//
// Conversions are those of libs/numbers, or an instruction that is defined to give the same (binary16 to nearest even
// and back). Compiled without contraction and without flush to zero (strata_add_cuda_kernels).
//
// A thread takes two times four elements, and the 32 threads of a warp take neighbouring fours: every access of a warp
// is one piece of memory without gaps, and a thread has two of each array under way. Accesses of 16 bytes, 8 for 16-bit
// types, need addresses at multiples of that; what stands before and behind, and everything where source and
// destination never get there at the same element, goes one by one. Blocks are short and many: the device spreads them
// evenly itself.
#include <algorithm>

#include "kernels.h"
#include "numbers/numbers.h"

namespace strata::device_cuda {
namespace {

using namespace strata::numbers;

constexpr unsigned kThreads = 256;
constexpr unsigned kTogether = 4;
constexpr unsigned kSpread = 32 * kTogether;  // from a thread's first four to its second
constexpr unsigned kGroup = 2 * kSpread;      // elements of a warp
constexpr uint64_t kMaxBlocks = 0x7FFFFFFF;

STRATA_HOST_DEVICE constexpr size_t size_of(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }

template <strata_dtype D>
__device__ float widen(uint32_t raw) {
  if constexpr (D == STRATA_F32) return __uint_as_float(raw);
  if constexpr (D == STRATA_BF16) return __uint_as_float(from_bf16(static_cast<uint16_t>(raw)));
  if constexpr (D == STRATA_F16) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(raw)));
    return value;
  }
}

template <strata_dtype D, strata_rounding R>
__device__ uint32_t narrow(float value) {
  const uint32_t bits = __float_as_uint(value);
  if constexpr (D == STRATA_F32) return is_nan(bits) ? kNaN32 : bits;
  if constexpr (D == STRATA_BF16) return to_bf16(bits, R);
  if constexpr (D == STRATA_F16 && R == STRATA_ROUND_AWAY) return to_f16(bits, R);
  if constexpr (D == STRATA_F16 && R == STRATA_ROUND_EVEN) {
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return is_nan(bits) ? kNaNF16 : half;
  }
}

// Four elements from an address that is a multiple of four elements.
template <strata_dtype D>
__device__ void load(const char* p, float (&x)[kTogether]) {
  if constexpr (D == STRATA_F32) {
    const uint4 w = *reinterpret_cast<const uint4*>(p);
    x[0] = widen<D>(w.x), x[1] = widen<D>(w.y), x[2] = widen<D>(w.z), x[3] = widen<D>(w.w);
  } else {
    const uint2 w = *reinterpret_cast<const uint2*>(p);
    x[0] = widen<D>(w.x & 0xFFFFu), x[1] = widen<D>(w.x >> 16);
    x[2] = widen<D>(w.y & 0xFFFFu), x[3] = widen<D>(w.y >> 16);
  }
}

template <strata_dtype D, strata_rounding R>
__device__ void store(char* p, const float (&x)[kTogether]) {
  const uint32_t raw[] = {narrow<D, R>(x[0]), narrow<D, R>(x[1]), narrow<D, R>(x[2]), narrow<D, R>(x[3])};
  if constexpr (D == STRATA_F32) {
    *reinterpret_cast<uint4*>(p) = make_uint4(raw[0], raw[1], raw[2], raw[3]);
  } else {
    *reinterpret_cast<uint2*>(p) = make_uint2(raw[0] | raw[1] << 16, raw[2] | raw[3] << 16);
  }
}

// One element at any address.
template <strata_dtype D>
__device__ float load_one(const char* p) {
  uint32_t raw = 0;
  if (reinterpret_cast<uintptr_t>(p) % size_of(D) == 0) {
    raw = D == STRATA_F32 ? *reinterpret_cast<const uint32_t*>(p) : *reinterpret_cast<const uint16_t*>(p);
  } else {
    for (unsigned k = 0; k < size_of(D); ++k) raw |= uint32_t{static_cast<unsigned char>(p[k])} << (8 * k);
  }
  return widen<D>(raw);
}

template <strata_dtype D, strata_rounding R>
__device__ void store_one(char* p, float value) {
  const uint32_t raw = narrow<D, R>(value);
  if (reinterpret_cast<uintptr_t>(p) % size_of(D) != 0) {
    for (unsigned k = 0; k < size_of(D); ++k) p[k] = static_cast<char>(raw >> (8 * k));
  } else if constexpr (D == STRATA_F32) {
    *reinterpret_cast<uint32_t*>(p) = raw;
  } else {
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(raw);
  }
}

// --- one element after the other --------------------------------------------------------------------------------

// What a kernel of `each` works on. An operation adds take(i) and put(i, four), for four elements from i on, and
// one(i). Everything is taken before anything is put: the compiler cannot know that arrays do not overlap.
struct Operands {
  char* dst;
  const char* src;
};

struct Four {
  float x[kTogether];
};

template <strata_dtype S, strata_dtype D, strata_rounding R>
struct Cast : Operands {
  __device__ Four take(uint64_t i) const {
    Four four;
    load<S>(src + i * size_of(S), four.x);
    return four;
  }
  __device__ void put(uint64_t i, const Four& four) const { store<D, R>(dst + i * size_of(D), four.x); }
  __device__ void one(uint64_t i) const { store_one<D, R>(dst + i * size_of(D), load_one<S>(src + i * size_of(S))); }
};

template <strata_dtype S>
struct Accumulate : Operands {
  __device__ Four take(uint64_t i) const {
    Four sum, four;
    load<STRATA_F32>(dst + i * 4, sum.x);
    load<S>(src + i * size_of(S), four.x);
#pragma unroll
    for (unsigned k = 0; k < kTogether; ++k) sum.x[k] = sum.x[k] + four.x[k];
    return sum;
  }
  __device__ void put(uint64_t i, const Four& four) const { store<STRATA_F32, STRATA_ROUND_EVEN>(dst + i * 4, four.x); }
  __device__ void one(uint64_t i) const {
    store_one<STRATA_F32, STRATA_ROUND_EVEN>(dst + i * 4,
                                             load_one<STRATA_F32>(dst + i * 4) + load_one<S>(src + i * size_of(S)));
  }
};

template <strata_dtype S>
struct FindNonfinite : Operands {  // dst is one index, not an array
  __device__ void check(uint64_t i, float x) const {
    if ((__float_as_uint(x) & kInf32) == kInf32) atomicMin(reinterpret_cast<unsigned long long*>(dst), i);
  }
  __device__ Four take(uint64_t i) const {
    Four four;
    load<S>(src + i * size_of(S), four.x);
    return four;
  }
  __device__ void put(uint64_t i, const Four& four) const {
#pragma unroll
    for (unsigned k = 0; k < kTogether; ++k) check(i + k, four.x[k]);
  }
  __device__ void one(uint64_t i) const { check(i, load_one<S>(src + i * size_of(S))); }
};

// `groups` of a warp's elements from `head` on; what is before and behind them goes one by one. One of `threads` does
// its part.
template <class Operation>
__device__ __forceinline__ void part_of_each(const Operands& operands, uint64_t head, uint64_t groups, uint64_t count,
                                             uint64_t thread, uint64_t threads) {
  const Operation operation{operands};
  for (uint64_t t = thread; t < groups * 32; t += threads) {
    const uint64_t i = head + t / 32 * kGroup + t % 32 * kTogether;
    const Four first = operation.take(i), second = operation.take(i + kSpread);
    operation.put(i, first);
    operation.put(i + kSpread, second);
  }
  const uint64_t together = groups * kGroup;
  for (uint64_t i = thread; i < count - together; i += threads) operation.one(i < head ? i : i + together);
}

template <class Operation>
__global__ void __launch_bounds__(kThreads) each(Operands operands, uint64_t head, uint64_t groups, uint64_t count) {
  part_of_each<Operation>(operands, head, groups, count, uint64_t{blockIdx.x} * kThreads + threadIdx.x,
                          uint64_t{gridDim.x} * kThreads);
}

template <class Operation>
const void* kernel_of() {
  return reinterpret_cast<const void*>(each<Operation>);
}

// Whether element `i` of an array begins at a multiple of four elements.
bool aligned_at(const void* array, size_t size, uint64_t i) {
  return (reinterpret_cast<uintptr_t>(array) + i * size) % (kTogether * size) == 0;
}

// The first element from which four can be taken together in all arrays; `count` where there is none.
uint64_t head_of(const Operands& o, size_t dst_size, size_t src_size, uint64_t count) {
  for (uint64_t i = 0; i < std::min<uint64_t>(kTogether, count); ++i) {
    if ((dst_size == 0 || aligned_at(o.dst, dst_size, i)) && aligned_at(o.src, src_size, i)) return i;
  }
  return count;
}

// `dst_size` 0: dst is no array.
cudaError_t launch_each(const void* kernel, Operands o, size_t dst_size, size_t src_size, uint64_t count,
                        cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  uint64_t head = head_of(o, dst_size, src_size, count);
  uint64_t groups = (count - head) / kGroup;
  const uint64_t work = std::max(groups * 32, count - groups * kGroup);
  const uint64_t blocks = std::min((work - 1) / kThreads + 1, kMaxBlocks);
  void* args[] = {&o, &head, &groups, &count};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), args, 0, stream);
}

// --- many arrays at once ----------------------------------------------------------------------------------------

// One array of a launch, and the blocks that work on it: from first_block on to where the next one's begin.
struct FoldItem {
  Operands operands;
  uint64_t head, groups, count;
  uint32_t first_block;
  uint8_t adds, from, to;  // dtypes
};
constexpr unsigned kFoldItems = 64;
struct FoldArguments {
  unsigned count;
  uint32_t blocks;
  FoldItem items[kFoldItems];
};
static_assert(sizeof(FoldArguments) <= 4096);  // what a kernel takes as arguments on every CUDA
constexpr uint64_t kMaxFoldBlocks = 1u << 24;  // of one item

template <class Operation>
__device__ __forceinline__ void part_of_item(const FoldItem& item, uint64_t thread, uint64_t threads) {
  part_of_each<Operation>(item.operands, item.head, item.groups, item.count, thread, threads);
}

template <strata_dtype S>
__device__ __forceinline__ void fold_from(const FoldItem& item, uint64_t thread, uint64_t threads) {
  if (item.adds) {
    part_of_item<Accumulate<S>>(item, thread, threads);
  } else if (item.to == STRATA_F32) {
    part_of_item<Cast<S, STRATA_F32, STRATA_ROUND_EVEN>>(item, thread, threads);
  } else if (item.to == STRATA_BF16) {
    part_of_item<Cast<S, STRATA_BF16, STRATA_ROUND_EVEN>>(item, thread, threads);
  } else {
    part_of_item<Cast<S, STRATA_F16, STRATA_ROUND_EVEN>>(item, thread, threads);
  }
}

__global__ void __launch_bounds__(kThreads) fold_items(const __grid_constant__ FoldArguments arguments) {
  unsigned low = 0, high = arguments.count;  // the last item that begins at or before this block
  while (high - low > 1) {
    const unsigned middle = (low + high) / 2;
    (arguments.items[middle].first_block <= blockIdx.x ? low : high) = middle;
  }
  const FoldItem& item = arguments.items[low];
  const uint32_t end = low + 1 < arguments.count ? arguments.items[low + 1].first_block : arguments.blocks;
  const uint64_t thread = uint64_t{blockIdx.x - item.first_block} * kThreads + threadIdx.x;
  const uint64_t threads = uint64_t{end - item.first_block} * kThreads;
  if (item.from == STRATA_F32) return fold_from<STRATA_F32>(item, thread, threads);
  if (item.from == STRATA_BF16) return fold_from<STRATA_BF16>(item, thread, threads);
  return fold_from<STRATA_F16>(item, thread, threads);
}

void append(FoldArguments* arguments, const strata_fold_item& given) {
  FoldItem& item = arguments->items[arguments->count++];
  item.operands = {static_cast<char*>(given.dst), static_cast<const char*>(given.src)};
  item.count = given.count;
  item.head = head_of(item.operands, size_of(given.dst_dtype), size_of(given.src_dtype), given.count);
  item.groups = (item.count - item.head) / kGroup;
  item.first_block = arguments->blocks;
  item.adds = given.adds != 0;
  item.from = static_cast<uint8_t>(given.src_dtype);
  item.to = static_cast<uint8_t>(given.dst_dtype);
  const uint64_t work = std::max(item.groups * 32, item.count - item.groups * kGroup);
  arguments->blocks += static_cast<uint32_t>(std::min((work - 1) / kThreads + 1, kMaxFoldBlocks));
}

cudaError_t launch(FoldArguments* arguments, cudaStream_t stream) {
  if (arguments->count == 0) return cudaSuccess;
  void* args[] = {arguments};
  const dim3 blocks(arguments->blocks);
  return cudaLaunchKernel(reinterpret_cast<const void*>(fold_items), blocks, dim3(kThreads), args, 0, stream);
}

// --- sums of squares --------------------------------------------------------------------------------------------

// A warp takes four norm blocks at a time, so that their sums leave in one write of 32 bytes.
constexpr int kBlocksPerWarp = 4;
constexpr int kWarps = kThreads / 32;

// Four columns of a norm block seen as eight rows of 256: the tree's strides 1024, 512 and 256.
template <strata_dtype S>
__device__ void fold_columns(const char* block, unsigned column, bool aligned, double (&s)[4]) {
  float x[8][4];
#pragma unroll
  for (unsigned row = 0; row < 8; ++row) {
    const char* p = block + (row * 256 + column) * size_of(S);
    if (aligned) {
      load<S>(p, x[row]);
    } else {
      for (unsigned k = 0; k < 4; ++k) x[row][k] = load_one<S>(p + k * size_of(S));
    }
  }
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) {
    const auto square = [&](unsigned row) { return static_cast<double>(x[row][k]) * static_cast<double>(x[row][k]); };
    const double even = (square(0) + square(4)) + (square(2) + square(6));
    const double odd = (square(1) + square(5)) + (square(3) + square(7));
    s[k] = even + odd;
  }
}

// The sum of one norm block, in every lane of the warp.
template <strata_dtype S>
__device__ double sum_block(const char* block, unsigned lane, bool aligned) {
  double s[4], right[4];
  fold_columns<S>(block, 4 * lane, aligned, s);
  fold_columns<S>(block, 128 + 4 * lane, aligned, right);
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) s[k] = s[k] + right[k];  // stride 128
#pragma unroll
  for (unsigned lanes = 16; lanes > 0; lanes /= 2) {  // strides 64 to 4; lanes beyond the stride are of no interest
#pragma unroll
    for (unsigned k = 0; k < 4; ++k) s[k] = s[k] + __shfl_down_sync(0xFFFFFFFFu, s[k], lanes);
  }
  const double sum = (s[0] + s[2]) + (s[1] + s[3]);
  return __shfl_sync(0xFFFFFFFFu, sum == sum ? sum : __longlong_as_double(0x7FF8000000000000), 0);
}

template <strata_dtype S>
__global__ void __launch_bounds__(kThreads) square_sums(double* sums, const char* src, uint64_t blocks, bool aligned) {
  const unsigned lane = threadIdx.x % 32;
  const uint64_t warps = uint64_t{gridDim.x} * kWarps;
  const uint64_t groups = (blocks + kBlocksPerWarp - 1) / kBlocksPerWarp;
  for (uint64_t g = uint64_t{blockIdx.x} * kWarps + threadIdx.x / 32; g < groups; g += warps) {
    const uint64_t first = g * kBlocksPerWarp;
    const unsigned n = static_cast<unsigned>(min(uint64_t{kBlocksPerWarp}, blocks - first));
    double mine = 0;
    for (unsigned b = 0; b < n; ++b) {
      const double sum = sum_block<S>(src + (first + b) * STRATA_NORM_BLOCK * size_of(S), lane, aligned);
      if (lane == b) mine = sum;
    }
    if (lane < n) sums[first + lane] = mine;
  }
}

// --- tables, indexed by dtype -----------------------------------------------------------------------------------

constexpr int kTypes = 3;
int index_of(strata_dtype dtype) { return dtype - STRATA_F32; }

template <strata_dtype S, strata_dtype D>
const void* cast_kernel(strata_rounding rounding) {
  // Nothing is rounded on the way to a type that holds every value of the source.
  constexpr bool exact = S == D || D == STRATA_F32;
  return exact || rounding == STRATA_ROUND_EVEN
             ? kernel_of<Cast<S, D, STRATA_ROUND_EVEN>>()
             : kernel_of<Cast<S, D, exact ? STRATA_ROUND_EVEN : STRATA_ROUND_AWAY>>();
}

template <strata_dtype S>
const void* cast_from(strata_dtype to, strata_rounding rounding) {
  return to == STRATA_F32    ? cast_kernel<S, STRATA_F32>(rounding)
         : to == STRATA_BF16 ? cast_kernel<S, STRATA_BF16>(rounding)
                             : cast_kernel<S, STRATA_F16>(rounding);
}

const void* cast_of(strata_dtype from, strata_dtype to, strata_rounding rounding) {
  return from == STRATA_F32    ? cast_from<STRATA_F32>(to, rounding)
         : from == STRATA_BF16 ? cast_from<STRATA_BF16>(to, rounding)
                               : cast_from<STRATA_F16>(to, rounding);
}

const void* const accumulate_kernels[kTypes] = {
    kernel_of<Accumulate<STRATA_F32>>(), kernel_of<Accumulate<STRATA_BF16>>(), kernel_of<Accumulate<STRATA_F16>>()};
const void* const find_kernels[kTypes] = {kernel_of<FindNonfinite<STRATA_F32>>(),
                                          kernel_of<FindNonfinite<STRATA_BF16>>(),
                                          kernel_of<FindNonfinite<STRATA_F16>>()};
const void* const sum_kernels[kTypes] = {reinterpret_cast<const void*>(square_sums<STRATA_F32>),
                                         reinterpret_cast<const void*>(square_sums<STRATA_BF16>),
                                         reinterpret_cast<const void*>(square_sums<STRATA_F16>)};

cudaError_t load_kernel(const void* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace

cudaError_t load_kernels() {
  if (const cudaError_t error = load_kernel(reinterpret_cast<const void*>(fold_items))) return error;
  for (strata_dtype from : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
    for (const void* kernel :
         {accumulate_kernels[index_of(from)], find_kernels[index_of(from)], sum_kernels[index_of(from)]}) {
      if (const cudaError_t error = load_kernel(kernel)) return error;
    }
    for (strata_dtype to : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
      for (strata_rounding rounding : {STRATA_ROUND_EVEN, STRATA_ROUND_AWAY}) {
        if (const cudaError_t error = load_kernel(cast_of(from, to, rounding))) return error;
      }
    }
  }
  return cudaSuccess;
}

cudaError_t launch_cast(void* dst, strata_dtype dst_dtype, const void* src, strata_dtype src_dtype, uint64_t count,
                        strata_rounding rounding, cudaStream_t stream) {
  return launch_each(cast_of(src_dtype, dst_dtype, rounding), {static_cast<char*>(dst), static_cast<const char*>(src)},
                     size_of(dst_dtype), size_of(src_dtype), count, stream);
}

cudaError_t launch_accumulate(float* dst, const void* src, strata_dtype src_dtype, uint64_t count,
                              cudaStream_t stream) {
  return launch_each(accumulate_kernels[index_of(src_dtype)],
                     {reinterpret_cast<char*>(dst), static_cast<const char*>(src)}, 4, size_of(src_dtype), count,
                     stream);
}

cudaError_t launch_fold(const strata_fold_item* items, uint64_t count, uint64_t stride, cudaStream_t stream) {
  FoldArguments arguments;
  arguments.count = arguments.blocks = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const auto& item = *reinterpret_cast<const strata_fold_item*>(reinterpret_cast<const char*>(items) + i * stride);
    if (item.count == 0) continue;
    append(&arguments, item);
    if (arguments.count < kFoldItems) continue;
    if (const cudaError_t error = launch(&arguments, stream)) return error;
    arguments.count = arguments.blocks = 0;
  }
  return launch(&arguments, stream);
}

cudaError_t launch_find_nonfinite(uint64_t* first, const void* src, strata_dtype dtype, uint64_t count,
                                  cudaStream_t stream) {
  return launch_each(find_kernels[index_of(dtype)], {reinterpret_cast<char*>(first), static_cast<const char*>(src)}, 0,
                     size_of(dtype), count, stream);
}

cudaError_t launch_square_sums(double* sums, const void* src, strata_dtype dtype, uint64_t count, cudaStream_t stream) {
  uint64_t blocks = count / STRATA_NORM_BLOCK;
  if (blocks == 0) return cudaSuccess;
  bool aligned = reinterpret_cast<uintptr_t>(src) % (4 * size_of(dtype)) == 0;
  const uint64_t grid = std::min((blocks - 1) / (kWarps * kBlocksPerWarp) + 1, kMaxBlocks);
  void* args[] = {&sums, &src, &blocks, &aligned};
  return cudaLaunchKernel(sum_kernels[index_of(dtype)], dim3(static_cast<unsigned>(grid)), dim3(kThreads), args, 0,
                          stream);
}

}  // namespace strata::device_cuda
