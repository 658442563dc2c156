// Wrong numbers, ranks that differ, dead ranks: a clear error in bounded time, and nothing lost. Also the cases of
// public trouble that are about numbers and ranks (numbers in brackets: cases of the project's list).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <thread>

#include "strata/draft/fault_control.h"
#include "tests/train/by_hand.h"
#include "tests/train/reference.h"

namespace strata::test {
namespace {

// ---- numbers -------------------------------------------------------------------------------------------------------

// In one element of one rank's gradient, or in so many that each rank's part of the sum has some.
class NotFinite : public testing::TestWithParam<std::tuple<int, std::string, float, strata_dtype, bool>> {};

TEST_P(NotFinite, IsOneSkipOnAllRanksAndOneLine) {  // [31] [32]
  const auto& [stage, offload, poison, dtype, everywhere] = GetParam();
  Trial t;
  t.world = 2;
  t.stage = stage;
  t.clip = 1.0;
  t.offload_optimizer = offload;
  std::mutex lock;
  std::vector<std::string> said;
  t.log = [&](strata_log_level, const std::string& text) {
    const std::lock_guard guard(lock);
    said.push_back(text);
  };
  const Model m = vectors({300, 5000}, dtype);
  std::atomic<int> ended = 0;
  run_body(
      t, [&, bad = poison, first = everywhere ? 0 : 4500, end = everywhere ? 5000 : 4501](int rank, strata_engine* e) {
        ASSERT_EQ(build_model(e, m), "");
        Result before, after;
        for (int step = 1; step <= 5; ++step) {
          give_gradient(e, m, 0, 0.5f);
          std::vector<float> g(5000, 0.25f);
          if (step == 3 && rank == 1) std::fill(g.begin() + first, g.begin() + end, bad);
          const strata_tensor tensor = tensor_of(g, m.params[1].shape);
          ASSERT_EQ(strata_grad(e, 1, &tensor, nullptr), STRATA_OK) << last();
          ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
          if (step == 3) {
            ASSERT_EQ(strata_wait(e), STRATA_OK);
          }
          ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
          strata_step_info info;
          STRATA_INIT(&info);
          ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
          EXPECT_EQ(info.was_applied, step == 3 ? 0u : 1u);
          EXPECT_EQ(std::isfinite(info.grad_norm), step != 3);
          if (step == 2) {
            ASSERT_EQ(collect(e, m, &before), "");
          }
          if (step == 3) {
            ASSERT_EQ(collect(e, m, &after), "");
            EXPECT_TRUE(before == after) << "a skipped step changed something";
          }
        }
        strata_step_info info;
        STRATA_INIT(&info);
        ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
        EXPECT_EQ(info.steps, 5u);
        EXPECT_EQ(info.applied_steps, 4u);
        EXPECT_EQ(info.skipped_steps, 1u);
        ++ended;
      });
  EXPECT_EQ(ended, 2);
  ASSERT_EQ(said.size(), 1u);  // of all ranks
  EXPECT_THAT(said[0],
              testing::HasSubstr("step 3 is skipped: the reduced gradient of param \"p1\" is not finite on rank " +
                                 std::string(everywhere ? "0;" : "1;")));
}

INSTANTIATE_TEST_SUITE_P(Numbers, NotFinite,
                         testing::Combine(testing::Values(0, 1, 2, 3), testing::Values("none", "cpu"),
                                          testing::Values(std::numeric_limits<float>::infinity(),
                                                          std::numeric_limits<float>::quiet_NaN()),
                                          testing::Values(STRATA_F32, STRATA_BF16), testing::Bool()));

TEST(Numbers, AStepWithoutAnyGradientIsNotApplied) {
  run_body({.world = 2, .stage = 3}, [](int, strata_engine* e) {
    const Model m = vectors({300});
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(strata_end_backward(e), STRATA_OK);
    ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    strata_step_info info;
    STRATA_INIT(&info);
    ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
    EXPECT_EQ(info.was_applied, 0u);
    EXPECT_EQ(info.skipped_steps, 1u);
  });
}

TEST(Numbers, ALargeFiniteNormIsClippedNormally) {  // [31] 300 elements of 400
  run_body({.clip = 1.0}, [](int, strata_engine* e) {
    const Model m = vectors({300});
    ASSERT_EQ(build_model(e, m), "");
    give_gradient(e, m, 0, 400.0f);
    ASSERT_EQ(strata_end_backward(e), STRATA_OK);
    ASSERT_EQ(strata_step(e, nullptr), STRATA_OK);
    strata_step_info info;
    STRATA_INIT(&info);
    ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
    EXPECT_NEAR(info.grad_norm, 6928.2032302755, 1e-6);
    EXPECT_EQ(info.clip_factor, 1.0 / (info.grad_norm + 1e-6));
  });
}

TEST(Numbers, ManySmallBf16GradientsAddUpInFp32) {  // [35] within one micro-batch, and over micro-batches
  for (int micro : {1, 257}) {
    for (int stage : {0, 3}) {
      Trial t;
      t.stage = stage;
      t.micro_batches = micro;
      run_body(t, [micro](int, strata_engine* e) {
        Model m = vectors({1});
        m.params[0].dtype = STRATA_BF16;
        ASSERT_EQ(build_model(e, m), "");
        for (int i = 0; i < 257; ++i) {
          uint16_t bits = i == 0 ? 0x3f80 : 0x3a83;  // 1.0, then bf16(0.001)
          strata_tensor g;
          STRATA_INIT(&g);
          g.data = &bits;
          g.device_type = STRATA_CPU;
          g.dtype = STRATA_BF16;
          g.ndim = 1;
          g.shape = m.params[0].shape.data();
          ASSERT_EQ(strata_grad(e, 0, &g, nullptr), STRATA_OK) << last();
          if (micro > 1) {
            ASSERT_EQ(strata_end_backward(e), STRATA_OK);
          }
        }
        if (micro == 1) {
          ASSERT_EQ(strata_end_backward(e), STRATA_OK);
        }
        std::vector<float> sum(1);
        const strata_tensor out = tensor_of(sum, m.params[0].shape);
        ASSERT_EQ(strata_read_param(e, 0, "grad", &out), STRATA_OK) << last();
        EXPECT_NEAR(sum[0], 1.255859, micro == 1 ? 0.004 : 1e-5);  // one micro-batch: rounded once to bf16
      });
    }
  }
}

TEST(Numbers, AccumulationIsExactEverywhere) {  // [29] integer gradients: sums are exact
  for (int stage : {0, 1, 2, 3}) {
    for (const char* offload : {"none", "cpu"}) {
      for (int micro : {1, 2, 5}) {
        for (const char* local : {"false", "true"}) {
          if (stage < 2 && std::string(local) == "true") continue;
          Trial t;
          t.world = 2;
          t.stage = stage;
          t.micro_batches = micro;
          t.offload_optimizer = offload;
          if (micro > 1) t.overrides = {std::string("zero_optimization.accumulate_locally=") + local};
          if (micro == 1 && std::string(local) == "true") continue;
          run_body(t, [micro](int rank, strata_engine* e) {
            const Model m = vectors({3000, 17});
            ASSERT_EQ(build_model(e, m), "");
            for (int step = 1; step <= 2; ++step) {
              for (int k = 0; k < micro; ++k) {
                give_gradient(e, m, 0, static_cast<float>(step + k + rank));
                give_gradient(e, m, 1, static_cast<float>(2 * k));
                ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
              }
              std::vector<float> sum(3000);
              const strata_tensor out = tensor_of(sum, m.params[0].shape);
              ASSERT_EQ(strata_read_param(e, 0, "grad", &out), STRATA_OK) << last();
              const float want = static_cast<float>(2 * micro * step + micro * (micro - 1) + micro);
              for (float x : sum) ASSERT_EQ(x, want);
              ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
              strata_step_info info;
              STRATA_INIT(&info);
              ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
              const double other = 2.0 * micro * (micro - 1);
              EXPECT_NEAR(info.grad_norm, std::sqrt(3000.0 * want * want + 17 * other * other) / (2 * micro),
                          1e-9 * want * 60);
            }
          });
        }
      }
    }
  }
}

// ---- ranks that differ or die --------------------------------------------------------------------------------------

TEST(Ranks, DifferentRegistrationIsRefusedOnAll) {
  run_body({.world = 2}, [](int rank, strata_engine* e) {
    strata_unit unit;
    ASSERT_EQ(strata_add_unit(e, rank == 0 ? "a" : "b", &unit), STRATA_OK);
    EXPECT_EQ(strata_commit(e), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("rank 1 differs")) << last();
  });
}

TEST(Ranks, ADifferentSettingIsRefusedOnAllByItsKey) {
  for (const char* key :
       {"gradient_clipping", "zero_optimization.reduce_bucket_size", "zero_optimization.prefetch_bucket_size",
        "zero_optimization.model_persistence_threshold", "zero_optimization.stage", "optimizer.type",
        "optimizer.params.state_layout", "zero_optimization.gather_16bit_weights_on_model_save"}) {
    const std::map<std::string, std::string> words = {{"optimizer.type", "Adam"},
                                                      {"optimizer.params.state_layout", "split"},
                                                      {"zero_optimization.gather_16bit_weights_on_model_save", "true"}};
    Trial ranks[2] = {{.world = 2, .stage = 3}, {.world = 2, .stage = 3}};
    ranks[1].overrides = {std::string(key) + "=" + (words.count(key) ? words.at(key) : "2")};
    std::thread threads[2];
    for (int rank = 0; rank < 2; ++rank) {
      threads[rank] = std::thread([&, rank] {
        std::string error;
        strata_engine* e = open_rank(ranks[rank], "differ-" + std::string(key), rank, &error);
        ASSERT_NE(e, nullptr) << error;
        EXPECT_EQ(strata_commit(e), STRATA_FAILED_PRECONDITION);
        EXPECT_TRUE(says(key) && says("rank 1 differs")) << last();
        strata_close(e);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(Ranks, DifferentUnitsFetchedAreNamedOnAll) {  // [03] not declared as one unit
  Trial t;
  t.world = 2;
  t.stage = 3;
  t.overrides = {"zero_optimization.param_persistence_threshold=0"};
  run_body(t, [](int rank, strata_engine* e) {
    ASSERT_EQ(build_model(e, odd_model()), "");
    EXPECT_NE(strata_fetch(e, rank == 0 ? 1u : 2u, nullptr), STRATA_OK);
    EXPECT_TRUE(says("layer0") && says("layer1")) << last();
  });
}

TEST(Ranks, UnitsDoneInAnotherOrderGiveTheSameBits) {  // ranks agree on the canonical order
  std::mutex mutex;
  std::vector<std::vector<float>> ends;
  for (bool turned : {false, true}) {
    Trial t;
    t.world = 2;
    t.stage = 3;
    t.overrides = {"zero_optimization.reduce_bucket_size=100000", "zero_optimization.param_persistence_threshold=0"};
    run_body(t, [&](int rank, strata_engine* e) {
      const Model m = vectors({5000, 6000, 7000});
      ASSERT_EQ(build_model(e, m), "");
      for (int step = 1; step <= 3; ++step) {
        for (uint32_t k = 0; k < 3; ++k) {
          const uint32_t u = turned && rank == 1 ? 2 - k : k;
          give_gradient(e, m, u, 0.1f * static_cast<float>(u + 1 + static_cast<uint32_t>(rank)));
          ASSERT_EQ(strata_grads_done(e, u), STRATA_OK) << last();
        }
        ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
        ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      }
      Result r;
      ASSERT_EQ(collect(e, m, &r), "");
      std::lock_guard lock(mutex);
      ends.push_back(r.master["p1"]);
    });
  }
  ASSERT_EQ(ends.size(), 4u);
  for (const auto& other : ends) EXPECT_EQ(other, ends[0]);
}

TEST(Ranks, ARankThatLeavesIsNamedAndTheOthersEnd) {
  Trial t;
  t.world = 3;
  t.stage = 3;
  run_body(t, [](int rank, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    if (rank == 2) return;  // closes its engine
    std::string error = micro_batch(e, m, 1, 0, rank, UINT32_MAX);
    if (error.empty() && strata_step(e, nullptr) != STRATA_OK) error = last();
    if (error.empty() && strata_wait(e) != STRATA_OK) error = last();
    EXPECT_NE(error.find("rank 2"), std::string::npos) << error;
  });
}

TEST(Ranks, DifferentLearningRatesAreRefusedOnAll) {
  Trial t;
  t.world = 2;
  run_body(t, [](int rank, strata_engine* e) {
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = 0.1 * (rank + 1);
    expect_step_refused(e, args, "learning");
  });
}

TEST(Ranks, AWrongTensorOnTheRootIsRefusedOnAllAtOnce) {
  Trial t;
  t.world = 2;
  run_body(t, [](int rank, strata_engine* e) {
    const Model m = vectors({300});
    ASSERT_EQ(build_model(e, m), "");
    std::vector<float> data(400, 1.0f);
    const std::vector<int64_t> wrong = {400};
    const strata_tensor bad = tensor_of(data, wrong), good = tensor_of(data, m.params[0].shape);
    EXPECT_NE(strata_write_param(e, 0, rank == 1 ? &bad : nullptr, 1), STRATA_OK);
    EXPECT_TRUE(says(rank == 1 ? "[400]" : "rank 1")) << last();
    EXPECT_EQ(strata_write_param(e, 0, rank == 1 ? &good : nullptr, 1), STRATA_OK) << last();
  });
}

TEST(Ranks, AUnitOfEmptyParamsHoldsNothingUp) {  // [07] its unit is declared done in one step and not in the next
  for (int stage : {0, 1, 2, 3}) {
    for (const char* contiguous : {"true", "false"}) {
      Trial t;
      t.stage = stage;
      t.overrides = {std::string("zero_optimization.contiguous_gradients=") + contiguous};
      run_body(t, [](int, strata_engine* e) {
        const Model m = vectors({200000, 0});
        ASSERT_EQ(build_model(e, m), "");
        for (int step = 1; step <= 3; ++step) {
          std::vector<float> g(200000, static_cast<float>(step));
          const strata_tensor t0 = tensor_of(g, m.params[0].shape);
          ASSERT_EQ(strata_grad(e, 0, &t0, nullptr), STRATA_OK) << last();
          if (step == 1) {
            ASSERT_EQ(strata_grads_done(e, 1), STRATA_OK) << last();
            ASSERT_EQ(strata_grads_done(e, 0), STRATA_OK) << last();
          }
          ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
          ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
          strata_step_info info;
          STRATA_INIT(&info);
          ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
          EXPECT_NEAR(info.grad_norm, step * std::sqrt(200000.0), 1e-6);
        }
      });
    }
  }
}

TEST(Ranks, FetchesInAnyOrderFitWhenAllUnitsFit) {  // crossed fetches do not fragment the slabs
  Trial t;
  t.world = 2;
  t.stage = 3;
  t.overrides = {"zero_optimization.param_persistence_threshold=0"};
  run_body(t, [](int, strata_engine* e) {
    const Model m = vectors({4096, 4096, 8192});
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(strata_fetch(e, 2, nullptr), STRATA_OK) << last();
    ASSERT_EQ(strata_fetch(e, 1, nullptr), STRATA_OK) << last();
    ASSERT_EQ(strata_release(e, 2, nullptr), STRATA_OK) << last();
    ASSERT_EQ(strata_fetch(e, 0, nullptr), STRATA_OK) << last();
    ASSERT_EQ(strata_fetch(e, 2, nullptr), STRATA_OK) << last();
    for (strata_unit u : {0u, 1u, 2u}) ASSERT_EQ(strata_release(e, u, nullptr), STRATA_OK);
  });
}

TEST(Ranks, ExpertsInOneUnitMayBeUsedByAnyRank) {  // [03] declared: absent counts as zero
  run_body({.world = 2, .stage = 3}, [](int rank, strata_engine* e) {
    Model m;
    m.units = {"experts"};
    for (int k = 0; k < 4; ++k) m.params.push_back({"e" + std::to_string(k), {16, 16}, STRATA_F32, 0, 0, false, -1});
    ASSERT_EQ(build_model(e, m), "");
    for (int step = 1; step <= 2; ++step) {
      ASSERT_EQ(strata_fetch(e, 0, nullptr), STRATA_OK) << last();
      ASSERT_EQ(strata_release(e, 0, nullptr), STRATA_OK);
      if (step == 1 || rank == 1) {
        give_gradient(e, m, rank == 0 ? 0 : 2, 1.0f);
        give_gradient(e, m, rank == 0 ? 1 : 3, 2.0f);
      }
      ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
      const float want[] = {step == 1 ? 1.0f : 0.0f, step == 1 ? 2.0f : 0.0f, 1.0f, 2.0f};
      for (size_t k = 0; k < 4; ++k) {
        std::vector<float> sum(256);
        const strata_tensor out = tensor_of(sum, m.params[k].shape);
        ASSERT_EQ(strata_read_param(e, static_cast<strata_param>(k), "grad", &out), STRATA_OK) << last();
        for (float x : sum) ASSERT_EQ(x, want[k]) << k;
      }
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    }
  });
}

TEST(Ranks, ResidentParamsAreGatheredOncePerUpdate) {  // [12] 15 and 16 are kept at threshold 16, 17 is not
  Trial t;
  t.world = 2;
  t.stage = 3;
  t.overrides = {"zero_optimization.param_persistence_threshold=16", "zero_optimization.prefetch_bucket_size=0",
                 "zero_optimization.max_reuse_distance=0"};
  run_body(t, [](int, strata_engine* e) {
    const Model m = vectors({15, 16, 17});
    ASSERT_EQ(build_model(e, m), "");
    const std::vector<std::vector<strata_unit>> orders = {{0, 1, 2, 0, 1}, {2, 1, 0, 1, 0}, {1, 0, 2, 0, 1}};
    for (size_t step = 0; step < orders.size(); ++step) {
      strata_counters before, after;
      STRATA_INIT(&before);
      STRATA_INIT(&after);
      ASSERT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &before), STRATA_OK);
      for (strata_unit u : orders[step]) {
        ASSERT_EQ(strata_fetch(e, u, nullptr), STRATA_OK) << last();
        ASSERT_EQ(strata_release(e, u, nullptr), STRATA_OK);
      }
      ASSERT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &after), STRATA_OK);
      // One gather of unit 2 (17 elements), and after each update one of the resident params, for all their fetches.
      EXPECT_EQ(after.gather_calls - before.gather_calls, step == 0 ? 1u : 2u) << "step " << step;
      for (size_t k = 0; k < 3; ++k) give_gradient(e, m, k, 1.0f);
      ASSERT_EQ(strata_end_backward(e), STRATA_OK);
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    }
  });
}

// Gathers of one fetch of each unit, in order.
std::vector<uint64_t> gathers(strata_engine* e, const Model& m) {
  std::vector<uint64_t> calls;
  for (size_t u = 0; u < m.params.size(); ++u) {
    strata_counters before, after;
    STRATA_INIT(&before);
    STRATA_INIT(&after);
    EXPECT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &before), STRATA_OK);
    EXPECT_EQ(strata_fetch(e, static_cast<strata_unit>(u), nullptr), STRATA_OK) << last();
    EXPECT_EQ(strata_release(e, static_cast<strata_unit>(u), nullptr), STRATA_OK);
    EXPECT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &after), STRATA_OK);
    calls.push_back(after.gather_calls - before.gather_calls);
  }
  return calls;
}

