// drop_test.cc - strata_drop_gradients: a step after it has the bits of one where the dropped backwards never were.
#include <gtest/gtest.h>

#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

const Model& model() {
  static const Model m = vectors({5000, 77, 3000, 4100, 9}, STRATA_BF16);
  return m;
}

using Order = std::vector<size_t>;
const Order kLastFirst = {4, 3, 2, 1, 0}, kFirstFirst = {0, 1, 2, 3, 4}, kMixed = {2, 0, 4, 1, 3};

// Gradients of the first `count` units of an order, as a backward has them when it has come so far.
void backward(strata_engine* e, size_t count, float value, const Order& order = kLastFirst, Gpu* gpu = nullptr) {
  for (size_t i = 0; i < count; ++i) {
    const size_t k = order[i];
    if (gpu) {
      const ModelParam& p = model().params[k];
      const strata_tensor gradient =
          gpu->tensor(std::vector<float>(p.numel(), value + static_cast<float>(k)), p.shape, gpu->stream());
      ASSERT_EQ(strata_grad(e, static_cast<strata_param>(k), &gradient, gpu->stream()), STRATA_OK) << last();
    } else {
      give_gradient(e, model(), k, value + static_cast<float>(k));
    }
    ASSERT_EQ(strata_grads_done(e, static_cast<strata_unit>(k)), STRATA_OK) << last();
  }
}

// What a rank has given when the backward of another raises: so many whole micro-batches, then so many units.
struct Place {
  int micro_batches;
  size_t units;
};

// `orders`: of the units in each step, from the first again after the last.
Result trained(Trial t, const std::vector<Place>& places, const std::vector<Order>& orders = {kLastFirst}) {
  Result out;
  t.gpu_body = [&](int rank, strata_engine* e, Gpu* gpu) {
    ASSERT_EQ(build_model(e, model()), "");
    for (int step = 0; step < 4; ++step) {
      const Order& order = orders[static_cast<size_t>(step) % orders.size()];
      if (!places.empty()) {
        const Place& at = places[static_cast<size_t>(rank) % places.size()];
        for (int i = 0; i < at.micro_batches; ++i) {
          backward(e, model().units.size(), 1e4f, order, gpu);
          ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
        }
        backward(e, at.units, -1e4f, order, gpu);
        ASSERT_EQ(strata_drop_gradients(e), STRATA_OK) << last();
        EXPECT_EQ(strata_step(e, nullptr), STRATA_FAILED_PRECONDITION);
        EXPECT_TRUE(says("0 of ")) << last();
      }
      for (int micro = 0; micro < t.micro_batches; ++micro) {
        backward(e, model().units.size(), 0.25f * static_cast<float>(1 + rank + step + micro), order, gpu);
        ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
      }
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    }
    Result r;
    ASSERT_EQ(collect(e, model(), &r), "");
    strata_step_info info;
    STRATA_INIT(&info);
    ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
    r.norms.push_back(info.grad_norm);
    if (rank == 0) out = r;
  };
  EXPECT_EQ(run(t).error, "");
  return out;
}

TEST(DropGradients, TheStepAfterItKnowsNothingOfThem) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const int micro_batches : {1, 2}) {
      for (const int world : {1, 2}) {
        Trial t;
        t.stage = stage;
        t.world = world;
        t.micro_batches = micro_batches;
        t.clip = 1;
        t.overrides = {"zero_optimization.reduce_bucket_size=4000"};
        if (stage == 3) t.overrides.push_back("zero_optimization.param_persistence_threshold=50");
        const Result clean = trained(t, {});
        ASSERT_FALSE(clean.master.empty());
        const std::string where = "stage " + std::to_string(stage) + ", world " + std::to_string(world) + ", " +
                                  std::to_string(micro_batches) + " micro-batches";
        EXPECT_TRUE(trained(t, {{0, 3}, {1, 0}}) == clean) << where;
        EXPECT_TRUE(trained(t, {{0, 0}, {micro_batches - 1, 5}}) == clean) << where;
        EXPECT_TRUE(trained(t, {{micro_batches, 0}, {0, 1}}) == clean) << where;
      }
    }
  }
}

// Units that do not come in the order that is expected are sent out of turn once more of them wait than may. A rank
// that has not come so far cannot know which ones another has sent.
TEST(DropGradients, FromDifferentPlacesOutOfTurn) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const int micro_batches : {1, 2}) {
      for (const int world : {2, 3}) {
        if (world == 3 && stage != 2) continue;
        Trial t;
        t.stage = stage;
        t.world = world;
        t.micro_batches = micro_batches;
        t.overrides = {"zero_optimization.reduce_bucket_size=64"};
        if (stage == 3) t.overrides.push_back("zero_optimization.param_persistence_threshold=0");
        const Result clean = trained(t, {});
        ASSERT_FALSE(clean.master.empty());
        // An order of its own from the first step on, and another one in every step.
        for (const std::vector<Order>& orders :
             std::vector<std::vector<Order>>{{kFirstFirst}, {kFirstFirst, kLastFirst}, {kMixed, kFirstFirst}}) {
          const std::string where = "stage " + std::to_string(stage) + ", " + std::to_string(micro_batches) +
                                    " micro-batches, first unit " + std::to_string(orders[0][0]);
          for (const size_t units : {1u, 3u, 4u, 5u}) {
            EXPECT_TRUE(trained(t, {{0, units}, {0, 0}}, orders) == clean) << where << ", " << units << " units";
          }
          EXPECT_TRUE(trained(t, {{0, 2}, {micro_batches - 1, 4}}, orders) == clean) << where;
          EXPECT_TRUE(trained(t, {{micro_batches, 0}, {0, 1}}, orders) == clean) << where;
          EXPECT_TRUE(trained(t, {{0, 3}, {0, 3}}, orders) == clean) << where;
        }
      }
    }
  }
}

