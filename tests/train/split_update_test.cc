// split_update_test.cc - the device's part in the update of offloaded state: what is moved for it, what is planned, and
// what is refused. That it changes no bit is in gpu_bits_test.cc.
#include <gmock/gmock.h>

#include <mutex>

#include "tests/train/by_hand.h"
#include "tests/train/crossed.h"

namespace strata::test {
namespace {

const std::string kOffload = "zero_optimization.offload_optimizer.";
constexpr uint64_t kParams = 40960 + 8192 + 20480 + 12288;  // 40 sub-groups of 2,048

Trial offloaded(std::vector<std::string> overrides) {
  Trial t;
  t.gpu = "gpu_sim";
  t.offload_optimizer = "cpu";
  t.device_updates = !overrides.empty();
  t.model = vectors({40960, 8192, 20480, 12288}, STRATA_BF16);
  t.overrides = std::move(overrides);
  t.overrides.push_back("zero_optimization.sub_group_size=2048");
  return t;
}

Crossed per_param(const Trial& t) { return crossed(t, kParams); }

// 2 + 2 bytes per param for gradients out and weights in; 24 more where state is streamed, whose gradient comes back in
// place of the weight.
TEST(SplitUpdate, MovesWhatTheFormulaSays) {
  for (const double share : {0.0, 0.25, 0.5, 1.0}) {
    const Crossed c =
        per_param(offloaded({kOffload + "split_update=true", kOffload + "split_share=" + std::to_string(share)}));
    EXPECT_DOUBLE_EQ(c.in, 2 + 12 * share) << share;
    EXPECT_DOUBLE_EQ(c.out, 2 + 12 * share) << share;
  }
}

// The weight is half of a split master: what the host updates needs the old one.
TEST(SplitUpdate, MovesTheOldWeightOfASplitMaster) {
  const std::string low = "optimizer.params.state_layout=split";
  Crossed c = per_param(offloaded({kOffload + "split_update=true", kOffload + "split_share=0", low}));
  EXPECT_DOUBLE_EQ(c.in, 2);
  EXPECT_DOUBLE_EQ(c.out, 2 + 2);
  c = per_param(offloaded({kOffload + "split_update=true", kOffload + "split_share=1", low}));
  EXPECT_DOUBLE_EQ(c.in, 2 + 10);
  EXPECT_DOUBLE_EQ(c.out, 2 + 10);
}

TEST(SplitUpdate, StateOnTheDeviceMovesNothing) {
  const Crossed all = per_param(offloaded({kOffload + "ratio=0"}));
  EXPECT_EQ(all.in, 0);
  EXPECT_EQ(all.out, 0);
  // Room for the units of 8,192 and 12,288: the first does not fit, the third does not any more.
  const Crossed some = per_param(offloaded({kOffload + "device_state_budget=" + std::to_string(12 * 20480)}));
  EXPECT_DOUBLE_EQ(some.in, 2.0 * 61440 / kParams);
  EXPECT_DOUBLE_EQ(some.out, 2.0 * 61440 / kParams);
}

// A measured share moves as much in as out, and another number of sub-groups at each step.
TEST(SplitUpdate, AMeasuredShareMovesWholeSubGroups) {
  const Result none = run(offloaded({kOffload + "split_update=true", kOffload + "split_share=0"}));
  const Result some = run(offloaded({kOffload + "split_update=true"}));
  ASSERT_EQ(none.error + some.error, "");
  const uint64_t in = some.counters.tier_read[1] - none.counters.tier_read[1];
  EXPECT_EQ(in, some.counters.tier_write[1] - none.counters.tier_write[1]);
  EXPECT_GT(in, 0u);
  EXPECT_EQ(in % (12 * 2048), 0u);
}

// Each of the host's parts takes 50 ms and more: the device takes more of them from step to step.
TEST(SplitUpdate, AMeasuredShareFollowsASlowHost) {
  Trial t = offloaded({kOffload + "split_update=true", "plugins.optimizer=fault"});
  t.model = vectors({20480}, STRATA_BF16);
  t.manifest_extra = "[plugin.fault]\nwraps = \"optim_adamw\"\nrules = \"optimizer.step:*:late=50\"\n";
  uint64_t before = 0;
  std::vector<uint64_t> streamed;
  t.gpu_body = [&](int rank, strata_engine* e, Gpu* gpu) {
    ASSERT_EQ(build_model(e, t.model), "");
    for (int step = 1; step <= 5; ++step) {
      ASSERT_EQ(micro_batch(e, t.model, step, 0, rank, UINT32_MAX, gpu), "");
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
      strata_counters c;
      STRATA_INIT(&c);
      ASSERT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &c), STRATA_OK) << last();
      const uint64_t in = c.tier_read[1] - std::exchange(before, c.tier_read[1]);
      streamed.push_back((in - 2 * 20480) / 12 / 2048);
    }
  };
  EXPECT_EQ(run(t).error, "");
  ASSERT_EQ(streamed.size(), 5u);
  EXPECT_EQ(streamed[0], 3u);  // of 10
  EXPECT_GT(streamed[4], 6u);
}

