// The step that does not wait (contract 5) and prefetch, proven by gates: the fault plugin holds a call until the test
// lets it go. No clocks decide anything here; deadlines only end a test that hangs.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tests/train/by_hand.h"
#include "tests/train/gates.h"
#include "tests/train/reference.h"

namespace strata::test {
namespace {

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

std::string one_step(strata_engine* e, const Model& m, int step, int rank, Gpu* gpu = nullptr) {
  std::string error = micro_batch(e, m, step, 0, rank, UINT32_MAX, gpu);
  if (error.empty() && strata_step(e, nullptr) != STRATA_OK) error = strata_last_error();
  return error;
}

// Of a trial whose optimizer calls are held at the gate `tag`, from the first of unit 1 on.
void fetch_waits_per_unit(Trial t, const std::string& tag, const char* role) {
  std::atomic<int> before_gate{0}, fetched_late{0};
  t.gpu_body = [&](int rank, strata_engine* e, Gpu* gpu) {
    ASSERT_EQ(build_model(e, t.model), "");
    ASSERT_EQ(one_step(e, t.model, 1, rank, gpu), "");  // returns although an update is held
    const auto* gates = control(e, role);
    ASSERT_NE(gates, nullptr);
    const strata_stream* stream = gpu ? gpu->stream() : nullptr;
    ASSERT_EQ(strata_fetch(e, 0, stream), STRATA_OK) << strata_last_error();  // its own update is done
    if (gpu) gpu->sync();                                                     // and what the stream waits for
    ASSERT_EQ(strata_release(e, 0, stream), STRATA_OK);
    ++before_gate;
    std::thread opener;
    if (rank == 0) {
      opener = std::thread([&] {
        EXPECT_TRUE(eventually(
            [&] { return before_gate == t.world && gates->waiting(tag.c_str()) == static_cast<uint64_t>(t.world); }));
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        EXPECT_EQ(fetched_late, 0) << "a fetch returned while its unit's update was held";
        gates->open_gate(tag.c_str());
      });
    }
    EXPECT_EQ(strata_fetch(e, 1, stream), STRATA_OK) << strata_last_error();
    if (gpu) gpu->sync();
    ++fetched_late;
    EXPECT_EQ(strata_release(e, 1, stream), STRATA_OK);
    if (opener.joinable()) opener.join();
    ASSERT_EQ(strata_wait(e), STRATA_OK) << strata_last_error();
  };
  run(t);
  EXPECT_EQ(fetched_late, t.world);
}

// Forward order of odd_model: embed (unit 0), layer0, layer1, layer2, head (feeds embed). Each unit is one or two
// optimizer calls: units of one trainable segment make one, layer1 and head have bf16 and fp32 (head: fp32 alone).
TEST(Async, FetchWaitsForItsOwnUpdateOnly) {
  for (const auto& [world, stage] : {std::pair{1, 0}, {1, 3}, {2, 1}, {2, 2}, {2, 3}}) {
    const std::string tag = "gate_s" + std::to_string(stage) + "_w" + std::to_string(world);
    fetch_waits_per_unit(held_optimizer(tag, "optimizer.step:2:hold=" + tag, world, stage), tag, "optimizer");
  }
}

// The same beside a device: every unit has one part on each side that updates it.
TEST(Async, FetchWaitsForItsOwnUpdateOnlyBesideADevice) {
  const std::string offload = "zero_optimization.offload_optimizer.", split = offload + "split_update=true";
  struct Case {
    std::vector<std::string> parts;
    const char* role;  // whose call is held
  };
  int serial = 0;
  for (const Case& c : {Case{{}, "optimizer"},
                        {{split, offload + "split_share=0.5"}, "optimizer"},
                        {{split, offload + "split_share=0.5"}, "device_optimizer"},
                        {{split, offload + "split_share=1"}, "device_optimizer"},
                        {{offload + "ratio=0"}, "device_optimizer"}}) {
    for (const auto& [world, stage, params] :
         {std::tuple{1, 0, "none"}, {1, 3, "none"}, {1, 3, "cpu"}, {2, 2, "none"}, {2, 3, "none"}, {2, 3, "cpu"}}) {
      const std::string tag = "device_gate_" + std::to_string(serial++), role = c.role;
      SCOPED_TRACE(testing::PrintToString(c.parts) + ", " + role + " held at stage " + std::to_string(stage) +
                   ", world " + std::to_string(world) + ", params on " + params);
      Trial t = held_optimizer(tag, "optimizer.step:2:hold=" + tag, world, stage);
      t.gpu = "gpu_sim";
      t.offload_optimizer = "cpu";
      t.offload_param = params;
      t.device_updates = !c.parts.empty();
      t.model = vectors(std::vector<int64_t>(4, 4096 * world), STRATA_BF16);
      t.overrides.insert(t.overrides.end(), c.parts.begin(), c.parts.end());
      if (role == "device_optimizer") {
        t.overrides[0] = "plugins.device_optimizer=fault";
        t.manifest_extra.replace(t.manifest_extra.find("optim_adamw"), 11, "gpu_sim");
      }
      fetch_waits_per_unit(t, tag, c.role);
      if (HasFailure()) return;  // one that hangs takes the whole deadline
    }
  }
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
