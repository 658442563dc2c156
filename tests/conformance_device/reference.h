// reference.h - what the device kernels must give, written for plainness and from the definitions alone.
//
// A 16-bit format is the list of its non-negative values; rounding finds the two neighbours of a number in that list
// and compares distances in fp64, where they are exact.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "strata/iface/device.h"

namespace strata::test {

inline constexpr strata_dtype kDtypes[] = {STRATA_F32, STRATA_BF16, STRATA_F16};

// The value of a 16-bit pattern.
inline double decode16(uint16_t bits, strata_dtype dtype) {
  const int mantissa_bits = dtype == STRATA_BF16 ? 7 : 10;
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double value;
  if (exponent == (1 << exponent_bits) - 1) {
    value = mantissa ? std::nan("") : HUGE_VAL;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return bits & 0x8000 ? -value : value;
}

inline uint16_t canonical_nan16(strata_dtype dtype) { return dtype == STRATA_BF16 ? 0x7FC0 : 0x7E00; }

// Non-negative values in order; the one at infinity's place is what the next finite value would be.
inline const std::vector<double>& values16(strata_dtype dtype) {
  static const auto make = [](strata_dtype d) {
    const int infinity = d == STRATA_BF16 ? 0x7F80 : 0x7C00;
    std::vector<double> values;
    for (int p = 0; p < infinity; ++p) values.push_back(decode16(static_cast<uint16_t>(p), d));
    values.push_back(std::ldexp(1.0, d == STRATA_BF16 ? 128 : 16));
    return values;
  };
  static const std::vector<double> bf16 = make(STRATA_BF16), f16 = make(STRATA_F16);
  return dtype == STRATA_BF16 ? bf16 : f16;
}

inline uint16_t encode16(float x, strata_dtype dtype, strata_rounding rounding) {
  if (std::isnan(x)) return canonical_nan16(dtype);
  const std::vector<double>& values = values16(dtype);
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
  size_t pattern = values.size() - 1;
  if (above != values.end()) {
    const size_t low = static_cast<size_t>(above - values.begin()) - 1;
    const double down = magnitude - values[low], up = values[low + 1] - magnitude;
    const bool tie_up = rounding == STRATA_ROUND_AWAY || low % 2 == 1;
    pattern = down < up || (down == up && !tie_up) ? low : low + 1;
  }
  return static_cast<uint16_t>(sign | pattern);
}

inline uint32_t canonical32(float x) { return std::isnan(x) ? 0x7FC00000u : std::bit_cast<uint32_t>(x); }

// The header's words, letter by letter: s[i] = x[i]^2, then for stride 1024, 512, ..., 1.
inline double square_sum_of_block(const double* x) {
  std::vector<double> s(2048);
  for (int i = 0; i < 2048; ++i) s[i] = x[i] * x[i];
  for (int stride = 1024; stride >= 1; stride /= 2) {
    for (int i = 0; i < stride; ++i) s[i] = s[i] + s[i + stride];
  }
  return s[0];
}

}  // namespace strata::test
