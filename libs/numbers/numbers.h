// numbers.h - conversions between fp32, bfloat16 and binary16, one number at a time: the truth the SIMD files match.
//
// All on integers, so that no floating point mode can change a result. A NaN becomes the canonical one of its type.
// Compiled for the CPU, for wider instruction sets and by nvcc, hence internal linkage and no std header: an inline
// function of the library compiled with AVX-512 could otherwise be the copy the linker keeps for everybody.
#pragma once

#include <stdint.h>

#include "numbers/host_device.h"
#include "strata/iface/device.h"

namespace strata::numbers {
namespace {

constexpr uint32_t kNaN32 = 0x7FC00000u;
constexpr uint16_t kNaNBf16 = 0x7FC0u;
constexpr uint16_t kNaNF16 = 0x7E00u;
constexpr uint32_t kInf32 = 0x7F800000u;

STRATA_HOST_DEVICE inline bool is_nan(uint32_t f32) { return (f32 & 0x7FFFFFFFu) > kInf32; }

// The bits of `f32` without the lowest `shift` (1 to 31), rounded to nearest. `even` tells how ties go: to even or
// away from zero.
STRATA_HOST_DEVICE inline uint32_t shift_rounded(uint32_t f32, uint32_t shift, bool even) {
  const uint32_t half = 1u << (shift - 1);
  return (f32 + (even ? half - 1 + ((f32 >> shift) & 1) : half)) >> shift;
}

STRATA_HOST_DEVICE inline uint16_t to_bf16(uint32_t f32, strata_rounding rounding) {
  if (is_nan(f32)) return kNaNBf16;
  return static_cast<uint16_t>(shift_rounded(f32, 16, rounding == STRATA_ROUND_EVEN));
}

STRATA_HOST_DEVICE inline uint16_t to_f16(uint32_t f32, strata_rounding rounding) {
  if (is_nan(f32)) return kNaNF16;
  const bool even = rounding == STRATA_ROUND_EVEN;
  const uint32_t sign = (f32 >> 16) & 0x8000u;
  const uint32_t magnitude = f32 & 0x7FFFFFFFu;
  uint32_t half;
  if (magnitude >= 0x47800000u) {  // 65536 and up, infinity
    half = 0x7C00u;
  } else if (magnitude >= 0x38800000u) {  // normal: rebias the exponent; a carry out of it makes infinity
    half = shift_rounded(magnitude - 0x38000000u, 13, even);
  } else {  // subnormal: a multiple of 2^-24
    const uint32_t exponent = magnitude >> 23;
    const uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    half = exponent < 102 ? 0 : shift_rounded(significand, 126 - exponent, even);
  }
  return static_cast<uint16_t>(sign | half);
}

STRATA_HOST_DEVICE inline uint32_t from_bf16(uint16_t bf16) { return static_cast<uint32_t>(bf16) << 16; }

STRATA_HOST_DEVICE inline uint32_t from_f16(uint16_t f16) {
  const uint32_t sign = (f16 & 0x8000u) << 16;
  const uint32_t exponent = (f16 >> 10) & 0x1Fu;
  uint32_t mantissa = f16 & 0x3FFu;
  if (exponent == 0x1F) return sign | kInf32 | (mantissa << 13);
  if (exponent != 0) return sign | ((exponent + 112) << 23) | (mantissa << 13);
  if (mantissa == 0) return sign;
  uint32_t normalized = 113;  // subnormal: shift the leading one into its place
  while (!(mantissa & 0x400u)) {
    mantissa <<= 1;
    --normalized;
  }
  return sign | (normalized << 23) | ((mantissa & 0x3FFu) << 13);
}

}  // namespace
}  // namespace strata::numbers