TEST(Ranks, ResidentParamsAreAtMostTheirLimitInAll) {  // [12] in registration order: what does not fit is sharded
  const std::vector<std::pair<std::string, std::vector<uint64_t>>> cases = {
      {"46", {0, 0, 0, 0}}, {"45", {0, 0, 0, 1}}, {"31", {0, 0, 1, 1}}, {"30", {0, 1, 0, 0}},
      {"9", {1, 1, 0, 1}},  {"5", {1, 1, 1, 1}},  {"0", {1, 1, 1, 1}},
  };
  for (const auto& [limit, expected] : cases) {
    Trial t;
    t.world = 2;
    t.stage = 3;
    t.overrides = {"zero_optimization.param_persistence_threshold=16", "zero_optimization.prefetch_bucket_size=0",
                   "zero_optimization.max_reuse_distance=0", "zero_optimization.model_persistence_threshold=" + limit};
    run_body(t, [&expected = expected](int, strata_engine* e) {
      const Model m = vectors({15, 16, 6, 9});
      ASSERT_EQ(build_model(e, m), "");
      EXPECT_EQ(gathers(e, m), expected);
    });
  }
}

TEST(Ranks, AUnitThatOnlySomeStepsUseLeavesNothingBehind) {  // [01] the last one of the order included
  Trial t;
  t.world = 2;
  t.stage = 3;
  t.overrides = {"zero_optimization.param_persistence_threshold=0", "zero_optimization.max_live_parameters=14000000"};
  run_body(t, [](int rank, strata_engine* e) {
    const Model m = vectors({1 << 20, 1 << 20, 1024});
    ASSERT_EQ(build_model(e, m), "");
    const std::vector<std::vector<strata_unit>> steps = {{0, 1, 2}, {0, 1, 2}, {0, 2}, {0, 1, 2},
                                                         {0, 2},    {0, 2},    {0, 1}};
    Result before, after;
    for (size_t step = 0; step < steps.size(); ++step) {
      if (step == 6) {
        ASSERT_EQ(collect(e, m, &before), "");
      }
      for (strata_unit u : steps[step]) {
        ASSERT_EQ(strata_fetch(e, u, nullptr), STRATA_OK) << last();
        ASSERT_EQ(strata_release(e, u, nullptr), STRATA_OK);
        give_gradient(e, m, u, 0.1f * static_cast<float>(rank + 1));
        ASSERT_EQ(strata_grads_done(e, u), STRATA_OK) << last();
      }
      ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    }
    ASSERT_EQ(collect(e, m, &after), "");
    EXPECT_EQ(before.master["p2"], after.master["p2"]);  // skipped by the last step: weights and moments as they were
    EXPECT_EQ(before.exp_avg["p2"], after.exp_avg["p2"]);
    EXPECT_NE(before.master["p1"], after.master["p1"]);
  });
}

