// Placement never changes a bit (contract 1) on a GPU: a simulated one, whose work is late, and real ones where there
// are any.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/train/shapes.h"

namespace strata::test {
namespace {

// [09] What no param covers is zeros that the engine wrote, on a device whose fresh memory is NaN: weights, moments and
// norms have the bits of a run where memory starts as zeros, and are finite.
TEST(GpuPadding, IsNeverSeen) {
  Trial t;
  t.world = 4;
  t.clip = 0.05;
  t.model.units = {"unit"};
  t.model.params.clear();
  for (const int64_t elements : {5, 7, 3}) {
    t.model.params.push_back({"p" + std::to_string(elements), {elements}, STRATA_BF16, 0, 0, false, -1});
  }
  for (const int stage : {0, 1, 2, 3}) {
    for (const int micro_batches : {1, 3}) {
      for (const char* offload : {"none", "cpu"}) {
        t.stage = stage;
        t.micro_batches = micro_batches;
        t.offload_optimizer = offload;
        t.overrides.clear();
        if (stage == 3) t.overrides.push_back("zero_optimization.param_persistence_threshold=0");
        t.gpu = "";
        const Result plain = run(t);
        t.gpu = "gpu_sim";
        const Result poisoned = run(t);
        t.lend = true;
        const Result lent = run(t);
        t.lend = false;
        ASSERT_EQ(plain.error + poisoned.error + lent.error, "");
        EXPECT_TRUE(poisoned == plain && lent == plain)
            << "stage " << stage << ", " << micro_batches << ", " << offload;
        for (const auto* arrays : {&poisoned.weights, &poisoned.master, &poisoned.exp_avg, &poisoned.exp_avg_sq}) {
          for (const auto& [name, values] : *arrays) {
            EXPECT_TRUE(std::all_of(values.begin(), values.end(), [](float v) { return std::isfinite(v); })) << name;
          }
        }
        for (const double norm : poisoned.norms) EXPECT_TRUE(std::isfinite(norm));
      }
    }
  }
}

// A device whose work is late changes nothing, with as little waiting as there is: the host's stream, the gathers, the
// reductions and the updates each run on a queue of their own.
class GpuKeepsBits : public testing::TestWithParam<Shape> {
 protected:
  // Every setting that changes what waits for what.
  static std::vector<std::vector<std::string>> settings(const Shape& shape) {
    const std::string z = "zero_optimization.";
    std::vector<std::vector<std::string>> all = {{},
                                                 {z + "reduce_bucket_size=64"},
                                                 {z + "overlap_comm=false"},
                                                 {z + "contiguous_gradients=false"},
                                                 {z + "sub_group_size=2048"},
                                                 {"optimizer.params.state_layout=split"}};
    if (shape.offload == "cpu") {
      for (const auto& part : device_parts()) all.push_back(part);
    }
    if (shape.stage < 3) return all;
    all.push_back({z + "max_live_parameters=20000"});
    all.push_back({z + "max_reuse_distance=0"});
    all.push_back({z + "prefetch_bucket_size=0", "check_weights=true"});
    if (shape.offload != "cpu") return all;
    all.push_back({z + "offload_param.device=cpu"});
    all.push_back({z + "offload_param.device=cpu", "optimizer.params.state_layout=split"});
    for (const size_t k : {0u, 2u, 4u}) {
      all.push_back(device_parts()[k]);
      all.back().push_back(z + "offload_param.device=cpu");
    }
    return all;
  }

  // The device has a part in the update of offloaded state.
  static std::vector<std::vector<std::string>> device_parts() {
    const std::string z = "zero_optimization.", o = z + "offload_optimizer.", split = o + "split_update=true";
    const std::string small = z + "sub_group_size=2048", low = "optimizer.params.state_layout=split";
    return {{split, small},
            {split, small, o + "split_share=0.3"},
            {split, small, o + "split_share=0.6", low},
            {split, o + "split_share=1"},
            {split, o + "split_share=0.5", o + "device_state_budget=60000", small},
            {o + "device_state_budget=60000"},
            {o + "ratio=0.5", low},
            {o + "ratio=0"}};
  }

  // Which of them a host can lend memory for in another way than for the first: those that move gradients.
  static bool moves_gradients(const std::vector<std::string>& overrides) {
    if (overrides.empty()) return true;
    for (const char* key : {"reduce_bucket_size", "overlap_comm", "contiguous_gradients", "state_budget", "ratio="}) {
      if (overrides[0].find(key) != std::string::npos) return true;
    }
    return false;
  }

  static void compare(const std::string& gpu, const std::vector<int>& delays, bool lend_for_all) {
    Trial base = trial_of(GetParam());
    base.offload_optimizer = "none";
    const Result plain = run(base);
    ASSERT_EQ(plain.error, "");
    for (const auto& overrides : settings(GetParam())) {
      for (int delay : delays) {
        Trial t = base;
        t.gpu = gpu;
        t.gpu_delay_us = delay;
        t.offload_optimizer = GetParam().offload;
        t.device_updates = !overrides.empty() && overrides[0].find("offload_optimizer.") != std::string::npos;
        t.overrides.insert(t.overrides.end(), overrides.begin(), overrides.end());
        for (const bool lend : {false, true}) {
          if (lend && !lend_for_all && !moves_gradients(overrides)) continue;
          t.lend = lend;
          const Result other = run(t);
          std::string what;
          for (const std::string& text : overrides) what += text + " ";
          what += "late by " + std::to_string(delay) + " us" + std::string(lend ? ", memory lent by the host" : "");
          ASSERT_EQ(other.error, "") << what;
          EXPECT_TRUE(other == plain) << what << " changed the numbers";
          // At least a block each step: they went back in between.
          EXPECT_EQ(other.loans >= t.steps, lend) << what << ", " << other.loans << " loans";
        }
      }
    }
  }
};

TEST_P(GpuKeepsBits, Simulated) { compare("gpu_sim", {0, 300}, true); }

// Each run opens NCCL, which takes seconds.
TEST_P(GpuKeepsBits, Real) {
  const std::string absent = Gpu::absent(GetParam().world);
  if (!absent.empty()) GTEST_SKIP() << absent;
  compare("device_cuda", {0}, false);
}

INSTANTIATE_TEST_SUITE_P(Matrix, GpuKeepsBits,
                         testing::Values(Shape{0, 1, 1, 0.05, "none"}, Shape{0, 2, 3, 0.05, "none"},
                                         Shape{1, 2, 1, 0.05, "none"}, Shape{2, 2, 3, 0.05, "none"},
                                         Shape{3, 1, 1, 0.05, "none"}, Shape{3, 2, 1, 0.05, "none"},
                                         Shape{3, 3, 3, 0.05, "none"}, Shape{0, 1, 3, 0.05, "cpu"},
                                         Shape{1, 2, 3, 0.05, "cpu"}, Shape{2, 2, 1, 0.05, "cpu"},
                                         Shape{3, 1, 1, 0.05, "cpu"}, Shape{3, 2, 3, 0.05, "cpu"}),
                         shape_name);

}  // namespace
}  // namespace strata::test
