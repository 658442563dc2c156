// Tensor and pipeline parallelism beside ZeRO: ranks that hold parts of one model apply one step, with one norm that
// counts every value once, as if the model were whole; and what goes wrong anywhere reaches everyone.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <sstream>

#include "tests/train/by_hand.h"
#include "tests/train/split_model.h"

namespace strata::test {
namespace {

const std::vector<Cut> kCuts = {{2, 1, 2}, {1, 2, 2}, {2, 2, 2}, {2, 2, 1}, {4, 1, 1}};

std::string name_of(const Cut& c) {
  return "tp" + std::to_string(c.tensor) + "pp" + std::to_string(c.pipeline) + "dp" + std::to_string(c.data);
}

std::string result_of(strata_status status) { return status == STRATA_OK ? "" : last(); }

strata_step_info info_of(strata_engine* e) {
  strata_step_info info;
  STRATA_INIT(&info);
  EXPECT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
  return info;
}

// ---- places ------------------------------------------------------------------------------------------------------

TEST(Parallel, RanksLieInMegatronsOrder) {
  run_body(split_trial({2, 2, 2}, 0, 1), [](int rank, strata_engine* e) {
    const strata_ranks r = ranks_of(e);
    EXPECT_EQ(r.rank, rank);
    EXPECT_EQ(r.world, 8);
    EXPECT_EQ(r.tensor_model_parallel_rank, rank % 2);
    EXPECT_EQ(r.data_parallel_rank, rank / 2 % 2);
    EXPECT_EQ(r.pipeline_model_parallel_rank, rank / 4);
    EXPECT_EQ(r.tensor_model_parallel_size * 100 + r.data_parallel_size * 10 + r.pipeline_model_parallel_size, 222);
    EXPECT_EQ(strata_rank(e), rank);
    EXPECT_EQ(strata_world(e), 8);
  });
}

TEST(Parallel, AWorldThatCannotBeCutIsRefusedWithAllNumbers) {
  Trial t = split_trial({2, 2, 1}, 0, 1);
  t.world = 6;
  const Result r = run(t);
  for (const char* part : {"6 ranks", "tensor_model_parallel_size = 2", "pipeline_model_parallel_size = 2"}) {
    EXPECT_NE(r.error.find(part), std::string::npos) << r.error;
  }
}

TEST(Parallel, TheBatchIsThatOfTheDataParallelRanks) {
  Trial t = split_trial({2, 2, 2}, 0, 3);
  t.overrides.push_back("train_batch_size=6");  // 1 x 3 x 2
  run_body(t, [](int, strata_engine* e) {
    const char* text = nullptr;
    ASSERT_EQ(strata_get_setting(e, "train_batch_size", &text), STRATA_OK) << last();
    EXPECT_STREQ(text, "6");
  });
  t.overrides.back() = "train_batch_size=24";
  EXPECT_NE(run(t).error.find("world is the data-parallel size"), std::string::npos) << run(t).error;
}

TEST(Parallel, ACollectiveThatCannotBeSplitIsNamed) {
  Trial t = split_trial({2, 1, 2}, 0, 1);
  t.gpu = "gpu_sim";
  const Result r = run(t);
  for (const char* part : {"gpu_sim", "plugins.collective", "tensor_model_parallel_size", "split"}) {
    EXPECT_NE(r.error.find(part), std::string::npos) << r.error;
  }
}

// ---- training ----------------------------------------------------------------------------------------------------

struct Run {
  Cut cut;
  int stage, micro_batches;
};

std::ostream& operator<<(std::ostream& out, const Run& r) {
  return out << name_of(r.cut) << "_stage" << r.stage << "_micro" << r.micro_batches;
}

class SplitModel : public testing::TestWithParam<Run> {};

std::vector<Run> all_runs() {
  std::vector<Run> runs;
  for (const Cut& cut : kCuts) {
    for (int stage = 0; stage < 4; ++stage) {
      for (int micro_batches : {1, 3}) runs.push_back({cut, stage, micro_batches});
    }
  }
  return runs;
}

INSTANTIATE_TEST_SUITE_P(All, SplitModel, testing::ValuesIn(all_runs()), [](const auto& p) {
  std::ostringstream name;
  name << p.param;
  return name.str();
});

TEST_P(SplitModel, TrainsLikeTheWholeOne) {
  const auto [cut, stage, micro_batches] = GetParam();
  const std::vector<WholeParam> whole = whole_model(cut.pipeline);
  constexpr int kSteps = 4;
  const double max_norm = 0.3;
  const WholeResult expected = train_whole(whole, cut.data, micro_batches, kSteps, max_norm);
  ASSERT_LT(expected.clips[0], 1.0);

  std::mutex mutex;
  std::map<std::string, std::vector<float>> all;
  std::vector<std::map<std::string, std::vector<float>>> mine(static_cast<size_t>(cut.world()));
  std::vector<std::vector<double>> norms(mine.size());
  Trial t = split_trial(cut, stage, micro_batches);
  t.clip = max_norm;
  run_body(t, [&](int rank, strata_engine* e) {
    const auto r = static_cast<size_t>(rank);
    ASSERT_EQ(build_split_model(e, whole), "");
    for (int step = 1; step <= kSteps; ++step) {
      ASSERT_EQ(split_backward(e, whole, step, micro_batches), "");
      ASSERT_EQ(split_step(e, 0.01 / step), "");
      const strata_step_info info = info_of(e);
      norms[r].push_back(info.grad_norm);
      EXPECT_EQ(info.was_applied, 1u);
      EXPECT_NEAR(info.clip_factor, expected.clips[static_cast<size_t>(step - 1)], 1e-5);
    }
    ASSERT_EQ(collect_split(e, whole, "weight", &mine[r]), "");
    std::lock_guard lock(mutex);
    merge(mine[r], &all);
  });
  for (size_t r = 0; r < mine.size(); ++r) {
    EXPECT_EQ(norms[r], norms[0]) << "rank " << r;  // the same bits
    for (const auto& [name, values] : mine[r]) {
      for (size_t i = 0; i < values.size(); ++i) {
        if (!std::isnan(values[i])) {
          ASSERT_EQ(values[i], all[name][i]) << name << " of rank " << r;  // copies too
        }
      }
    }
  }
  for (size_t s = 0; s < kSteps; ++s) EXPECT_NEAR(norms[0][s], expected.norms[s], 1e-6 * expected.norms[s]);
  ASSERT_EQ(all.size(), expected.weights.size());
  for (const auto& [name, values] : expected.weights) {
    for (size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(all[name][i], values[i], 2e-5) << name << " " << i;
  }
}

TEST(Parallel, FlagsOfASplitModelChangeNothingWithoutParallelism) {
  Result results[2];
  for (uint32_t flags : {0u, static_cast<uint32_t>(STRATA_PARAM_TENSOR_MODEL_PARALLEL)}) {
    Trial t;
    t.world = 2;
    t.stage = 3;
    t.clip = 0.1;
    run_body(t, [&](int rank, strata_engine* e) {
      strata_unit unit;
      ASSERT_EQ(strata_add_unit(e, "u", &unit), STRATA_OK);
      const std::vector<int64_t> shape = {5000};
      for (const char* name : {"a", "b"}) {
        strata_param_args args;
        STRATA_INIT(&args);
        args.name = name;
        args.shape = shape.data();
        args.ndim = 1;
        args.dtype = STRATA_F32;
        args.flags = *name == 'b' ? flags : 0;
        strata_param id;
        ASSERT_EQ(strata_add_param(e, unit, &args, &id), STRATA_OK) << last();
      }
      ASSERT_EQ(strata_commit(e), STRATA_OK) << last();
      std::vector<float> g(5000, 0.25f);
      const strata_tensor gradient = tensor_of(g, shape);
      for (strata_param p : {0u, 1u}) ASSERT_EQ(strata_grad(e, p, &gradient, nullptr), STRATA_OK) << last();
      ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      Result& result = results[flags ? 1 : 0];
      const double norm = info_of(e).grad_norm;
      strata_counters counters;
      STRATA_INIT(&counters);
      ASSERT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &counters), STRATA_OK);
      if (rank == 0)
        result.norms = {norm, static_cast<double>(counters.agree_bytes), static_cast<double>(counters.gather_bytes)};
    });
  }
  EXPECT_EQ(results[0].norms, results[1].norms);
}

TEST(Parallel, ASharedParamNeedsSomebodyWhoCountsIt) {
  run_body(Trial{}, [](int, strata_engine* e) {
    strata_unit unit;
    ASSERT_EQ(strata_add_unit(e, "u", &unit), STRATA_OK);
    const int64_t shape[] = {4};
    strata_param_args args;
    STRATA_INIT(&args);
    args.name = "head";
    args.shape = shape;
    args.ndim = 1;
    args.dtype = STRATA_F32;
    args.flags = STRATA_PARAM_SHARED;
    strata_param id;
    EXPECT_EQ(strata_add_param(e, unit, &args, &id), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("\"head\"") && says("STRATA_PARAM_SHARED") && says("pipeline_model_parallel_size")) << last();
  });
}

// A second step is as good as ever: the skip was everybody's.
void expect_skip(const Cut& cut, int stage, const std::function<bool(const strata_ranks&, const LocalParam&)>& here) {
  const std::vector<WholeParam> whole = whole_model(cut.pipeline);
  const WholeResult expected = train_whole(whole, cut.data, 1, 3, 0.3, {2});
  Trial t = split_trial(cut, stage, 1);
  t.clip = 0.3;
  std::atomic<int> poisoned{0};
  run_body(t, [&](int rank, strata_engine* e) {
    const strata_ranks ranks = ranks_of(e);
    ASSERT_EQ(build_split_model(e, whole), "");
    for (int step = 1; step <= 3; ++step) {
      const Poison poison = [&](const LocalParam& p, int, std::vector<float>* g) {
        if (step != 2 || !here(ranks, p)) return;
        g->back() = std::numeric_limits<float>::quiet_NaN();
        ++poisoned;
      };
      ASSERT_EQ(split_backward(e, whole, step, 1, poison), "");
      ASSERT_EQ(split_step(e, 0.01 / step), "");
      const strata_step_info info = info_of(e);
      EXPECT_EQ(info.was_applied, step == 2 ? 0u : 1u) << "rank " << rank;
      EXPECT_EQ(std::isfinite(info.grad_norm), step != 2) << "rank " << rank;
    }
    std::map<std::string, std::vector<float>> mine;
    ASSERT_EQ(collect_split(e, whole, "weight", &mine), "");
    for (const auto& [name, values] : mine) {
      for (size_t i = 0; i < values.size(); ++i) {
        if (!std::isnan(values[i])) {
          ASSERT_NEAR(values[i], expected.weights.at(name)[i], 2e-5) << name;
        }
      }
    }
  });
  EXPECT_EQ(poisoned.load(), 1);
}

TEST(Parallel, ANanOfOneTensorRankSkipsTheStepEverywhere) {
  for (int stage : {0, 2, 3}) {
    expect_skip({2, 2, 2}, stage, [](const strata_ranks& r, const LocalParam& p) {
      return r.rank == 3 && p.shape[0] == 64 && p.shape[1] == 48 && !p.shared;  // fc1.weight, split
    });
  }
}

TEST(Parallel, ANanInACopySkipsTheStepToo) {
  expect_skip({2, 1, 2}, 1, [](const strata_ranks& r, const LocalParam& p) {
    return r.rank == 1 && p.whole == 5;  // the norm, which tensor rank 0 counts
  });
  expect_skip({1, 2, 2}, 3, [](const strata_ranks& r, const LocalParam& p) { return r.rank == 2 && p.shared; });
}

// Stage 1 has no gradient at all in one step: it keeps its weights, the others go on.
TEST(Parallel, APartWithoutGradientsTakesPartInTheStep) {
  const Cut cut = {1, 2, 2};
  const std::vector<WholeParam> whole = whole_model(cut.pipeline);
  run_body(split_trial(cut, 2, 1), [&](int, strata_engine* e) {
    ASSERT_EQ(build_split_model(e, whole), "");
    std::map<std::string, std::vector<float>> before, after;
    ASSERT_EQ(collect_split(e, whole, "weight", &before), "");
    const bool idle = ranks_of(e).pipeline_model_parallel_rank == 1;
    if (idle) {
      ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
    } else {
      ASSERT_EQ(split_backward(e, whole, 1, 1), "");
    }
    ASSERT_EQ(split_step(e, 0.01), "");
    EXPECT_EQ(info_of(e).was_applied, 1u);
    EXPECT_GT(info_of(e).grad_norm, 0.0);
    ASSERT_EQ(collect_split(e, whole, "weight", &after), "");
    const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
    };
    for (const auto& [name, values] : before) EXPECT_EQ(same(values, after[name]), idle) << name;
  });
}

