// Opening, planning and closing: budgets hold before anything is allocated, half-built engines leave nothing behind.
#include <dirent.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>
#include <map>

#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

uint64_t open_files() {
  uint64_t n = 0;
  DIR* dir = opendir("/proc/self/fd");
  while (readdir(dir)) ++n;
  closedir(dir);
  return n;
}

uint64_t threads() {
  std::ifstream in("/proc/self/status");
  std::string word;
  while (in >> word) {
    if (word == "Threads:") {
      uint64_t n = 0;
      in >> n;
      return n;
    }
  }
  return 0;
}

std::map<std::string, uint64_t> plan_of(strata_engine* e) {
  std::vector<strata_plan_item> items(32);
  uint64_t count = 0;
  EXPECT_EQ(strata_get_plan(e, items.data(), items.size(), &count), STRATA_OK) << last();
  std::map<std::string, uint64_t> plan;
  for (uint64_t i = 0; i < count; ++i) plan[items[i].what] = items[i].bytes;
  return plan;
}

// Two units of one matrix each whose size divides by every world used here, so that nothing is padded.
Model even_model() {
  Model m;
  m.units = {"a", "b"};
  m.params = {{"a.w", {1024, 120}, STRATA_BF16, 0, 0, false, -1}, {"b.w", {1024, 120}, STRATA_BF16, 1, 0, false, -1}};
  return m;
}

// A host's own error, in the middle of a step, before commit, of a rank alone.
TEST(Fail, IsHeardByAllRanks) {
  for (const bool committed : {true, false}) {
    Trial t;
    t.world = 3;
    t.stage = 3;
    t.overrides = {"zero_optimization.param_persistence_threshold=0"};
    const Model m = vectors({300, 5000});
    run_body(t, [&](int rank, strata_engine* e) {
      if (committed) {
        ASSERT_EQ(build_model(e, m), "");
      }
      if (rank == 1) {
        EXPECT_EQ(strata_fail(e, nullptr), STRATA_INVALID_ARGUMENT);
        EXPECT_EQ(strata_fail(e, "the loss is nan"), STRATA_OK);
        EXPECT_EQ(strata_fail(e, "another"), STRATA_OK) << "the first stays";
        EXPECT_EQ(strata_commit(e), STRATA_ABORTED);
        EXPECT_TRUE(says("the engine has FAILED: the loss is nan")) << last();
        return;
      }
      const std::string error = committed ? micro_batch(e, m, 1, 0, rank, UINT32_MAX) : build_model(e, m);
      EXPECT_THAT(error, testing::HasSubstr("rank 1: the loss is nan"));
      EXPECT_EQ(strata_fail(e, "another"), STRATA_OK);
      EXPECT_EQ(strata_wait(e), STRATA_CANCELLED);
      EXPECT_TRUE(says("rank 1: the loss is nan")) << last();
    });
  }
}

TEST(Fail, IsTheEndOfARankAlone) {
  Trial t;
  t.body = [&](int, strata_engine* e) {
    ASSERT_EQ(build_model(e, vectors({300})), "");
    ASSERT_EQ(strata_fail(e, "no data"), STRATA_OK);
    EXPECT_EQ(strata_step(e, nullptr), STRATA_ABORTED);
    EXPECT_TRUE(says("no data")) << last();
  };
  run(t);
}

TEST(Plan, BytesPerRankFallAsTheFormulasSay) {  // requirement: what each ZeRO stage shards
  const uint64_t elements = 2 * 1024 * 120;
  for (uint64_t world : {1, 2, 4}) {
    for (int stage : {0, 1, 2, 3}) {
      Trial t;
      t.world = static_cast<int>(world);
      t.stage = stage;
      if (stage == 3) t.overrides = {"zero_optimization.param_persistence_threshold=0"};
      t.body = [&](int, strata_engine* e) {
        ASSERT_EQ(build_model(e, even_model()), "");
        auto plan = plan_of(e);
        const uint64_t shards = stage == 0 ? 1 : world;
        EXPECT_EQ(plan["optimizer state"], 12 * elements / shards);
        EXPECT_EQ(plan["reduced gradients"], 2 * elements / shards);
        EXPECT_EQ(plan["update buffers"], 0u);  // state that is addressed in place needs none
        if (stage == 3 && world > 1) {
          EXPECT_EQ(plan["weight shards"], 2 * elements / world);
          EXPECT_EQ(plan["whole weights"], 0u);
        } else {
          EXPECT_EQ(plan["whole weights"], 2 * elements);
        }
      };
      EXPECT_EQ(run(t).error, "");
    }
  }
}

