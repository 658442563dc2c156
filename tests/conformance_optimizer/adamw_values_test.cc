// adamw_values_test.cc - the numbers: known results, and torch.optim.AdamW's order of operations in fp64.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/conformance_optimizer/adamw_fixture.h"

namespace strata::test {
namespace {

struct Exact {
  double p, m, v;
};

// torch.optim.AdamW and Adam (single-tensor path) in fp64, for one element; `change` is what p loses.
double reference(Exact& x, double g, const strata_optim_group& s, uint64_t step, bool decoupled) {
  const double before = x.p;
  if (decoupled) x.p *= 1 - s.lr * s.weight_decay;
  if (!decoupled) g += s.weight_decay * before;
  x.m = s.beta1 * x.m + (1 - s.beta1) * g;
  x.v = s.beta2 * x.v + (1 - s.beta2) * g * g;
  const double correction1 = 1 - std::pow(s.beta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(s.beta2, static_cast<double>(step));
  x.p -= s.lr / correction1 * x.m / (std::sqrt(x.v) / std::sqrt(correction2) + s.eps);
  return before - x.p;
}

double ulp(double x) {
  return std::nextafter(std::abs(static_cast<float>(x)), INFINITY) - std::abs(static_cast<float>(x));
}

float one_element(bool decoupled, double eps, bool split) {
  Adamw adamw(options_for({STRATA_F32, STRATA_F32, split}, "auto", decoupled));
  Data data({STRATA_F32, STRATA_F32, split}, 1);
  data.grad.as<float>()[0] = 0.5f;
  adamw.import_canonical(data, 0, {1.0f});
  adamw.step(data, adamw.scalars(group(0.1, 0.9, 0.999, eps, 0.1), 1));
  EXPECT_EQ(adamw.canonical(data, 0)[0], data.weight.as<float>()[0]);
  return data.weight.as<float>()[0];
}

// cases.md 17, with both modes alive at once.
TEST(AdamwValues, DecoupledAndL2DecayAreTwoDifferentThings) {
  for (const bool split : {false, true}) {
    EXPECT_NEAR(one_element(true, 1e-8, split), 0.89, 1e-7);
    EXPECT_NEAR(one_element(true, 0.1, split), 0.906667, 1e-6);
    EXPECT_NEAR(one_element(false, 1e-8, split), 0.90, 1e-7);
    EXPECT_NEAR(one_element(false, 0.1, split), 0.914286, 1e-6);
  }
  const Kind kind = {STRATA_F32, STRATA_F32, true};
  Adamw decoupled(options_for(kind, "auto", true)), l2(options_for(kind, "auto", false));
  for (int round = 0; round < 2; ++round) {
    for (Adamw* adamw : {&decoupled, &l2}) {
      Data data(kind, 1);
      data.grad.as<float>()[0] = 0.5f;
      data.weight.as<float>()[0] = 1;
      adamw->step(data, adamw->scalars(group(0.1, 0.9, 0.999, 1e-8, 0.1), 1));
      EXPECT_NEAR(data.weight.as<float>()[0], adamw == &decoupled ? 0.89 : 0.90, 1e-7);
    }
  }
}

// One step from the same fp32 state. The weight: half an ulp for its one rounding, and a few parts in 2^24 of the
// change; so at most 1 ulp wherever the change is below an eighth of the weight.
TEST(AdamwValues, OneStepIsWithinOneUlpOfExactArithmetic) {
  uint64_t compared = 0;
  for (const bool decoupled : {true, false}) {
    for (const double beta1 : {0.9, 0.3, 0.0}) {
      for (const uint64_t step : {uint64_t{1}, uint64_t{10}, uint64_t{100'000}}) {
        const auto settings = group(1e-3, beta1, beta1 == 0 ? 0.4 : 0.999, 1e-8, 0.1);
        const Kind kind = {STRATA_F32, STRATA_F32, true};
        Adamw adamw(options_for(kind, "auto", decoupled));
        Data data(kind, 50'000), before(kind, 50'000);
        fill_ordinary(data, static_cast<uint32_t>(step));
        before.assign(data);
        adamw.step(data, adamw.scalars(settings, step), {}, 1);
        for (uint64_t i = 0; i < data.count; ++i) {
          const double g = before.grad.as<float>()[i], m = before.state[0].as<float>()[i];
          Exact x = {before.weight.as<float>()[i], m, before.state[1].as<float>()[i]};
          const double old = x.p, change = reference(x, g, settings, step, decoupled);
          // What cancellation costs where gradient, moment and L2 pull nearly cancel, as in any fp32 arithmetic.
          const double pull = std::abs(g) + (decoupled ? 0 : 0.1 * std::abs(old)), parts = std::abs(m) + pull;
          const double direction = settings.lr / std::sqrt(x.v) * parts *
                                   std::sqrt(1 - std::pow(settings.beta2, static_cast<double>(step))) /
                                   (1 - std::pow(beta1, static_cast<double>(step)));
          ASSERT_NEAR(data.state[0].as<float>()[i], x.m, 0x1p-23 * parts);
          ASSERT_NEAR(data.state[1].as<float>()[i], x.v, 0x1p-22 * (x.v + (decoupled ? 0 : pull * pull)));
          const double bound = 0.5 * ulp(x.p) + 0x1p-22 * (direction + 1e-4 * std::abs(old)) + 0x1p-140;
          ASSERT_NEAR(data.weight.as<float>()[i], x.p, bound) << "element " << i << ", step " << step;
          if (8 * direction > std::abs(old) || 8 * std::abs(change) > std::abs(old)) continue;
          ++compared;
          ASSERT_NEAR(data.weight.as<float>()[i], x.p, ulp(x.p)) << "element " << i << ", step " << step;
        }
      }
    }
  }
  EXPECT_GT(compared, 300'000u);
}

// 16-bit gradients and weights: the stored weight is the exact result, rounded, or its neighbour.
TEST(AdamwValues, SixteenBitWeightsAreWithinOneUlpToo) {
  for (const strata_dtype dtype : {STRATA_BF16, STRATA_F16}) {
    const Kind kind = {dtype, dtype, false};
    const auto settings = group(1e-3, 0.9, 0.999, 1e-8, 0.1);
    Adamw adamw(options_for(kind));
    Data data(kind, 50'000), before(kind, 50'000);
    fill_ordinary(data, 77);
    before.assign(data);
    adamw.step(data, adamw.scalars(settings, 3), {}, 0.5f);
    for (uint64_t i = 0; i < data.count; ++i) {
      const auto value = [dtype](uint16_t h) -> double {
        if (dtype == STRATA_BF16) return from_bits(static_cast<uint32_t>(h) << 16);
        const int exponent = (h >> 10) & 31, mantissa = h & 1023;
        const double magnitude = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
        return h & 0x8000 ? -magnitude : magnitude;
      };
      Exact x = {before.state[0].as<float>()[i], before.state[1].as<float>()[i], before.state[2].as<float>()[i]};
      reference(x, 0.5 * value(before.grad.as<uint16_t>()[i]), settings, 3, true);
      const double unit = dtype == STRATA_BF16 ? ulp(x.p) * 65536 : std::max(ulp(x.p) * 8192, 0x1p-24);
      ASSERT_NEAR(value(data.weight.as<uint16_t>()[i]), x.p, 0.501 * unit + 0x1p-26) << i;
    }
  }
}

// A thousand steps stay beside exact arithmetic: no rounded beta biases a moment, no decay is lost.
TEST(AdamwValues, ManySteps) {
  const Kind kind = {STRATA_F32, STRATA_F32, true};
  const auto settings = group(1e-4, 0.9, 0.999, 1e-8, 1e-4);  // lr * decay = 1e-8: 1 - 1e-8 is 1 in fp32
  Adamw adamw(options_for(kind));
  Data data(kind, 512);
  fill_ordinary(data, 31);
  std::vector<Exact> exact(data.count);
  for (uint64_t i = 0; i < data.count; ++i) {
    exact[i] = {data.weight.as<float>()[i], data.state[0].as<float>()[i], data.state[1].as<float>()[i]};
  }
  Data gradient(kind, data.count);
  double bias = 0;
  for (uint64_t step = 1; step <= 1'000; ++step) {
    fill_ordinary(gradient, 500 + static_cast<uint32_t>(step));
    data.grad.assign(gradient.grad.copy());
    adamw.step(data, adamw.scalars(settings, step));
    for (uint64_t i = 0; i < data.count; ++i) reference(exact[i], data.grad.as<float>()[i], settings, step, true);
  }
  for (uint64_t i = 0; i < data.count; ++i) {
    // A thousand roundings of up to half an ulp: 0.29 sqrt(1000) = 9 ulp is one standard deviation.
    EXPECT_NEAR(data.weight.as<float>()[i], exact[i].p, 60 * 0x1p-27);
    EXPECT_NEAR(data.state[1].as<float>()[i], exact[i].v, 5e-6 * exact[i].v);
    bias += (data.state[1].as<float>()[i] / exact[i].v - 1) / static_cast<double>(data.count);
  }
  EXPECT_LT(std::abs(bias), 2e-7);
}

}  // namespace
}  // namespace strata::test