// ---- counters ------------------------------------------------------------------------------------------------------

TEST(Counters, EqualTheFormulaAndTheCountingShim) {
  const int world = 2;
  Trial t;
  t.world = world;
  t.stage = 3;
  t.overrides = {"plugins.collective=fault", "zero_optimization.param_persistence_threshold=0",
                 "zero_optimization.max_reuse_distance=0", "zero_optimization.offload_optimizer.device=cpu"};
  t.manifest_extra = "[plugin.fault]\nwraps = \"comm_local\"\ntag = \"counters\"\n";
  run_body(t, [&](int rank, strata_engine* e) {
    Model m = vectors({8192, 4096});
    for (ModelParam& p : m.params) p.dtype = STRATA_BF16;
    ASSERT_EQ(build_model(e, m), "");
    const void* table = nullptr;
    ASSERT_EQ(strata_get_plugin_interface(e, "collective", STRATA_FAULT_CONTROL, &table), STRATA_OK);
    const auto* shim = static_cast<const strata_fault_control_api*>(table);
    const uint64_t reduced_before = shim->bytes_seen("counters", rank, "reduce_scatter");
    for (int step = 1; step <= 3; ++step) {
      ASSERT_EQ(micro_batch(e, m, step, 0, rank, UINT32_MAX), "");
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      ASSERT_EQ(strata_wait(e), STRATA_OK);
    }
    strata_counters c;
    STRATA_INIT(&c);
    ASSERT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &c), STRATA_OK);
    const uint64_t elements = 8192 + 4096;
    // Forward and backward gather every shard once each: 2 bytes, from (world - 1) others, 3 steps. Once the order is
    // known the last unit of the forward, which is the first of the backward, stays: 4096 elements in steps 2 and 3.
    EXPECT_EQ(c.gather_bytes, (3 * 2 * 2 * elements - 2 * 2 * 4096) / world * (world - 1));
    EXPECT_EQ(c.reduce_bytes, 3 * 2 * elements / world * (world - 1));
    EXPECT_EQ(c.grad_bytes, 5 * 4 * elements);             // the harness hands over fp32, with zeros in odd steps
    EXPECT_EQ(c.tier_write[1], 3 * 2 * elements / world);  // gradients to RAM, 2 bytes
    EXPECT_EQ(c.tier_read[1], 3 * 2 * elements / world);   // weights back, 2 bytes
    EXPECT_EQ(c.updated_elements, 3 * elements / world);
    EXPECT_EQ(c.fetches, 3u * 4u);
    // The shim sees the outputs: a reduce-scatter's output is this rank's slice.
    EXPECT_EQ(shim->bytes_seen("counters", rank, "reduce_scatter") - reduced_before, 3 * 2 * elements / world);
    EXPECT_EQ(shim->count("counters", rank, "reduce_scatter"), c.reduce_calls);
  });
}

}  // namespace
}  // namespace strata::test