// ---- what differs, and who goes ----------------------------------------------------------------------------------

TEST(Parallel, SettingsMustAgreeOverAllParts) {
  const Trial t = split_trial({2, 2, 1}, 1, 1);
  const auto trial_of = [&](int rank) {
    Trial mine = t;
    if (rank == 3) mine.clip = 0.5;
    return mine;
  };
  each_rank(t.world, trial_of, [](int rank, strata_engine* e, const std::string& error) {
    ASSERT_TRUE(e) << error;
    const std::string built = build_split_model(e, whole_model(2));
    EXPECT_NE(built.find("gradient_clipping: rank 3 differs from rank 0"), std::string::npos) << rank << built;
  });
}

TEST(Parallel, ParallelSizesThatDifferAreNamedAtOpen) {
  struct {
    Cut all, rank2;
    const char* error;
  } const cases[] = {
      {{2, 1, 2}, {1, 2, 2}, "tensor_model_parallel_size is 1 on rank 2 and 2 on rank 0; 1 of 4 ranks"},
      {{1, 2, 2}, {1, 4, 1}, "pipeline_model_parallel_size is 4 on rank 2 and 2 on rank 0; 1 of 4 ranks"},
      {{1, 4, 1}, {3, 4, 1}, "tensor_model_parallel_size is 3 on rank 2 and 1 on rank 0"},  // 4 is no 3 times anything
  };
  for (const auto& c : cases) {
    const Trial t = split_trial(c.all, 1, 1);
    const auto trial_of = [&](int rank) {
      Trial mine = split_trial(rank == 2 ? c.rank2 : c.all, 1, 1);
      mine.world = t.world;
      return mine;
    };
    each_rank(t.world, trial_of, [&](int rank, strata_engine* e, const std::string& error) {
      EXPECT_FALSE(e) << rank;
      EXPECT_NE(error.find(c.error), std::string::npos) << rank << ": " << error;
    });
  }
}