std::map<std::string, uint64_t> plan_of(Trial t) {
  std::map<std::string, uint64_t> plan;
  run_body(std::move(t), [&](int, strata_engine* e) {
    ASSERT_EQ(build_model(e, offloaded({}).model), "");
    uint64_t count = 0;
    ASSERT_EQ(strata_get_plan(e, nullptr, 0, &count), STRATA_OK) << last();
    std::vector<strata_plan_item> items(count);
    for (strata_plan_item& item : items) STRATA_INIT(&item);
    ASSERT_EQ(strata_get_plan(e, items.data(), count, &count), STRATA_OK) << last();
    for (const strata_plan_item& item : items) plan[std::to_string(item.tier) + " " + item.what] += item.bytes;
  });
  return plan;
}

TEST(SplitUpdate, ThePlanSaysWhereStateAndBuffersAre) {
  auto plan = plan_of(offloaded({}));
  EXPECT_EQ(plan["1 optimizer state"], 12 * kParams);
  EXPECT_EQ(plan["0 optimizer state"], 0u);
  EXPECT_EQ(plan["0 buffers of streamed state"], 0u);
  plan = plan_of(offloaded({kOffload + "device_state_budget=" + std::to_string(12 * 50000)}));
  EXPECT_EQ(plan["0 optimizer state"], 12u * 49152);
  EXPECT_EQ(plan["1 optimizer state"], 12 * (kParams - 49152));
  EXPECT_EQ(plan["0 reduced gradients"], 2u * 49152);
  EXPECT_EQ(plan["1 reduced gradients"], 2 * (kParams - 49152));
  plan = plan_of(offloaded({kOffload + "split_update=true"}));
  EXPECT_EQ(plan["1 optimizer state"], 12 * kParams);
  // Of the largest unit: state and gradient come to the device, where the weight is; new weights of the host's parts.
  EXPECT_EQ(plan["0 buffers of streamed state"], 3u * 14 * 40960);
  EXPECT_EQ(plan["1 update buffers"], 12u * 2 * 2048);
}

Trial on_cpu(Trial t) {
  t.gpu = "";
  t.offload_optimizer = t.offload_param = "none";
  t.device_updates = false;
  std::vector<std::string> kept;
  for (const std::string& text : t.overrides) {
    if (text.find("offload_") == std::string::npos) kept.push_back(text);
  }
  t.overrides = kept;
  return t;
}

// The resident unit is made of params of several units: those of a unit left out keep their weights.
TEST(SplitUpdate, ResidentParamsOfAUnitLeftOutStay) {
  for (const uint32_t skipped : {1u, 2u}) {
    for (const std::vector<std::string>& part : std::vector<std::vector<std::string>>{
             {}, {kOffload + "split_update=true", kOffload + "split_share=0.5"}, {kOffload + "ratio=0.5"}}) {
      Trial t = offloaded(part);
      t.model = odd_model();
      t.stage = 3;
      t.skip_unit = skipped;
      t.overrides.push_back("zero_optimization.param_persistence_threshold=200");
      const Result plain = run(on_cpu(t)), ours = run(t);
      ASSERT_EQ(plain.error + ours.error, "");
      EXPECT_TRUE(ours == plain) << skipped << (part.empty() ? "" : part[0]);
    }
  }
}

