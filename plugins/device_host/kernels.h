// kernels.h - the loops of device_host, one table of them per instruction set.
//
// Every table gives the same bits for the same input; they differ in speed only. A kernel works on one range on one
// thread, on data of any alignment, and expects the default floating point environment (round to nearest, no flush
// to zero): device_host sets it around each call.
//
// This header and everything the kernels_*.cc files include use no std header: an inline function of the library,
// compiled there with AVX-512, could otherwise be the copy the linker keeps for everybody.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace strata::device_host {

// Dtypes index the tables as strata_dtype - 1: F32, BF16, F16.
inline constexpr int kFloatTypes = 3;

struct Kernels {
  const char* isa;
  // [source][destination][rounding]
  void (*cast[kFloatTypes][kFloatTypes][2])(void* dst, const void* src, size_t count);
  // To fp32 that nobody reads soon: the caches keep what they have, and a line of the destination is not read before
  // it is written.
  void (*widen_past_caches[kFloatTypes])(void* dst, const void* src, size_t count);
  void (*accumulate[kFloatTypes])(void* dst, const void* src, size_t count);
  // `count` is a multiple of STRATA_NORM_BLOCK
  void (*square_sums[kFloatTypes])(double* sums, const void* src, size_t count);
  // Index of the first inf or NaN, or -1.
  int64_t (*find_nonfinite[kFloatTypes])(const void* src, size_t count);
};

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();    // x86-64 only
const Kernels* avx512_kernels();  // x86-64 only

// The table for an `isa` setting; NULL when this machine cannot run it or the name is unknown.
const Kernels* select_kernels(const char* isa);

}  // namespace strata::device_host
