// Training through the engine equals the reference, and placement never changes a bit (contract 1).
#include <gtest/gtest.h>

#include <cmath>

#include "tests/train/by_hand.h"
#include "tests/train/reference.h"
#include "tests/train/shapes.h"

namespace strata::test {
namespace {

// fp32 against fp64: a few roundings per step on values of about 0.05.
void expect_close(const std::map<std::string, std::vector<float>>& a,
                  const std::map<std::string, std::vector<float>>& b, double tolerance, const char* what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [name, values] : a) {
    const auto& other = b.at(name);
    ASSERT_EQ(values.size(), other.size()) << what << " " << name;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], other[i], tolerance) << what << " of " << name << " element " << i;
    }
  }
}

void expect_reference(const Trial& t) {
  const Result got = run(t), want = reference(t);
  ASSERT_EQ(got.error, "") << t.name;
  ASSERT_EQ(got.norms.size(), want.norms.size());
  for (size_t i = 0; i < got.norms.size(); ++i)
    EXPECT_NEAR(got.norms[i], want.norms[i], 2e-5 * want.norms[i]) << t.name;
  expect_close(got.master, want.master, 2e-5, "master");
  // A weight that rounds to the other bf16 neighbour (2.4e-4 at 0.05) changes a later gradient by 0.3 of that.
  expect_close(got.exp_avg, want.exp_avg, 3e-5, "exp_avg");
  expect_close(got.exp_avg_sq, want.exp_avg_sq, 1e-5, "exp_avg_sq");
  expect_close(got.weights, want.weights, 5e-4, "weight");  // one bf16 step at 0.05
}

// ---- equals the reference ----------------------------------------------------------------------------------------

std::vector<Shape> all_shapes() {
  std::vector<Shape> shapes;
  for (int stage : {0, 1, 2, 3}) {
    for (int world : {1, 2, 3, 4}) {
      for (int micro : {1, 3}) {
        for (double clip : {0.0, 0.05}) {
          for (const char* offload : {"none", "cpu"}) shapes.push_back({stage, world, micro, clip, offload});
        }
      }
    }
  }
  return shapes;
}

class EqualsReference : public testing::TestWithParam<Shape> {};
TEST_P(EqualsReference, AllArraysAndNorms) { expect_reference(trial_of(GetParam())); }
INSTANTIATE_TEST_SUITE_P(Matrix, EqualsReference, testing::ValuesIn(all_shapes()), shape_name);

// Betas, eps, decay and rates of the groups, other ones in every step.
Trial with_changing_settings(const Shape& shape) {
  Trial t = trial_of(shape);
  t.change_settings = true;
  t.steps = 6;
  return t;
}

TEST(EqualsReference, WithOtherSettingsInEveryStep) {
  for (const int stage : {0, 3}) {
    for (const int world : {1, 2}) {
      const Trial t = with_changing_settings({stage, world, 2, 0.05, "none"});
      expect_reference(t);
      EXPECT_FALSE(run(t) == run(trial_of({stage, world, 2, 0.05, "none"})));
    }
  }
}

// ---- placement never changes a bit -------------------------------------------------------------------------------

// Everything contract 1 says may differ without changing numbers.
std::vector<Trial> placements(const Trial& base) {
  std::vector<Trial> trials;
  auto with = [&](const std::string& name, std::vector<std::string> overrides) {
    Trial t = base;
    t.name = name;
    t.overrides.insert(t.overrides.end(), overrides.begin(), overrides.end());
    trials.push_back(std::move(t));
  };
  const std::string z = "zero_optimization.";
  with("offload_optimizer cpu", {z + "offload_optimizer.device=cpu"});
  with("small sub-groups", {z + "sub_group_size=2048"});
  with("odd sub-groups", {z + "sub_group_size=5000"});
  with("middle buckets", {z + "reduce_bucket_size=8192"});
  with("gradients in the host's tensors", {z + "contiguous_gradients=false"});
  with("scalar AdamW", {});
  trials.back().manifest_extra = "[plugin.optim_adamw]\nisa = \"scalar\"\n";
  with("three threads", {"threads=3"});
  for (const std::string bucket : {"7", "64", "1e9"}) {  // [36]
    for (const std::string overlap : {"true", "false"}) {
      const std::string buckets = "buckets of " + bucket + ", overlap " + overlap;
      with(buckets, {z + "reduce_bucket_size=" + bucket, z + "overlap_comm=" + overlap});
      with(buckets + ", late reductions", trials.back().overrides);
      trials.back().overrides.push_back("plugins.collective=fault");
      trials.back().manifest_extra =
          "[plugin.fault]\nwraps = \"comm_local\"\nrules = \"reduce_scatter:*:late=2, all_reduce:*:late=2\"\n";
    }
  }
  with("split master", {"optimizer.params.state_layout=split"});
  if (base.stage == 3) {
    with("no prefetch", {z + "prefetch_bucket_size=0"});
    with("few live parameters", {z + "max_live_parameters=20000"});
    with("no reuse", {z + "max_reuse_distance=0"});
    with("offload_param cpu", {z + "offload_param.device=cpu"});
    with("both offloads, small sub-groups",
         {z + "offload_param.device=cpu", z + "offload_optimizer.device=cpu", z + "sub_group_size=2048"});
  }
  return trials;
}