// State on the device and weights in host memory: buffers are for parts that fit into them, sub-groups are larger.
TEST(SplitUpdate, LargeSubGroupsWithWeightsInHostMemory) {
  Trial t = offloaded({kOffload + "ratio=0"});
  t.model = vectors({4096, 4096, (17 << 20) + 5000}, STRATA_BF16);
  t.overrides = {kOffload + "ratio=0", "zero_optimization.param_persistence_threshold=0"};
  t.stage = 3;
  t.steps = 1;
  t.offload_param = "cpu";
  const Result plain = run(on_cpu(t)), ours = run(t);
  ASSERT_EQ(plain.error + ours.error, "");
  EXPECT_TRUE(ours == plain);
}

TEST(SplitUpdate, NewWeightsOfResidentParamsAreCounted) {
  for (const char* params : {"none", "cpu"}) {
    Trial t = offloaded({});
    t.stage = 3;
    t.offload_param = params;
    t.overrides.push_back("zero_optimization.param_persistence_threshold=100000");
    const Crossed c = per_param(t);
    EXPECT_DOUBLE_EQ(c.in, 2) << params;
    EXPECT_DOUBLE_EQ(c.out, 2) << params;
  }
}

TEST(SplitUpdate, ARatioIsMetByTheUnit) {
  for (const auto& [ratio, kept] : {std::pair{"0.9", 1u}, {"0.8", 2u}, {"0.5", 5u}, {"0.1", 9u}}) {
    Trial t = offloaded({kOffload + "ratio=" + ratio});
    t.model = vectors(std::vector<int64_t>(10, 4096), STRATA_BF16);
    uint64_t on_device = 0;
    run_body(t, [&](int, strata_engine* e) {
      ASSERT_EQ(build_model(e, t.model), "");
      uint64_t count = 0;
      strata_plan_item items[64];
      ASSERT_EQ(strata_get_plan(e, items, 64, &count), STRATA_OK) << last();
      for (uint64_t i = 0; i < count; ++i) {
        if (std::string(items[i].what) == "optimizer state" && items[i].tier == 0) on_device = items[i].bytes;
      }
    });
    EXPECT_EQ(on_device, kept * 12 * 4096) << ratio;
  }
}

TEST(SplitUpdate, ATierWithoutAddressesIsRefused) {
  Trial t = offloaded({kOffload + "split_update=true"});
  t.overrides.push_back("plugins.offload_cpu=fault");
  t.manifest_extra = "[plugin.fault]\nwraps = \"offload_cpu\"\nhide_map = true\n";
  EXPECT_THAT(run(t).error, testing::HasSubstr("has no addressable memory"));
}

// What a stream of the host's still reads is not written over.
TEST(WriteParam, WaitsForWhatTheHostsStreamReads) {
  for (const int stage : {0, 3}) {
    Trial t;
    t.stage = stage;
    t.gpu = "gpu_sim";
    t.model = vectors({4096}, STRATA_BF16);
    if (stage == 3) t.overrides = {"zero_optimization.param_persistence_threshold=0"};
    const std::string job = "write-late-" + std::to_string(stage);
    Gpu gpu(t.gpu, job, 0, 1, 0);
    std::string error;
    strata_engine* e = open_rank(t, job, 0, &error);
    ASSERT_EQ(error, "");
    ASSERT_EQ(build_model(e, t.model), "");
    std::vector<float> before(4096), seen(4096), written(4096, 7.0f);
    const strata_tensor read = tensor_of(before, t.model.params[0].shape),
                        see = tensor_of(seen, t.model.params[0].shape),
                        write = tensor_of(written, t.model.params[0].shape);
    EXPECT_EQ(strata_read_param(e, 0, "weight", &read), STRATA_OK) << last();
    gpu.hold_for(std::chrono::milliseconds(100));
    strata_tensor view;
    STRATA_INIT(&view);
    EXPECT_EQ(strata_fetch(e, 0, gpu.stream()), STRATA_OK) << last();
    EXPECT_EQ(strata_param_view(e, 0, &view), STRATA_OK) << last();
    const strata_tensor gradient = gpu.gradient(view, std::vector<float>(4096, 0.0f));  // the weight as it is now
    EXPECT_EQ(strata_release(e, 0, gpu.stream()), STRATA_OK) << last();
    EXPECT_EQ(strata_write_param(e, 0, &write, 0), STRATA_OK) << last();
    EXPECT_EQ(strata_grad(e, 0, &gradient, gpu.stream()), STRATA_OK) << last();
    EXPECT_EQ(strata_end_backward(e), STRATA_OK) << last();
    EXPECT_EQ(strata_read_param(e, 0, "grad", &see), STRATA_OK) << last();
    EXPECT_EQ(seen, before) << "stage " << stage;
    gpu.wait();
    strata_close(e);
  }
}