TEST(Parallel, RegistrationMustAgreeInTheDataParallelGroupOnly) {
  run_body(split_trial({2, 1, 2}, 1, 1), [](int rank, strata_engine* e) {
    Model m = vectors({100, rank % 2 == 0 ? 200 : 300});  // tensor ranks may differ
    if (rank == 3) m.params[1].shape = {301};             // within a group they may not
    const std::string built = build_model(e, m);
    for (const char* part :
         {"registration: it failed on rank 1, 3: ", "params and groups: rank 3 differs from rank 1"}) {
      EXPECT_NE(built.find(part), std::string::npos) << rank << built;
    }
  });
}

TEST(Parallel, ALearningRateThatDiffersBetweenPartsStopsAll) {
  run_body(split_trial({2, 1, 2}, 1, 1), [](int rank, strata_engine* e) {
    const std::vector<WholeParam> whole = whole_model(1);
    ASSERT_EQ(build_split_model(e, whole), "");
    ASSERT_EQ(split_backward(e, whole, 1, 1), "");
    (void)split_step(e, rank % 2 ? 0.02 : 0.01);  // the same within each data-parallel group
    EXPECT_NE(strata_wait(e), STRATA_OK) << rank;
    EXPECT_TRUE(says("another learning rate, other settings of group 0 or another max_norm")) << rank << last();
  });
}

