// steady_test.cc - in steady state nothing is allocated, freed, registered or created: every call that could make a
// driver stop the device (cudaMalloc, cudaFree, cudaHostAlloc and their like) has been made in the first steps.
#include <gtest/gtest.h>

#include "strata/draft/fault_control.h"
#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

const std::string kZero = "zero_optimization.", kOffload = kZero + "offload_optimizer.";

struct Mode {
  std::string name;
  int stage = 3, micro_batches = 1;
  std::string optimizer = "cpu", params = "none";
  std::vector<std::string> overrides = {};
};

const Mode kModes[] = {
    {"stage0", 0, 1, "none"},
    {"stage2", 2, 1, "none"},
    {"stage3", 3, 1, "none"},
    {"stage3Tight", 3, 2, "none", "none", {kZero + "max_live_parameters=50000", kZero + "max_reuse_distance=0"}},
    {"optimizer", 3, 1, "cpu"},
    {"sumsOnTheHost", 3, 3, "cpu"},
    {"accumulateLocally", 1, 3, "cpu"},
    {"splitMeasured", 3, 1, "cpu", "none", {kOffload + "split_update=true", kOffload + "pin_memory=true"}},
    {"budget", 3, 2, "cpu", "none", {kOffload + "device_state_budget=500000"}},
    {"params", 3, 1, "cpu", "cpu", {kOffload + "split_update=true", kOffload + "split_share=0.5"}},
};
void PrintTo(const Mode& mode, std::ostream* out) { *out << mode.name; }

// Markers come and go: an event takes no memory of the device, and waits for nothing.
const char* const kCalls[] = {"alloc",
                              "free",
                              "alloc_pinned",
                              "free_pinned",
                              "stream_create",
                              "stream_destroy",
                              "marker_create_timed",
                              "register_memory",
                              "unregister_memory"};

class Steady : public testing::TestWithParam<std::tuple<std::string, int, Mode>> {};

TEST_P(Steady, NothingIsAllocated) {
  const auto& [gpu, world, mode] = GetParam();
  if (gpu == "device_cuda") {
    if (const std::string why = Gpu::absent(world); !why.empty()) GTEST_SKIP() << why;
  }
  load<strata_device_api>("fault", STRATA_DEVICE);
  const std::string tag = "steady-" + gpu + std::to_string(world) + mode.name;
  Trial t;
  t.gpu = gpu;
  t.world = world;
  t.stage = mode.stage;
  t.micro_batches = mode.micro_batches;
  t.offload_optimizer = mode.optimizer;
  t.offload_param = mode.params;
  t.device_updates = true;
  t.model = vectors({40960, 8192, 20480, 12288}, STRATA_BF16);
  t.overrides = mode.overrides;
  if (mode.stage == 3) t.overrides.push_back(kZero + "param_persistence_threshold=10000");
  t.overrides.insert(t.overrides.end(), {"plugins.device=fault", "plugins.offload_cpu=fault"});
  t.manifest_extra = "[plugin.fault]\nwraps = \"" + gpu + ", offload_cpu\"\ntag = \"" + tag + "\"\n";
  t.gpu_body = [&, gpus = gpu](int rank, strata_engine* e, Gpu* of_rank) {
    ASSERT_EQ(build_model(e, t.model), "");
    const void* table = nullptr;
    ASSERT_EQ(strata_get_plugin_interface(e, "device", STRATA_FAULT_CONTROL, &table), STRATA_OK) << last();
    const auto* seen = static_cast<const strata_fault_control_api*>(table);
    const auto steps = [&](int first, int last_one) {
      for (int step = first; step <= last_one; ++step) {
        for (int micro = 0; micro < t.micro_batches; ++micro) {
          ASSERT_EQ(micro_batch(e, t.model, step, micro, rank, UINT32_MAX, of_rank), "");
        }
        ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      }
      ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
    };
    const auto calls = [&] {
      std::map<std::string, uint64_t> made;
      for (const char* call : kCalls) made[call] = seen->count(tag.c_str(), rank, call);
      return made;
    };
    steps(1, 4);  // the order of fetches is known from the second on, a share is met from the third on
    const std::map<std::string, uint64_t> before = calls();
    EXPECT_GT(before.at("alloc"), 0u);
    EXPECT_GT(before.at("stream_create"), 0u);
    steps(5, 12);
    EXPECT_EQ(calls(), before) << "rank " << rank;
  };
  run(t);
}

std::string name_of_steady(const testing::TestParamInfo<Steady::ParamType>& info) {
  const auto& [gpu, world, mode] = info.param;
  return mode.name + "World" + std::to_string(world);
}
INSTANTIATE_TEST_SUITE_P(Simulated, Steady,
                         testing::Combine(testing::Values("gpu_sim"), testing::Values(1, 2), testing::ValuesIn(kModes)),
                         name_of_steady);
INSTANTIATE_TEST_SUITE_P(Real, Steady,
                         testing::Combine(testing::Values("device_cuda"), testing::Values(1, 2),
                                          testing::ValuesIn(kModes)),
                         name_of_steady);

}  // namespace
}  // namespace strata::test
