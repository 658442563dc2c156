// formula.h - the arithmetic of AdamW, written once, for every width.
//
// The formula is Adam (Kingma & Ba, ICLR 2015: algorithm 1 in the reordered form at the end of its section 2, with
// eps_hat) with decoupled decay (Loshchilov & Hutter, ICLR 2019), in the order of operations of torch.optim.AdamW:
// decay and step both start from the old weight. One fp32 operation per C++ operator, no contraction, so that one lane
// here, AVX2, AVX-512 and CUDA give the same bits. Two choices keep fp32 close to exact arithmetic:
//   - a moment moves toward its new value, x + (1 - beta)(y - x): rounding beta to fp32 then costs the small step
//     some accuracy and never the moment (beta2 = 0.999 as a factor is wrong by 1.3e-8, a bias of 1.3e-5 on v);
//   - decay and step are added first and subtracted once, so that the weight is rounded once and a decay
//     below 2^-25 is not lost.
//
// `V` is a lane type: V::F floats, V::U unsigned and V::S signed 32-bit integers (scalars, or vectors in the compiler's
// own vector extension, where operators and ?: work per lane), V::sqrt, V::to_float(S), V::truncate(F).
// Everything has internal linkage and no std header is used, because this is compiled with different instruction sets
// and, for one lane, by nvcc (with contraction off and IEEE division).
#pragma once

#include <stdint.h>

#include "numbers/host_device.h"

namespace strata::adamw {

// Positions in a scalar set of STRATA_OPTIM_SCALARS floats; the rest is zero.
enum ScalarIndex {
  kMove1 = 0,     // 1 - beta1, or -beta1 when that is at most 1/2 (see `toward`)
  kMove2 = 1,     // the same of beta2
  kStepSize = 2,  // lr sqrt(1 - beta2^t) / (1 - beta1^t)
  kEpsHat = 3,    // eps sqrt(1 - beta2^t)
  kDecay = 4,     // lr weight_decay when decoupled, else 0
  kL2 = 5,        // weight_decay when not decoupled, else 0
};

namespace {

template <class V>
struct Scalars {
  typename V::F grad_scale, move1, move2, step_size, eps_hat, decay, l2;
};

template <class V>
STRATA_HOST_DEVICE inline typename V::F canonical(typename V::F x) {  // every NaN becomes 0x7FC00000
  using U = typename V::U;
  return x == x ? x : __builtin_bit_cast(typename V::F, U{} + 0x7FC00000u);
}

// x moved toward y. The sign bit of k says from which end to start: x + k (y - x) for k = 1 - beta below 1/2, and
// y + k (y - x) for k = -beta, so that a small beta does not lose a small y beside a large x.
template <class V>
STRATA_HOST_DEVICE inline typename V::F toward(typename V::F x, typename V::F y, typename V::F k) {
  return (__builtin_bit_cast(typename V::S, k) < 0 ? y : x) + k * (y - x);
}

// One update: gradient g and master p in, moments m and v updated, the new master returned.
template <class V>
STRATA_HOST_DEVICE inline typename V::F update(typename V::F g, typename V::F p, typename V::F& m, typename V::F& v,
                                               const Scalars<V>& s) {
  g = g * s.grad_scale + s.l2 * p;
  m = canonical<V>(toward<V>(m, g, s.move1));
  v = canonical<V>(toward<V>(v, g * g, s.move2));
  const typename V::F change = s.step_size * (m / (V::sqrt(v) + s.eps_hat)) + s.decay * p;
  return canonical<V>(p - change);
}

// fp32 -> bf16 of a canonical value, to nearest, ties away from zero; the upper 16 bits of the result are zero.
template <class V>
STRATA_HOST_DEVICE inline typename V::U bf16_away(typename V::F x) {
  return (__builtin_bit_cast(typename V::U, x) + 0x8000u) >> 16;
}

// The inverse of {bf16_away, low 16 bits}: the fp32 value both came from.
template <class V>
STRATA_HOST_DEVICE inline typename V::F join(typename V::U bf16, typename V::U low) {
  return __builtin_bit_cast(typename V::F, ((bf16 - (low >> 15)) << 16) | low);
}

// fp32 -> fp16 of a canonical value, to nearest, ties away from zero; NaN is 0x7E00.
template <class V>
STRATA_HOST_DEVICE inline typename V::U f16_away(typename V::F x) {
  using F = typename V::F;
  using U = typename V::U;
  const U bits = __builtin_bit_cast(U, x);
  const U magnitude = bits & 0x7FFFFFFFu;
  U normal = (magnitude + 0x1000u - 0x38000000u) >> 13;
  normal = normal > 0x7C00u ? U{} + 0x7C00u : normal;
  // Below 2^-14 the result counts units of 2^-24; scaling, truncation and the remainder are exact.
  const F scaled = __builtin_bit_cast(F, magnitude < 0x38800000u ? magnitude : U{}) * 16777216.0f;
  const typename V::S units = V::truncate(scaled);
  const U subnormal = __builtin_bit_cast(U, units) + (scaled - V::to_float(units) >= 0.5f ? U{} + 1u : U{});
  const U rounded = magnitude < 0x38800000u ? subnormal : normal;
  return magnitude > 0x7F800000u ? U{} + 0x7E00u : rounded | ((bits >> 16) & 0x8000u);
}

template <class V>
STRATA_HOST_DEVICE inline typename V::F from_bf16(typename V::U half) {
  return __builtin_bit_cast(typename V::F, half << 16);
}

template <class V>
STRATA_HOST_DEVICE inline typename V::F from_f16(typename V::U half) {
  using U = typename V::U;
  const U magnitude = half & 0x7FFFu;
  const U subnormal = __builtin_bit_cast(U, V::to_float(__builtin_bit_cast(typename V::S, magnitude)) * 0x1p-24f);
  const U normal = (magnitude << 13) + (magnitude < 0x7C00u ? U{} + 0x38000000u : U{} + 0x70000000u);
  return __builtin_bit_cast(typename V::F, (magnitude < 0x400u ? subnormal : normal) | ((half & 0x8000u) << 16));
}

// One lane in plain C++: the reference itself, and the ends of every slice.
struct One {
  using F = float;
  using U = uint32_t;
  using S = int32_t;
  static constexpr uint64_t width = 1;
  STRATA_HOST_DEVICE static F sqrt(F x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
  }
  STRATA_HOST_DEVICE static F to_float(S x) { return static_cast<F>(x); }
  STRATA_HOST_DEVICE static S truncate(F x) { return static_cast<S>(x); }
  STRATA_HOST_DEVICE static F broadcast(float x) { return x; }
  STRATA_HOST_DEVICE static F load(const float* p) { return *p; }
  STRATA_HOST_DEVICE static U load16(const uint16_t* p) { return *p; }
  STRATA_HOST_DEVICE static void store(float* p, F x) { *p = x; }
  STRATA_HOST_DEVICE static void store16(uint16_t* p, U x) { *p = static_cast<uint16_t>(x); }
  STRATA_HOST_DEVICE static void stream(float* p, F x) { *p = x; }
  STRATA_HOST_DEVICE static void stream16(uint16_t* p, U x) { *p = static_cast<uint16_t>(x); }
  STRATA_HOST_DEVICE static void fence() {}
};

}  // namespace
}  // namespace strata::adamw
