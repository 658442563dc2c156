#include "reference.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace strata::test {
namespace {

uint64_t hash(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A binary format of 16 bits: its value from its bits, and its bits from a float by searching the two neighbours.
struct Format {
  int exponent_bits;
  int mantissa_bits;
};
constexpr Format kBf16 = {8, 7};
constexpr Format kF16 = {5, 10};

double value_of(uint16_t bits, const Format& f) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = (bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int mantissa = bits & ((1 << f.mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == (1 << f.exponent_bits) - 1) return mantissa ? std::nan("") : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa_bits);
  return sign * std::ldexp((1 << f.mantissa_bits) + mantissa, exponent - bias - f.mantissa_bits);
}

// Magnitudes are ordered as their bits are: find the largest not above x, then choose the nearer neighbour. The value
// after the largest finite one counts as the next power of two, as rounding to nearest even says.
uint16_t bits_of(float x, const Format& f) {
  const uint16_t infinity = static_cast<uint16_t>(((1 << f.exponent_bits) - 1) << f.mantissa_bits);
  if (std::isnan(x)) return f.exponent_bits == 8 ? 0x7fc0 : 0x7e00;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(x));
  if (std::isinf(x)) return sign | infinity;
  uint16_t low = 0, high = infinity;
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (value_of(middle, f) <= magnitude ? low : high) = middle;
  }
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const double above = high == infinity ? std::ldexp(1.0, bias + 1) : value_of(high, f);
  const double down = magnitude - value_of(low, f);
  const double up = above - magnitude;
  const bool take_low = down < up || (down == up && low % 2 == 0);
  return static_cast<uint16_t>(sign | (take_low ? low : high));
}

}  // namespace

uint64_t element_size(strata_dtype dtype) {
  switch (dtype) {
    case STRATA_F32:
      return 4;
    case STRATA_U8:
      return 1;
    case STRATA_I64:
    case STRATA_F64:
      return 8;
    default:
      return 2;
  }
}

float to_float(const uint8_t* element, strata_dtype dtype) {
  if (dtype == STRATA_F32) {
    float value;
    std::memcpy(&value, element, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, element, sizeof(bits));
  return static_cast<float>(value_of(bits, dtype == STRATA_BF16 ? kBf16 : kF16));
}

void from_float(float value, strata_dtype dtype, uint8_t* element) {
  if (dtype == STRATA_F32) {
    const uint32_t bits = std::isnan(value) ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
    std::memcpy(element, &bits, sizeof(bits));
    return;
  }
  const uint16_t bits = bits_of(value, dtype == STRATA_BF16 ? kBf16 : kF16);
  std::memcpy(element, &bits, sizeof(bits));
}

std::vector<uint8_t> make_input(uint64_t seed, int rank, uint64_t count, strata_dtype dtype) {
  const uint64_t size = element_size(dtype);
  std::vector<uint8_t> bytes(count * size);
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t random = hash(hash(seed * 64 + static_cast<uint64_t>(rank)) + i);
    const bool number = dtype == STRATA_F32 || dtype == STRATA_BF16 || dtype == STRATA_F16;
    if (!number || random % 8 == 0) {
      std::memcpy(&bytes[i * size], reinterpret_cast<const char*>(&random), size);
    } else {
      // Finite and of mixed magnitude, so that the order of addition shows in the last bits. Exact in all formats.
      const float mantissa = static_cast<float>(static_cast<int>(random >> 8 & 0xff) - 128) / 128.0f;
      from_float(std::ldexp(mantissa, static_cast<int>(random >> 16 & 15) - 8), dtype, &bytes[i * size]);
      if (dtype == STRATA_F32) bytes[i * size] = static_cast<uint8_t>(random >> 24);
    }
  }
  return bytes;
}

std::vector<uint8_t> reference_sum(const std::vector<std::vector<uint8_t>>& inputs, strata_dtype in_dtype,
                                   strata_dtype out_dtype) {
  const uint64_t in_size = element_size(in_dtype);
  const uint64_t count = inputs[0].size() / in_size;
  std::vector<uint8_t> out(count * element_size(out_dtype));
  for (uint64_t i = 0; i < count; ++i) {
    float total = to_float(&inputs[0][i * in_size], in_dtype);
    for (size_t r = 1; r < inputs.size(); ++r) total = total + to_float(&inputs[r][i * in_size], in_dtype);
    from_float(total, out_dtype, &out[i * element_size(out_dtype)]);
  }
  return out;
}

std::string same_bytes(const void* got, const std::vector<uint8_t>& want, const std::string& what) {
  if (want.empty() || std::memcmp(got, want.data(), want.size()) == 0) return "";
  size_t i = 0;
  while (static_cast<const uint8_t*>(got)[i] == want[i]) ++i;
  return what + ": byte " + std::to_string(i) + " of " + std::to_string(want.size()) + " is " +
         std::to_string(static_cast<const uint8_t*>(got)[i]) + ", expected " + std::to_string(want[i]);
}

}  // namespace strata::test
