// adamw_rounding_test.cc - fp32 to the 16-bit weight: to nearest, ties away from zero, on every path that writes one;
// and the split master, which is one-to-one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/conformance_optimizer/adamw_fixture.h"

namespace strata::test {
namespace {

// Rounding by search in the sorted list of all non-negative 16-bit values: nothing in common with bit tricks.
// `infinity` stands where the next value would be, as IEEE rounding has it.
class Nearest {
 public:
  explicit Nearest(strata_dtype dtype) : dtype_(dtype) {
    const uint16_t infinity = dtype == STRATA_BF16 ? 0x7F80 : 0x7C00;
    for (uint16_t h = 0; h <= infinity; ++h) values_.push_back(value(h));
  }
  uint16_t operator()(float x) const {
    if (x != x) return dtype_ == STRATA_BF16 ? 0x7FC0 : 0x7E00;
    const double magnitude = std::min(std::abs(static_cast<double>(x)), values_.back());
    auto above = static_cast<size_t>(std::lower_bound(values_.begin(), values_.end(), magnitude) - values_.begin());
    if (above > 0 && magnitude - values_[above - 1] < values_[above] - magnitude) --above;
    return static_cast<uint16_t>(above | (std::signbit(x) ? 0x8000 : 0));
  }

 private:
  double value(uint16_t h) const {
    const int mantissa_bits = dtype_ == STRATA_BF16 ? 7 : 10, bias = dtype_ == STRATA_BF16 ? 127 : 15;
    const int exponent = h >> mantissa_bits, mantissa = h & ((1 << mantissa_bits) - 1);
    if (exponent == 0) return std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
  }
  strata_dtype dtype_;
  std::vector<double> values_;
};

// Every 16-bit upper half with lower halves around the tie; every tie of fp16 with its neighbours; random bits.
std::vector<float> hard_values() {
  std::vector<float> all;
  for (uint32_t high = 0; high < 0x10000; ++high) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu})
      all.push_back(from_bits(high << 16 | low));
  }
  for (uint32_t h = 0; h < 0x7C00; ++h) {
    // The middle between fp16 values h and h + 1 has one mantissa bit more, so fp32 holds it exactly.
    const uint32_t exponent = h >> 10, mantissa = h & 1023;
    const double middle =
        exponent ? std::ldexp(1024 + mantissa + 0.5, static_cast<int>(exponent) - 25) : std::ldexp(mantissa + 0.5, -24);
    const uint32_t b = bits(static_cast<float>(middle));
    for (const uint32_t x : {b - 1, b, b + 1}) {
      all.push_back(from_bits(x));
      all.push_back(from_bits(x | 0x80000000));
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 1'000'000; ++i) all.push_back(from_bits(static_cast<uint32_t>(random())));
  return all;
}

TEST(AdamwRounding, ImportRoundsEveryTieAwayFromZero) {
  const auto values = hard_values();
  for (const strata_dtype dtype : {STRATA_BF16, STRATA_F16}) {
    const Nearest nearest(dtype);
    const Kind kind = {STRATA_F32, dtype, false};
    Adamw adamw(options_for(kind));
    Data data(kind, values.size());
    adamw.import_canonical(data, 0, values);
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_EQ(data.weight.as<uint16_t>()[i], nearest(values[i])) << std::hex << bits(values[i]);
    }
  }
}

// lr 0 and no gradient: the new master is the old one (an infinity times 0 is NaN), so `step` only rounds.
TEST(AdamwRounding, StepRoundsEveryTieAwayFromZero) {
  auto values = hard_values();
  for (float& x : values) {
    if (std::isinf(x)) x = from_bits(0x7FC00000);
  }
  for (const Kind& kind : {Kind{STRATA_F32, STRATA_BF16, false}, Kind{STRATA_BF16, STRATA_BF16, true},
                           Kind{STRATA_F16, STRATA_F16, false}}) {
    const Nearest nearest(kind.weight);
    for (const std::string& isa : isas()) {
      Adamw adamw(options_for(kind, isa));
      Data data(kind, values.size());
      adamw.import_canonical(data, 0, values);
      std::memset(data.grad.data(), 0, data.grad.bytes());
      if (!kind.split) std::memset(data.weight.data(), 0xA5, data.weight.bytes());
      adamw.step(data, adamw.scalars(group(0, 0.9, 0.999, 1e-8, 0), 1));
      const auto master = adamw.canonical(data, 0);
      for (size_t i = 0; i < values.size(); ++i) {
        const uint32_t want = values[i] != values[i] ? 0x7FC00000 : bits(values[i]);
        ASSERT_EQ(bits(master[i]), want) << name(kind) << isa << std::hex << bits(values[i]);
        ASSERT_EQ(data.weight.as<uint16_t>()[i], nearest(values[i]))
            << name(kind) << isa << std::hex << bits(values[i]);
      }
    }
  }
}

TEST(AdamwRounding, SplitMasterIsOneToOne) {
  const auto values = hard_values();
  const Kind split = {STRATA_F32, STRATA_BF16, true}, whole = {STRATA_F32, STRATA_BF16, false};
  Adamw adamw(options_for(split)), other(options_for(whole));
  Data a(split, values.size()), b(whole, values.size());
  adamw.import_canonical(a, 0, values);
  other.import_canonical(b, 0, values);
  EXPECT_EQ(a.weight.copy(), b.weight.copy());
  const auto back = adamw.canonical(a, 0);
  for (size_t i = 0; i < values.size(); ++i) {
    const uint32_t want = values[i] != values[i] ? 0x7FC00000 : bits(values[i]);
    ASSERT_EQ(bits(back[i]), want) << std::hex << bits(values[i]);
    ASSERT_EQ(a.state[0].as<uint16_t>()[i], want & 0xFFFF);
  }
  EXPECT_EQ(bits(other.canonical(b, 0)), bits(back));
}

// Every fp16 and bf16 gradient pattern is read as the number it is: with beta1 = 0 the first moment is the gradient.
TEST(AdamwRounding, EverySixteenBitGradientIsReadExactly) {
  for (const strata_dtype dtype : {STRATA_BF16, STRATA_F16}) {
    for (const std::string& isa : isas()) {
      const Kind kind = {dtype, STRATA_F32, true};
      Adamw adamw(options_for(kind, isa));
      Data data(kind, 65'536);
      for (uint32_t h = 0; h < 65'536; ++h) data.grad.as<uint16_t>()[h] = static_cast<uint16_t>(h);
      adamw.step(data, adamw.scalars(group(0, 0, 0, 1, 0), 1));
      for (uint32_t h = 0; h < 65'536; ++h) {
        const uint32_t exponent = dtype == STRATA_BF16 ? h >> 7 & 255 : h >> 10 & 31;
        const uint32_t mantissa = dtype == STRATA_BF16 ? h & 127 : h & 1023;
        const bool special = exponent == (dtype == STRATA_BF16 ? 255 : 31);
        float want = from_bits(h << 16);
        if (dtype == STRATA_F16) {
          want = static_cast<float>(exponent ? std::ldexp(1024 + mantissa, static_cast<int>(exponent) - 25)
                                             : std::ldexp(mantissa, -24));
          if (special) want = INFINITY;
          if (h & 0x8000) want = -want;
        }
        // toward(0, g, -0) is g - 0 * g: an infinity becomes NaN there, as NaN stays.
        const float got = data.state[0].as<float>()[h];
        if (special) {
          ASSERT_EQ(bits(got), 0x7FC00000u) << h;
        } else {
          ASSERT_EQ(got, want) << isa << std::hex << h;
        }
      }
    }
  }
}

}  // namespace
}  // namespace strata::test