// Said once, at commit, by one rank; and not where there is something to split.
TEST(SplitUpdate, NothingToSplitIsSaid) {
  for (const auto& [keeps, why] : std::vector<std::pair<std::string, std::string>>{
           {kOffload + "device_state_budget=1000000000",
            "device_state_budget = 1000000000 keeps optimizer state on the device"},
           {"frozen", "no param is trained"},
           {kOffload + "device_state_budget=" + std::to_string(12 * 20480), ""}}) {
    Trial t = offloaded({kOffload + "split_update=true", kOffload + "pin_memory=true"});
    t.world = 2;
    t.stage = 1;
    if (keeps != "frozen") t.overrides.push_back(keeps);
    for (ModelParam& p : t.model.params) p.frozen = keeps == "frozen";
    std::mutex lock;
    std::vector<std::string> warnings;
    t.log = [&](strata_log_level level, const std::string& text) {
      const std::lock_guard guard(lock);
      if (level == STRATA_LOG_WARN) warnings.push_back(text);
    };
    run_body(t, [&](int, strata_engine* e) { EXPECT_EQ(build_model(e, t.model), ""); });
    if (why.empty()) {
      EXPECT_THAT(warnings, testing::IsEmpty());
    } else {
      EXPECT_THAT(warnings, testing::ElementsAre(testing::AllOf(testing::HasSubstr("split_update has nothing to split"),
                                                                testing::HasSubstr(why))));
    }
  }
}

// What a commit says on rank 1 and on rank 0.
std::pair<std::string, std::string> commit_errors(Trial t) {
  std::string errors[2];
  t.world = 2;
  run_body(t, [&](int rank, strata_engine* e) { errors[rank] = build_model(e, t.model); });
  return {errors[1], errors[0]};
}

// Before anything large is allocated, with the numbers, and with the settings that could be lower.
TEST(SplitUpdate, ADeviceThatIsTooSmallIsRefusedByThePlan) {
  for (const auto& [part, key] : std::vector<std::pair<std::string, std::string>>{
           {kOffload + "device_state_budget=1000000000000", "offload_optimizer.device_state_budget (1000000000000)"},
           {kOffload + "ratio=0", "offload_optimizer.ratio (0"},
           {kOffload + "split_update=true", "offload_optimizer.split_update (true)"}}) {
    for (const int stage : {2, 3}) {
      Trial t = offloaded({part});
      t.stage = stage;
      t.gpu = "";  // the harness has none of this size
      t.manifest_extra = "[plugins]\npath = [\"" + std::string(STRATA_TEST_PLUGIN_DIR) +
                         "\"]\ndevice = \"gpu_sim\"\ncollective = \"gpu_sim\"\ndevice_optimizer = \"gpu_sim\"\n"
                         "[plugin.gpu_sim]\nmemory_bytes = 1000000\n";
      const auto [mine, other] = commit_errors(t);
      for (const std::string& error : {mine, other}) {
        EXPECT_THAT(error, testing::AllOf(testing::HasSubstr("free of"), testing::HasSubstr("(1000000 bytes)"),
                                          testing::HasSubstr("the plan needs"), testing::HasSubstr(key),
                                          testing::HasSubstr("reduce_bucket_size (500000000, the default)")));
        EXPECT_EQ(error.find("max_live_parameters") != std::string::npos, stage == 3) << error;
      }
    }
  }
}