// Its reductions and the host's stream are late, and what the host lent may be in use.
TEST(DropGradients, FromDifferentPlacesOutOfTurnOnAGpu) {
  for (const int stage : {0, 2}) {
    for (const int micro_batches : {1, 2}) {
      Trial t;
      t.stage = stage;
      t.world = 2;
      t.micro_batches = micro_batches;
      t.overrides = {"zero_optimization.reduce_bucket_size=64"};
      const Result clean = trained(t, {});
      t.gpu = "gpu_sim";
      t.gpu_delay_us = 300;
      for (const bool lend : {false, true}) {
        t.lend = lend;
        for (const size_t units : {1u, 3u, 5u}) {
          EXPECT_TRUE(trained(t, {{0, units}, {micro_batches - 1, 0}}, {kMixed, kFirstFirst}) == clean)
              << "stage " << stage << ", " << micro_batches << " micro-batches, lent " << lend << ", " << units;
        }
      }
    }
  }
}

// An out-of-memory in a forward is what drops are for: a rank alone needs no memory for one, and goes on with the bits
// of a run without.
TEST(DropGradients, ARankAloneBorrowsNothing) {
  for (const int stage : {0, 2}) {
    Trial t;
    t.stage = stage;
    t.micro_batches = 2;
    t.gpu = "gpu_sim";
    t.gpu_delay_us = 300;
    t.offload_optimizer = "cpu";
    t.model = vectors({4000, 4000}, STRATA_BF16);
    std::vector<Result> results;
    for (const bool drops : {false, true}) {
      const std::string job = "alone-drops-" + std::to_string(stage) + std::to_string(drops);
      Gpu gpu(t.gpu, job, 0, 1, t.gpu_delay_us);
      std::string error;
      strata_engine* e = open_rank(t, job, 0, &error, gpu.lender());
      ASSERT_NE(e, nullptr) << error;
      ASSERT_EQ(build_model(e, t.model), "");
      const auto backward = [&] {
        for (size_t k = 2; k-- > 0;) give_gradient_on(gpu, e, t.model, k);
        ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
      };
      if (drops) {
        backward();
        for (const uint32_t unit : {0u, 1u}) {
          ASSERT_EQ(strata_fetch(e, unit, gpu.stream()), STRATA_OK) << last();
          ASSERT_EQ(strata_release(e, unit, gpu.stream()), STRATA_OK) << last();
        }
        const int loans = gpu.loans();
        ASSERT_EQ(strata_drop_gradients(e), STRATA_OK) << last();
        EXPECT_EQ(gpu.loans(), loans) << "stage " << stage;
      }
      for (int micro = 0; micro < 2; ++micro) backward();
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      Result& mine = results.emplace_back();
      ASSERT_EQ(collect(e, t.model, &mine), "");
      gpu.sync();
      strata_close(e);
      gpu.wait();
    }
    EXPECT_TRUE(results[0] == results[1]) << "stage " << stage;
  }
}

// Where an order holds for a step and then changes, nobody asks in time: from one place it is dropped all the same,
// from different ones every rank hears which two reductions met.
TEST(DropGradients, OutOfATurnThatWasKept) {
  for (const bool same_place : {true, false}) {
    Trial t;
    t.world = 2;
    t.stage = 2;
    t.overrides = {"zero_optimization.reduce_bucket_size=64"};
    run_body(t, [&](int rank, strata_engine* e) {
      ASSERT_EQ(build_model(e, model()), "");
      backward(e, 5, 1, kLastFirst);
      ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
      // Rank 0 may have found out, and told, before it is through.
      for (size_t i = 0; i < 4 && (rank == 0 || same_place); ++i) {
        const strata_status done = strata_grads_done(e, static_cast<strata_unit>(kFirstFirst[i]));
        EXPECT_TRUE(done == STRATA_OK || !same_place) << last();
      }
      const strata_status dropped = strata_drop_gradients(e);
      EXPECT_EQ(dropped == STRATA_OK, same_place) << last();
      EXPECT_TRUE(same_place || (says("reduction of unit \"u0\"") && says("reduction of unit \"u4\""))) << last();
    });
  }
}

// With contiguous_gradients = false they wait in the host's tensors, which a backward that raised may have freed.
TEST(DropGradients, WhatWaitsInTheHostsTensorsIsNotRead) {
  Trial t;
  t.overrides = {"zero_optimization.contiguous_gradients=false", "zero_optimization.reduce_bucket_size=1000000"};
  run_body(t, [](int, strata_engine* e) {
    ASSERT_EQ(build_model(e, model()), "");
    give_gradient(e, model(), 4, 1);  // its tensor is gone already
    give_gradient(e, model(), 0, 1);
    EXPECT_EQ(strata_drop_gradients(e), STRATA_OK) << last();
  });
}

// A rank that goes on to the step instead is found out by the others.
TEST(DropGradients, IsForAllRanks) {
  Trial t;
  t.world = 2;
  t.stage = 2;
  t.body = [](int rank, strata_engine* e) {
    ASSERT_EQ(build_model(e, model()), "");
    backward(e, 5, 1);
    ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
    if (rank == 0) {
      EXPECT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      EXPECT_NE(strata_wait(e), STRATA_OK);
      return;
    }
    // Rank 0 may have found out, and told, before this one asks.
    if (strata_drop_gradients(e) != STRATA_OK) return;
    backward(e, 5, 1);
    (void)strata_end_backward(e);
    EXPECT_NE(strata_drop_gradients(e), STRATA_OK);
  };
  run(t);
}

}  // namespace
}  // namespace strata::test
