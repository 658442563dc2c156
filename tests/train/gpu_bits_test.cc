// Placement never changes a bit (contract 1) on a GPU: a simulated one, whose work is late, and real ones where there
// are any.
#include <gtest/gtest.h>

#include "tests/train/shapes.h"

namespace strata::test {
namespace {

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
