// gradient_test.cc - the sample's backward pass against finite differences of its forward pass.
//
// Compiled with GPT_REAL = double. For every param, several single elements and one random direction are checked:
// central differences with step h have an error of h^2 and rounding of 1e-16 / h, so 1e-7 relative is a safe bound
// and a wrong factor, sign or transposition anywhere misses it by far.
#include <gtest/gtest.h>

#include <cmath>

#include "data.h"
#include "whole_model.h"

namespace gpt::test {
namespace {

static_assert(sizeof(Real) == 8, "this test is compiled with GPT_REAL = double");

constexpr double kStep = 1e-4;

class Gradients : public testing::TestWithParam<int> {  // the number of layers
 protected:
  Gradients() : config_{.layers = GetParam(), .dim = 128, .context = 12}, model_(config_, 2) {
    weights_.resize(model_.size());
    for (size_t i = 0; i < weights_.size(); ++i) weights_[i] = 0.2 * random_normal(7, 1, i);
    model_.tie(&weights_);
    sample_.batch = 2;
    for (uint64_t i = 0; i < uint64_t(2 * config_.context); ++i) {  // few different bytes: each occurs several times
      sample_.input.push_back(uint8_t(random_bits(7, 2, i) % 7));
      sample_.target.push_back(uint8_t(random_bits(7, 3, i) % 7));
    }
  }

  // The loss's slope along `direction`, which covers the params at [first, first + direction.size()).
  double slope(size_t first, const std::vector<double>& direction) {
    double values[2];
    for (int side : {0, 1}) {
      std::vector<Real> moved = weights_;
      for (size_t i = 0; i < direction.size(); ++i) moved[first + i] += (side ? kStep : -kStep) * direction[i];
      values[side] = model_.loss(moved, sample_);
    }
    return (values[1] - values[0]) / (2 * kStep);
  }

  Config config_;
  WholeModel model_;
  std::vector<Real> weights_;
  Sample sample_;
};

TEST_P(Gradients, AlongARandomDirectionOfEveryParam) {
  std::vector<Real> gradients;
  model_.loss_and_gradients(weights_, sample_, &gradients);
  size_t first = 0;
  for (const UnitSpec& unit : model_.units()) {
    for (const ParamSpec& p : unit.params) {
      const size_t count = size_t(p.elements());
      std::vector<double> direction(count);
      double expected = 0, norm = 0;
      for (size_t i = 0; i < count; ++i)
        direction[i] = random_normal(8, stream_of(p.name), i), norm += direction[i] * direction[i];
      for (size_t i = 0; i < count; ++i)
        direction[i] /= std::sqrt(norm), expected += direction[i] * gradients[first + i];
      EXPECT_NEAR(slope(first, direction), expected, 1e-7 * std::max(1e-2, std::abs(expected))) << p.name;
      first += count;
    }
  }
}

TEST_P(Gradients, OfSingleElements) {
  std::vector<Real> gradients;
  model_.loss_and_gradients(weights_, sample_, &gradients);
  size_t first = 0;
  for (const UnitSpec& unit : model_.units()) {
    for (const ParamSpec& p : unit.params) {
      const size_t count = size_t(p.elements());
      for (uint64_t k = 0; k < 6; ++k) {
        const size_t at = first + (k == 0 ? 0 : k == 1 ? count - 1 : random_bits(9, stream_of(p.name), k) % count);
        EXPECT_NEAR(slope(at, {1.0}), gradients[at], 1e-7 * std::max(1e-2, std::abs(gradients[at])))
            << p.name << " element " << at - first;
      }
      first += count;
    }
  }
}

// Gradients of a loss that only looks at early positions cannot reach later inputs.
TEST_P(Gradients, AttentionDoesNotSeeTheFuture) {
  const Config short_config{.layers = config_.layers, .dim = config_.dim, .context = 5};
  WholeModel short_model(short_config, 1);
  Sample whole{1, {}, {}}, start{1, {}, {}};
  whole.input.assign(sample_.input.begin(), sample_.input.begin() + config_.context);
  whole.target.assign(sample_.target.begin(), sample_.target.begin() + config_.context);
  start.input.assign(whole.input.begin(), whole.input.begin() + 5);
  start.target.assign(whole.target.begin(), whole.target.begin() + 5);
  std::vector<Real> short_weights = weights_;  // the same, but for fewer positions
  const auto positions = short_weights.begin() + kVocabulary * config_.dim;
  short_weights.erase(positions + 5 * config_.dim, positions + config_.context * config_.dim);

  // The mean over 5 positions, found twice: by the short model, and from the long one by changing later inputs.
  const double expected = short_model.loss(short_weights, start);
  Sample changed = whole;
  for (int t = 5; t < config_.context; ++t) changed.input[size_t(t)] ^= 3;
  EXPECT_NE(model_.loss(weights_, whole), model_.loss(weights_, changed));
  for (const Sample& s : {whole, changed}) EXPECT_NEAR(model_.prefix_loss(weights_, s, 5), expected, 1e-12);
}

INSTANTIATE_TEST_SUITE_P(Layers, Gradients, testing::Values(1, 3));

}  // namespace
}  // namespace gpt::test