void expect_same_bits(const Trial& base) {
  const Result plain = run(base);
  ASSERT_EQ(plain.error, "");
  for (const Trial& t : placements(base)) {
    const Result other = run(t);
    ASSERT_EQ(other.error, "") << t.name;
    EXPECT_TRUE(other == plain) << t.name << " changed the numbers";
  }
}

class PlacementKeepsBits : public testing::TestWithParam<Shape> {};
TEST_P(PlacementKeepsBits, AgainstThePlainRun) { expect_same_bits(trial_of(GetParam())); }
TEST(PlacementKeepsBits, WithOtherSettingsInEveryStep) {
  expect_same_bits(with_changing_settings({3, 2, 1, 0.05, "none"}));
}
INSTANTIATE_TEST_SUITE_P(Matrix, PlacementKeepsBits,
                         testing::Values(Shape{0, 1, 1, 0.05, "none"}, Shape{0, 2, 3, 0.05, "none"},
                                         Shape{1, 3, 3, 0.05, "none"}, Shape{2, 2, 3, 0.05, "none"},
                                         Shape{3, 1, 1, 0.05, "none"}, Shape{3, 2, 1, 0.05, "none"},
                                         Shape{3, 3, 3, 0.05, "none"}),
                         shape_name);

// Zeros that stand for gradients nobody gave are written into lent memory, too.
TEST(Train, UnitsWithoutGradientsInLentMemory) {
  for (const char* bucket :
       {"zero_optimization.reduce_bucket_size=64", "zero_optimization.reduce_bucket_size=100000"}) {
    for (int stage : {0, 3}) {
      Trial t = trial_of({stage, 2, 1, 0.05, "none"});
      t.skip_unit = 1;
      t.model = vectors({3000, 4000, 3000, 4000, 3000, 4000}, STRATA_BF16);  // small buckets: room for some
      t.overrides.push_back(bucket);
      const Result plain = run(t);
      ASSERT_EQ(plain.error, "");
      t.gpu = "gpu_sim";
      t.gpu_delay_us = 300;
      t.lend = true;
      const Result lent = run(t);
      ASSERT_EQ(lent.error, "") << bucket;
      EXPECT_TRUE(lent == plain) << "stage " << stage << ", " << bucket;
    }
  }
}

// Gradients in the first of two micro-batches, on a stream that is late; none in the second.
double norm_of_first_micro_batch_alone(int stage, bool wait) {
  Trial t;
  t.stage = stage;
  t.micro_batches = 2;
  t.gpu = "gpu_sim";
  t.model = vectors({4096, 4096}, STRATA_BF16);
  const std::string job = "alone-" + std::to_string(stage) + std::to_string(wait);
  t.gpu_delay_us = 20000;
  Gpu gpu(t.gpu, job, 0, 1, t.gpu_delay_us);
  std::string error;
  strata_engine* e = open_rank(t, job, 0, &error);
  EXPECT_EQ(error, "");
  EXPECT_EQ(build_model(e, t.model), "");
  for (size_t k = 0; k < 2; ++k) give_gradient_on(gpu, e, t.model, k);
  if (wait) gpu.wait();
  EXPECT_EQ(strata_end_backward(e), STRATA_OK) << last();
  EXPECT_EQ(strata_end_backward(e), STRATA_OK) << last();
  EXPECT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
  strata_step_info info;
  STRATA_INIT(&info);
  EXPECT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
  gpu.wait();
  strata_close(e);
  return info.grad_norm;
}

TEST(Train, AMicroBatchWithoutGradientsWaitsForTheOneBefore) {
  for (int stage : {0, 1}) {
    EXPECT_EQ(norm_of_first_micro_batch_alone(stage, false), norm_of_first_micro_batch_alone(stage, true)) << stage;
  }
}

TEST(Train, StagesAgreeBitByBitWithOneMicroBatch) {
  Trial t = trial_of({0, 3, 1, 0.05, "none"});
  const Result stage0 = run(t);
  ASSERT_EQ(stage0.error, "");
  for (int stage : {1, 2, 3}) {
    t.stage = stage;
    t.overrides = stage == 3 ? std::vector<std::string>{"zero_optimization.param_persistence_threshold=0"}
                             : std::vector<std::string>{};
    const Result other = run(t);
    ASSERT_EQ(other.error, "");
    EXPECT_TRUE(other == stage0) << "stage " << stage;
  }
}

TEST(Train, UnusedUnitKeepsItsState) {
  for (int stage : {0, 1, 2, 3}) {
    for (uint32_t unit : {1u, 4u}) {  // 4 is the head, whose tied weight still gets the embedding's gradient
      Trial t = trial_of({stage, 2, 1, 0, "none"});
      t.skip_unit = unit;
      expect_reference(t);
    }
  }
}

}  // namespace
}  // namespace strata::test
