// adamw_loop.h - the loop around the formula: load, update, store, for lane type V, gradient G and form M.
//
// The loop runs V::width elements at a time and single elements at the end, so nothing outside the slice is touched.
// The gradient is loaded before the weight of the same elements is stored: both may be the same memory.
// Included by one file per instruction set; everything has internal linkage.
#pragma once

#include "adamw/formula.h"
#include "adamw_kernels.h"

namespace strata::adamw {
namespace {

template <class V>
inline Scalars<V> broadcast(const Slice& a) {
  const float* s = a.scalars;
  return {V::broadcast(a.grad_scale), V::broadcast(s[kMove1]), V::broadcast(s[kMove2]), V::broadcast(s[kStepSize]),
          V::broadcast(s[kEpsHat]),   V::broadcast(s[kDecay]), V::broadcast(s[kL2])};
}

template <class V, Grad G>
inline typename V::F load_grad(const Slice& a, uint64_t i) {
  if constexpr (G == kGradF32) return V::load(static_cast<const float*>(a.grad) + i);
  if constexpr (G == kGradBf16) return from_bf16<V>(V::load16(static_cast<const uint16_t*>(a.grad) + i));
  if constexpr (G == kGradF16) return from_f16<V>(V::load16(static_cast<const uint16_t*>(a.grad) + i));
}

template <class V, Form M>
inline typename V::F load_master(const Slice& a, uint64_t i) {
  if constexpr (M == kSplitBf16) {
    return join<V>(V::load16(static_cast<const uint16_t*>(a.weight) + i),
                   V::load16(static_cast<const uint16_t*>(a.master) + i));
  } else {
    return V::load(static_cast<const float*>(M == kSplitF32 ? a.weight : a.master) + i);
  }
}

template <class V, Form M>
inline void store_master(const Slice& a, uint64_t i, typename V::F p) {
  float* const weight = static_cast<float*>(a.weight) + i;
  uint16_t* const weight16 = static_cast<uint16_t*>(a.weight) + i;
  if constexpr (M == kSplitF32) {
    V::store(weight, p);
  } else if constexpr (M == kSplitBf16) {
    V::store16(weight16, bf16_away<V>(p));
    V::store16(static_cast<uint16_t*>(a.master) + i, __builtin_bit_cast(typename V::U, p) & 0xFFFFu);
  } else {
    V::store(static_cast<float*>(a.master) + i, p);
    if constexpr (M == kWholeF32) {
      a.stream ? V::stream(weight, p) : V::store(weight, p);
    } else {
      const typename V::U half = M == kWholeBf16 ? bf16_away<V>(p) : f16_away<V>(p);
      a.stream ? V::stream16(weight16, half) : V::store16(weight16, half);
    }
  }
}

template <class V, Grad G, Form M>
inline void update_at(const Slice& a, uint64_t i, const Scalars<V>& s) {
  const typename V::F g = load_grad<V, G>(a, i);
  typename V::F m = V::load(a.exp_avg + i);
  typename V::F v = V::load(a.exp_avg_sq + i);
  const typename V::F p = update<V>(g, load_master<V, M>(a, i), m, v, s);
  V::store(a.exp_avg + i, m);
  V::store(a.exp_avg_sq + i, v);
  store_master<V, M>(a, i, p);
}

template <class V, Grad G, Form M>
void run(const Slice& a) {
  constexpr bool weight_only_written = M == kWholeF32 || M == kWholeBf16 || M == kWholeF16;
  constexpr uint64_t element = weight_bytes(M);
  const bool stream = weight_only_written && a.stream;
  const Scalars<One> one = broadcast<One>(a);
  const Scalars<V> all = broadcast<V>(a);
  uint64_t i = 0;
  // Streaming stores need an aligned address; single elements lead up to it.
  if (stream) {
    while (i < a.count && (reinterpret_cast<uintptr_t>(a.weight) + i * element) % (V::width * element) != 0) {
      update_at<One, G, M>(a, i++, one);
    }
  }
  for (; i + V::width <= a.count; i += V::width) update_at<V, G, M>(a, i, all);
  for (; i < a.count; ++i) update_at<One, G, M>(a, i, one);
  if (stream) V::fence();
}

template <class V, Grad G>
constexpr void fill(Kernels& table) {
  table.run[G][kWholeF32] = run<V, G, kWholeF32>;
  table.run[G][kWholeBf16] = run<V, G, kWholeBf16>;
  table.run[G][kWholeF16] = run<V, G, kWholeF16>;
  table.run[G][kSplitF32] = run<V, G, kSplitF32>;
  table.run[G][kSplitBf16] = run<V, G, kSplitBf16>;
}

template <class V>
constexpr Kernels make_kernels() {
  Kernels table{};
  fill<V, kGradF32>(table);
  fill<V, kGradBf16>(table);
  fill<V, kGradF16>(table);
  return table;
}

}  // namespace
}  // namespace strata::adamw