// Rank 0 leaves; the others are in a collective of another data-parallel group, or of another part.
TEST(Parallel, ARankThatLeavesEndsAllGroups) {
  const std::vector<WholeParam> whole = whole_model(2);
  const Trial t = split_trial({2, 2, 2}, 3, 1);
  each_rank(
      t.world, [&](int) { return t; },
      [&](int rank, strata_engine* e, const std::string& error) {
        ASSERT_TRUE(e) << error;
        ASSERT_EQ(build_split_model(e, whole), "");
        ASSERT_EQ(split_backward(e, whole, 1, 1), "");
        ASSERT_EQ(split_step(e, 0.01), "");
        ASSERT_EQ(result_of(strata_wait(e)), "");
        if (rank == 0) return;
        std::string failed;
        for (int step = 2; failed.empty() && step < 50; ++step) {
          failed = split_backward(e, whole, step, 1);
          if (failed.empty()) failed = split_step(e, 0.01);
          if (failed.empty()) failed = result_of(strata_wait(e));
        }
        EXPECT_NE(failed.find("rank 0 closed"), std::string::npos) << "rank " << rank << ": " << failed;
      });
}

// A failure of one rank's collective, by the fault plugin: of the group's, and of the world's.
TEST(Parallel, AFailureInOneGroupReachesAll) {
  for (const char* rule : {"reduce_scatter:2:fail=DATA_LOSS", "exchange:40+:fail=DATA_LOSS"}) {
    const std::vector<WholeParam> whole = whole_model(2);
    const Trial t = split_trial({2, 2, 2}, 2, 1);
    const auto trial_of = [&](int rank) {
      Trial mine = t;
      mine.manifest_extra = std::string("[plugins]\ncollective = \"fault\"\n[plugin.fault]\nwraps = \"comm_local\"\n") +
                            "rules = \"" + (rank == 6 ? rule : "") + "\"\n";
      return mine;
    };
    each_rank(t.world, trial_of, [&](int rank, strata_engine* e, const std::string& error) {
      ASSERT_TRUE(e) << error;
      std::string failed = build_split_model(e, whole);
      for (int step = 1; failed.empty() && step < 50; ++step) {
        failed = split_backward(e, whole, step, 1);
        if (failed.empty()) failed = split_step(e, 0.01);
        if (failed.empty()) failed = result_of(strata_wait(e));
      }
      EXPECT_NE(failed.find("fault:"), std::string::npos) << rule << ", rank " << rank << ": " << failed;
      if (rank != 6) {
        EXPECT_NE(failed.find("rank 6"), std::string::npos) << rule << ", rank " << rank << ": " << failed;
      }
    });
  }
}

}  // namespace
}  // namespace strata::test