// Where the plan fits and the device takes more than it is asked for, the failing allocation says what it was for.
TEST(SplitUpdate, AnAllocationThatFailsNamesTheBudget) {
  Trial t = offloaded({kOffload + "device_state_budget=1000000", "plugins.device=fault"});
  for (const char* n : {"1", "4", "9"}) {
    t.manifest_extra = "[plugin.fault]\nwraps = \"gpu_sim\"\nrules = \"device.alloc:" + std::string(n) +
                       ":fail=RESOURCE_EXHAUSTED\"\n";
    run_body(t, [&](int, strata_engine* e) {
      EXPECT_THAT(build_model(e, t.model),
                  testing::AllOf(testing::HasSubstr("fault:"), testing::HasSubstr("the plan needs"),
                                 testing::HasSubstr("offload_optimizer.device_state_budget (1000000)")));
    });
  }
}

struct Refused {
  std::vector<std::string> overrides;
  std::string says;
};

TEST(SplitUpdate, WhatCannotBeIsRefusedByName) {
  Trial t;
  t.offload_optimizer = "cpu";
  for (const Refused& r :
       std::vector<Refused>{{{kOffload + "split_share=0.5"}, "split_update` is false"},
                            {{kOffload + "split_share=1.5", kOffload + "split_update=true"}, "split_share"},
                            {{kOffload + "ratio=0.5", kOffload + "device_state_budget=1000"}, "give one"},
                            {{kOffload + "device=none", kOffload + "ratio=0.5"}, "all of it is on the device"},
                            {{"plugins.device_optimizer=null"}, "the device has no part in the update"}}) {
    t.overrides = r.overrides;
    EXPECT_THAT(run(t).error, testing::HasSubstr(r.says));
  }
}

// Each key that asks for a device with memory, as it was given, with what it does and which device has none.
TEST(SplitUpdate, ADeviceWithoutMemoryIsNamedWithTheKeysThatWantOne) {
  Trial t;
  t.offload_optimizer = "cpu";
  const std::string none = "` = \"device_host\" (default) has no memory of its own";
  for (const auto& [key, value] : std::vector<std::pair<std::string, std::string>>{
           {"split_update", "true"}, {"device_state_budget", "1000"}, {"ratio", "0.5"}}) {
    const std::string given = kOffload + key + "=" + value;
    t.overrides = {given};
    const std::string error = run(t).error;
    EXPECT_THAT(error, testing::HasSubstr("override " + given + ": `" + kOffload + key + "` = " + value));
    EXPECT_THAT(error,
                testing::AllOf(testing::HasSubstr("`plugins.device" + none), testing::HasSubstr("Remove the key")));
    for (const char* other : {"split_update", "device_state_budget", "ratio"}) {
      EXPECT_EQ(error.find(other) != std::string::npos, key == other) << error;
    }
  }
  t.overrides = {kOffload + "split_update=true", kOffload + "ratio=0.5"};
  EXPECT_THAT(run(t).error,
              testing::AllOf(testing::HasSubstr("split_update` = true"), testing::HasSubstr("ratio` = 0.5")));
}

// What a warning says to have no effect has none: it is not refused later on for what it would have done.
TEST(SplitUpdate, KeysThatAreOnlyWarnedAboutAskNothingOfTheDevice) {
  for (const char* key : {"ratio=0.5", "device_state_budget=1000", "split_update=true"}) {
    Trial t;
    t.overrides = {"no_effect_keys=warn", kOffload + "device=none", kOffload + key};
    EXPECT_EQ(run(t).error, "") << key;
  }
}

// By its own key: one for memory of the host, one that is not there, and one that is no optimizer.
TEST(SplitUpdate, AWrongDeviceOptimizerIsRefusedByItsKey) {
  for (const std::string part : {"split_update=true", "ratio=0"}) {
    for (const auto& [plugin, says] :
         std::vector<std::pair<std::string, std::string>>{{"optim_adamw", "choose a plugin for that device"},
                                                          {"nonexistent", "plugin nonexistent was not found"},
                                                          {"offload_cpu", "strata.optimizer"}}) {
      Trial t = offloaded({kOffload + part, "plugins.device_optimizer=" + plugin});
      std::string error;
      t.body = [&](int, strata_engine* e) { error = build_model(e, t.model); };
      error += run(t).error;
      EXPECT_THAT(error, testing::AllOf(testing::HasSubstr("plugins.device_optimizer"), testing::HasSubstr(says),
                                        testing::Not(testing::HasSubstr("plugins.optimizer "))));
    }
  }
}

}  // namespace
}  // namespace strata::test