TEST(Plan, WhatCannotFitIsRefusedOnAllRanksWithTheNumbersAndTheKey) {
  Trial t;
  t.world = 2;
  t.stage = 1;
  t.overrides = {"host_memory_limit=1000000"};
  t.body = [](int, strata_engine* e) {
    EXPECT_NE(build_model(e, even_model()).find("host_memory_limit"), std::string::npos) << last();
  };
  run(t);
  Trial live;
  live.stage = 3;
  live.world = 2;
  live.overrides = {"zero_optimization.max_live_parameters=1000", "zero_optimization.param_persistence_threshold=0"};
  live.body = [](int, strata_engine* e) {
    EXPECT_NE(build_model(e, even_model()).find("max_live_parameters = 1000:"), std::string::npos) << last();
  };
  run(live);
  live.overrides = {};
  live.body = [](int, strata_engine* e) {  // nobody wrote it
    const std::string error = build_model(e, vectors({1'100'000'000}, STRATA_BF16));
    EXPECT_NE(error.find("max_live_parameters = 1000000000, the default:"), std::string::npos) << error;
  };
  run(live);
  Trial tier;
  tier.offload_optimizer = "cpu";
  tier.manifest_extra = "[plugin.offload_cpu]\nbudget_bytes = 100000\n";
  tier.body = [](int, strata_engine* e) {
    const std::string error = build_model(e, even_model());
    EXPECT_NE(error.find("100000"), std::string::npos) << error;
  };
  run(tier);
}

TEST(Life, OpenTrainCloseManyTimesLeavesNothing) {
  Trial t;
  t.world = 2;
  t.stage = 3;
  t.offload_optimizer = "cpu";
  t.steps = 1;
  EXPECT_EQ(run(t).error, "");  // what a first run loads for good (plugins) is not counted
  const uint64_t files = open_files(), before = threads();
  for (int i = 0; i < 50; ++i) ASSERT_EQ(run(t).error, "");
  EXPECT_EQ(open_files(), files);
  EXPECT_EQ(threads(), before);
}

// Every allocation of an open and commit fails once, in turn: the first error is reported and nothing stays.
void each_allocation_fails(const std::string& role, const std::string& wraps, const std::string& op) {
  for (int n = 1; n <= 20; ++n) {
    Trial t;
    t.name = role;
    t.offload_optimizer = "cpu";
    t.stage = 3;
    t.overrides = {"plugins." + role + "=fault"};
    t.manifest_extra = "[plugin.fault]\nwraps = \"" + wraps + "\"\nrules = \"" + op + ":" + std::to_string(n) +
                       ":fail=RESOURCE_EXHAUSTED\"\n";
    std::atomic<bool> failed{false};
    t.body = [&](int rank, strata_engine* e) {
      std::string error = build_model(e, even_model());
      if (error.empty()) error = micro_batch(e, even_model(), 1, 0, rank, UINT32_MAX);
      if (error.empty() && strata_step(e, nullptr) != STRATA_OK) error = last();
      if (error.empty() && strata_wait(e) != STRATA_OK) error = last();
      failed = !error.empty();
    };
    const Result r = run(t);
    if (!failed && r.error.empty()) return;  // n is past the last call
  }
}

TEST(Life, AnyFailingAllocationIsAnErrorAndNothingElse) {
  EXPECT_EQ(run({}).error, "");  // what a first run brings for good is not counted
  const uint64_t before = threads();
  each_allocation_fails("device", "device_host", "alloc");
  each_allocation_fails("collective", "comm_local", "alloc");
  each_allocation_fails("offload_cpu", "offload_cpu", "alloc");
  for (const char* role : {"device", "collective", "offload_cpu", "optimizer"}) {
    const std::map<std::string, std::string> wraps = {{"device", "device_host"},
                                                      {"collective", "comm_local"},
                                                      {"offload_cpu", "offload_cpu"},
                                                      {"optimizer", "optim_adamw"}};
    each_allocation_fails(role, wraps.at(role), "open");
    each_allocation_fails(role, wraps.at(role), "caps");
  }
  EXPECT_EQ(threads(), before);
}

// Folds that the host's stream has not come to yet use memory of the engine, or of the host.
TEST(Life, ClosingInABackwardWaitsForTheFolds) {
  for (const bool lend : {false, true}) {
    Trial t;
    t.stage = 2;
    t.gpu = "gpu_sim";
    t.gpu_delay_us = 20000;
    t.model = vectors({4096, 4096, 4096, 4096}, STRATA_BF16);
    const std::string job = lend ? "close-lent" : "close-own";
    Gpu gpu(t.gpu, job, 0, 1, t.gpu_delay_us);
    std::string error;
    strata_engine* e = open_rank(t, job, 0, &error, lend ? gpu.lender() : nullptr);
    ASSERT_NE(e, nullptr) << error;
    ASSERT_EQ(build_model(e, t.model), "");
    for (size_t k = 0; k < 4; ++k) give_gradient_on(gpu, e, t.model, k);
    strata_close(e);
    gpu.wait();  // says so when work used memory that was gone
  }
}

TEST(Life, AnEngineThatFailedAloneComesBackByLoading) {
  Trial t;
  t.stage = 3;
  t.overrides = {"plugins.optimizer=fault"};
  t.manifest_extra = "[plugin.fault]\nwraps = \"optim_adamw\"\nrules = \"optimizer.step:3:fail=DATA_LOSS\"\n";
  t.body = [](int rank, strata_engine* e) {
    char root[] = "/tmp/strata-life-XXXXXX";
    ASSERT_NE(mkdtemp(root), nullptr);
    ASSERT_EQ(build_model(e, even_model()), "");
    ASSERT_EQ(strata_save(e, root, "start"), STRATA_OK) << last();
    auto step = [&](int k) {
      std::string error = micro_batch(e, even_model(), k, 0, rank, UINT32_MAX);
      if (error.empty() && strata_step(e, nullptr) != STRATA_OK) error = last();
      if (error.empty() && strata_wait(e) != STRATA_OK) error = last();
      return error;
    };
    EXPECT_EQ(step(1), "");
    EXPECT_NE(step(2), "");
    EXPECT_NE(strata_fetch(e, 0, nullptr), STRATA_OK);
    EXPECT_EQ(strata_load(e, root, "start"), STRATA_OK) << last();
    EXPECT_EQ(step(1), "");
    Result after;
    EXPECT_EQ(collect(e, even_model(), &after), "");
    EXPECT_EQ(system((std::string("rm -rf ") + root).c_str()), 0);
  };
  EXPECT_EQ(run(t).error, "");
}

}  // namespace
}  // namespace strata::test
