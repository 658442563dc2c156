// The step that does not wait (contract 5) and prefetch, proven by gates: the fault plugin holds a call until the test
// lets it go. No clocks decide anything here; deadlines only end a test that hangs.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "strata/draft/fault_control.h"
#include "tests/train/reference.h"

namespace strata::test {
namespace {

const strata_fault_control_api* control(strata_engine* e, const char* role) {
  const void* table = nullptr;
  EXPECT_EQ(strata_get_plugin_interface(e, role, STRATA_FAULT_CONTROL, &table), STRATA_OK) << strata_last_error();
  return static_cast<const strata_fault_control_api*>(table);
}

template <class Condition>
bool eventually(Condition condition) {
  for (int i = 0; i < 5000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return false;
}

Trial held_optimizer(const std::string& tag, const std::string& rules, int world, int stage) {
  Trial t;
  t.name = tag;
  t.world = world;
  t.stage = stage;
  t.overrides = {"plugins.optimizer=fault"};
  if (stage == 3) t.overrides.push_back("zero_optimization.param_persistence_threshold=0");
  t.manifest_extra = "[plugin.fault]\nwraps = \"optim_adamw\"\nrules = \"" + rules + "\"\ntag = \"" + tag + "\"\n";
  return t;
}

std::string one_step(strata_engine* e, const Model& m, int step, int rank) {
  std::string error = micro_batch(e, m, step, 0, rank, UINT32_MAX);
  if (error.empty() && strata_step(e, nullptr) != STRATA_OK) error = strata_last_error();
  return error;
}

// Forward order of odd_model: embed (unit 0), layer0, layer1, layer2, head (feeds embed). Each unit is one or two
// optimizer calls: units of one trainable segment make one, layer1 and head have bf16 and fp32 (head: fp32 alone).
void fetch_waits_per_unit(int world, int stage) {
  const std::string tag = "gate_s" + std::to_string(stage) + "_w" + std::to_string(world);
  Trial t = held_optimizer(tag, "optimizer.step:2:hold=" + tag, world, stage);
  std::atomic<int> before_gate{0}, fetched_late{0};
  t.body = [&](int rank, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(one_step(e, m, 1, rank), "");  // returns although the second update is held
    const auto* gates = control(e, "optimizer");
    ASSERT_NE(gates, nullptr);
    ASSERT_EQ(strata_fetch(e, 0, nullptr), STRATA_OK) << strata_last_error();  // its own update is done
    ASSERT_EQ(strata_release(e, 0, nullptr), STRATA_OK);
    ++before_gate;
    std::thread opener;
    if (rank == 0) {
      opener = std::thread([&] {
        ASSERT_TRUE(eventually(
            [&] { return before_gate == world && gates->waiting(tag.c_str()) == static_cast<uint64_t>(world); }));
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        EXPECT_EQ(fetched_late, 0) << "a fetch returned while its unit's update was held";
        gates->open_gate(tag.c_str());
      });
    }
    ASSERT_EQ(strata_fetch(e, 1, nullptr), STRATA_OK) << strata_last_error();
    ++fetched_late;
    ASSERT_EQ(strata_release(e, 1, nullptr), STRATA_OK);
    if (opener.joinable()) opener.join();
    ASSERT_EQ(strata_wait(e), STRATA_OK) << strata_last_error();
  };
  run(t);
  EXPECT_EQ(fetched_late, world);
}

TEST(Async, FetchWaitsForItsOwnUpdateOnly) {
  fetch_waits_per_unit(1, 0);
  fetch_waits_per_unit(1, 3);
  fetch_waits_per_unit(2, 1);
  fetch_waits_per_unit(2, 2);
  fetch_waits_per_unit(2, 3);
}

TEST(Async, EveryUpdateFinishesWithoutAnyFetch) {
  Trial t = held_optimizer("no_fetch", "optimizer.step:1:hold=no_fetch", 2, 3);
  t.body = [&](int rank, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(one_step(e, m, 1, rank), "");
    const auto* gates = control(e, "optimizer");
    gates->open_gate("no_fetch");
    EXPECT_TRUE(eventually([&] { return gates->count("no_fetch", rank, "optimizer.step") >= 6; }))
        << gates->count("no_fetch", rank, "optimizer.step");
    EXPECT_EQ(strata_wait(e), STRATA_OK) << strata_last_error();
  };
  EXPECT_EQ(run(t).error, "");
}

TEST(Async, NormIsKnownWhileTheUpdateIsHeld) {
  Trial t = held_optimizer("norm_gate", "optimizer.step:1:hold=norm_gate", 2, 3);
  t.body = [&](int rank, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(one_step(e, m, 1, rank), "");
    strata_step_info info;
    STRATA_INIT(&info);
    ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
    EXPECT_GT(info.grad_norm, 0);
    EXPECT_EQ(info.was_applied, 1u);
    EXPECT_EQ(control(e, "optimizer")->waiting("norm_gate") <= 2, true);
    control(e, "optimizer")->open_gate("norm_gate");
    EXPECT_EQ(strata_wait(e), STRATA_OK);
  };
  EXPECT_EQ(run(t).error, "");
}

TEST(Async, GatherOfTheNextUnitIsSubmittedBeforeThisOneIsReleased) {
  Trial t;
  t.name = "prefetch";
  t.world = 2;
  t.stage = 3;
  t.overrides = {"plugins.collective=fault", "zero_optimization.param_persistence_threshold=0",
                 "zero_optimization.max_reuse_distance=0", "zero_optimization.prefetch_bucket_size=20000"};
  t.manifest_extra = "[plugin.fault]\nwraps = \"comm_local\"\ntag = \"prefetch\"\n";
  t.body = [&](int rank, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(one_step(e, m, 1, rank), "");
    ASSERT_EQ(strata_wait(e), STRATA_OK);
    const auto* seen = control(e, "collective");
    ASSERT_EQ(strata_fetch(e, 0, nullptr), STRATA_OK) << strata_last_error();
    const uint64_t gathers = seen->count("prefetch", rank, "all_gather");
    // Unit 0 is still held: nothing the host does from here on starts the next gather, and yet it comes.
    strata_counters c{};
    c.struct_size = sizeof(c);
    EXPECT_TRUE(eventually([&] {
      return strata_get_counters(e, STRATA_COUNT_TOTAL, &c) == STRATA_OK &&
             seen->count("prefetch", rank, "all_gather") > 0 &&
             c.gather_calls >= 10 + 2;  // 5 forward, 5 backward in step 1, then unit 0 and the one ahead of it
    })) << c.gather_calls
        << " " << gathers;
    ASSERT_EQ(strata_release(e, 0, nullptr), STRATA_OK);
    ASSERT_EQ(strata_fetch(e, 1, nullptr), STRATA_OK);
    ASSERT_EQ(strata_release(e, 1, nullptr), STRATA_OK);
    STRATA_INIT(&c);
    ASSERT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &c), STRATA_OK);
    EXPECT_GE(c.prefetch_hits, 1u);
  };
  EXPECT_EQ(run(t).error, "");
}

TEST(Async, FailedUpdateMakesTheEngineFailedOnEveryRank) {
  Trial t = held_optimizer("fail_update", "optimizer.step:3:fail=DATA_LOSS", 2, 3);
  t.body = [&](int rank, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(one_step(e, m, 1, rank), "");
    EXPECT_NE(strata_wait(e), STRATA_OK);
    EXPECT_NE(strata_fetch(e, 0, nullptr), STRATA_OK);
    EXPECT_NE(std::string(strata_last_error()).find("FAILED"), std::string::npos) << strata_last_error();
    EXPECT_NE(strata_save(e, "/nonexistent", "x"), STRATA_OK);
    strata_counters c;
    STRATA_INIT(&c);
    EXPECT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &c), STRATA_OK);  // questions are still answered
  };
  run(t);
}

TEST(Async, StateInATierThatIsNotAddressableGivesTheSameBits) {
  for (int world : {1, 2}) {
    Trial plain;
    plain.world = world;
    plain.stage = 3;
    plain.micro_batches = 2;
    plain.clip = 0.05;
    plain.overrides = {"zero_optimization.param_persistence_threshold=50"};
    const Result want = run(plain);
    ASSERT_EQ(want.error, "");
    for (const char* layout : {"whole", "split"}) {
      Trial t = plain;
      t.offload_optimizer = t.offload_param = "cpu";
      t.overrides.insert(t.overrides.end(), {"plugins.offload_cpu=fault", "zero_optimization.sub_group_size=2048",
                                             std::string("optimizer.params.state_layout=") + layout});
      t.manifest_extra = "[plugin.fault]\nwraps = \"offload_cpu\"\nhide_map = true\nrules = \"read:5+:late=1\"\n";
      const Result got = run(t);
      EXPECT_EQ(got.error, "");
      EXPECT_TRUE(got == want) << layout << " at world " << world;
    }
  }
}

}  // namespace
}  // namespace strata::test
