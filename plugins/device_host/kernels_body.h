// kernels_body.h - every kernel, written once over a vector type V; a kernels_*.cc file supplies V and gets a table.
//
// V has: kLanes; Float, a vector of kLanes fp32; Double, one of kDoubles fp64; and
//   load<dtype>(p), store<dtype, rounding>(p, v)   with widening, rounding and canonical NaNs
//   stream(p, v), end_streams()                    fp32 past the caches to where p is a multiple of v's size
//   add(a, b)                                      fp32
//   any_nonfinite(v)
//   load_double<dtype>(p), add(a, b), square(a), store_double<dtype>(p, v)   fp64, lanes in an order that store undoes
//   add_square(a, b)                               a * a + b, fused or not: squares are exact
// What does not fill a vector goes through Scalar, which is also the V of the scalar table. Everything is in an
// unnamed namespace: the same template compiled for another instruction set is another function.
#pragma once

#include "kernels.h"
#include "numbers/numbers.h"

namespace strata::device_host {
namespace {

using namespace strata::numbers;

constexpr size_t size_of(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }

struct Scalar {
  static constexpr size_t kLanes = 1, kDoubles = 1;
  using Float = float;
  using Double = double;

  template <strata_dtype D>
  static Float load(const char* p) {
    uint32_t bits;
    if constexpr (D == STRATA_F32) {
      __builtin_memcpy(&bits, p, 4);
    } else {
      uint16_t half;
      __builtin_memcpy(&half, p, 2);
      bits = D == STRATA_BF16 ? from_bf16(half) : from_f16(half);
    }
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
  }
  template <strata_dtype D, strata_rounding R>
  static void store(char* p, Float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    if constexpr (D == STRATA_F32) {
      if (is_nan(bits)) bits = kNaN32;
      __builtin_memcpy(p, &bits, 4);
    } else {
      const uint16_t half = D == STRATA_BF16 ? to_bf16(bits, R) : to_f16(bits, R);
      __builtin_memcpy(p, &half, 2);
    }
  }
  static void stream(char* p, Float value) { store<STRATA_F32, STRATA_ROUND_EVEN>(p, value); }
  static void end_streams() {}
  static Float add(Float a, Float b) { return a + b; }
  static bool any_nonfinite(Float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return (bits & kInf32) == kInf32;
  }
  template <strata_dtype D>
  static Double load_double(const char* p) {
    if constexpr (D == STRATA_F64) {
      double value;
      __builtin_memcpy(&value, p, 8);
      return value;
    } else {
      return load<D>(p);
    }
  }
  static Double add(Double a, Double b) { return a + b; }
  static Double square(Double a) { return a * a; }
  static Double add_square(Double a, Double b) { return a * a + b; }
  template <strata_dtype>
  static void store_double(double* p, Double value) {
    *p = value;
  }
};

template <class V, strata_dtype S, strata_dtype D, strata_rounding R>
void cast(void* dst, const void* src, size_t count) {
  auto* out = static_cast<char*>(dst);
  auto* in = static_cast<const char*>(src);
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) {
    V::template store<D, R>(out + i * size_of(D), V::template load<S>(in + i * size_of(S)));
  }
  for (; i < count; ++i) Scalar::store<D, R>(out + i * size_of(D), Scalar::load<S>(in + i * size_of(S)));
}

// Up to where the destination is aligned, and what does not fill a vector, goes the usual way.
template <class V, strata_dtype S>
void widen_past_caches(void* dst, const void* src, size_t count) {
  constexpr size_t kBytes = V::kLanes * 4;
  auto* out = static_cast<char*>(dst);
  auto* in = static_cast<const char*>(src);
  const size_t beyond = reinterpret_cast<uintptr_t>(dst) % kBytes, head = beyond == 0 ? 0 : (kBytes - beyond) / 4;
  size_t i = beyond % 4 != 0 || head > count ? count : head;
  cast<Scalar, S, STRATA_F32, STRATA_ROUND_EVEN>(out, in, i);
  for (; i + V::kLanes <= count; i += V::kLanes) V::stream(out + i * 4, V::template load<S>(in + i * size_of(S)));
  cast<Scalar, S, STRATA_F32, STRATA_ROUND_EVEN>(out + i * 4, in + i * size_of(S), count - i);
  V::end_streams();
}

template <class V, strata_dtype S>
void accumulate(void* dst, const void* src, size_t count) {
  auto* out = static_cast<char*>(dst);
  auto* in = static_cast<const char*>(src);
  const auto fold = [&]<class W>(W, size_t i) {
    char* at = out + i * 4;
    W::template store<STRATA_F32, STRATA_ROUND_EVEN>(
        at, W::add(W::template load<STRATA_F32>(at), W::template load<S>(in + i * size_of(S))));
  };
  size_t i = 0;
  for (; i + V::kLanes <= count; i += V::kLanes) fold(V{}, i);
  for (; i < count; ++i) fold(Scalar{}, i);
}

template <class V, strata_dtype S>
int64_t find_nonfinite(const void* src, size_t count) {
  auto* in = static_cast<const char*>(src);
  size_t i = 0;
  while (i + V::kLanes <= count && !V::any_nonfinite(V::template load<S>(in + i * size_of(S)))) i += V::kLanes;
  for (; i < count; ++i) {
    if (Scalar::any_nonfinite(Scalar::load<S>(in + i * size_of(S)))) return static_cast<int64_t>(i);
  }
  return -1;
}

// Into the caches: eight short runs side by side are more than a processor sees coming by itself.
inline void ask_for(const char* ahead, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(ahead + at);
}

// Three levels of the halving tree at once: for i < stride, out[i] is the sum of the eight leaves i + k * stride,
// added in the order that the strides 4, 2, 1 times `stride` give. Leaves are squares of S, of which it asks for the
// next eight runs, too, or fp64 partial sums.
template <class V, strata_dtype S>
void fold_eight(double* out, const char* in, size_t stride) {
  constexpr size_t kSize = S == STRATA_F64 ? 8 : size_of(S);
  for (size_t i = 0; i < stride; i += V::kDoubles) {
    const auto load = [&](size_t k) { return V::template load_double<S>(in + (i + k * stride) * kSize); };
    const auto sum = [&](size_t a, size_t b) {
      if constexpr (S == STRATA_F64) {
        return V::add(load(a), load(b));
      } else {
        return V::add_square(load(a), V::square(load(b)));
      }
    };
    if constexpr (S != STRATA_F64) ask_for(in + (8 * stride + 8 * i) * kSize, 8 * V::kDoubles * kSize);
    const auto even = V::add(sum(0, 4), sum(2, 6)), odd = V::add(sum(1, 5), sum(3, 7));
    V::template store_double<S>(out + i, V::add(even, odd));
  }
}

// 2048 leaves to 256, to 32, to 4, to the root: strides 1024 to 1. A NaN sum is the canonical one, whatever payloads
// went in.
template <class V, strata_dtype S>
void square_sums(double* sums, const void* src, size_t count) {
  static_assert(STRATA_NORM_BLOCK == 8 * 256);
  auto* in = static_cast<const char*>(src);
  for (size_t block = 0; block < count / STRATA_NORM_BLOCK; ++block) {
    double a[256], b[32], c[4];
    fold_eight<V, S>(a, in + block * STRATA_NORM_BLOCK * size_of(S), 256);
    fold_eight<V, STRATA_F64>(b, reinterpret_cast<const char*>(a), 32);
    fold_eight<Scalar, STRATA_F64>(c, reinterpret_cast<const char*>(b), 4);
    const double sum = (c[0] + c[2]) + (c[1] + c[3]);
    sums[block] = sum == sum ? sum : __builtin_nan("");
  }
}

template <class V>
const Kernels* kernel_table(const char* isa) {
#define STRATA_CAST_TO(S, D) \
  { &cast<V, S, D, STRATA_ROUND_EVEN>, &cast<V, S, D, STRATA_ROUND_AWAY> }
#define STRATA_CAST_FROM(S) \
  { STRATA_CAST_TO(S, STRATA_F32), STRATA_CAST_TO(S, STRATA_BF16), STRATA_CAST_TO(S, STRATA_F16) }
#define STRATA_EACH(kernel) \
  { &kernel<V, STRATA_F32>, &kernel<V, STRATA_BF16>, &kernel<V, STRATA_F16> }
  static const Kernels table = {
      isa,
      {STRATA_CAST_FROM(STRATA_F32), STRATA_CAST_FROM(STRATA_BF16), STRATA_CAST_FROM(STRATA_F16)},
      STRATA_EACH(widen_past_caches),
      STRATA_EACH(accumulate),
      STRATA_EACH(square_sums),
      STRATA_EACH(find_nonfinite)};
#undef STRATA_CAST_TO
#undef STRATA_CAST_FROM
#undef STRATA_EACH
  return &table;
}

}  // namespace
}  // namespace strata::device_host
