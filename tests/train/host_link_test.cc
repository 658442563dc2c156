// host_link_test.cc - what crosses between a device and host memory: the table "Bytes between device and host" of
// docs/offload.md, per param and step, against the engine's counters.
#include <gmock/gmock.h>

#include "tests/train/by_hand.h"
#include "tests/train/crossed.h"

namespace strata::test {
namespace {

const std::string kZero = "zero_optimization.", kOffload = kZero + "offload_optimizer.";
constexpr uint64_t kUnits = 4, kOwned = 8192;  // elements that a rank owns of each unit: two parts of either side

struct Placement {
  bool params_on_cpu = false, split_master = false;
  int micro_batches = 1, world = 1;
  double share = 0;     // of what is in host memory, updated by the device
  int kept = 0;         // units whose state the device keeps
  int kept_sums = 0;    // further ones whose sums of gradients it keeps
  bool reuses = false;  // a unit stays on the device from its first fetch to the update
};

std::ostream& operator<<(std::ostream& out, const Placement& p) {
  return out << (p.params_on_cpu ? "params and " : "") << "optimizer on CPU" << (p.split_master ? ", split master" : "")
             << ", " << p.micro_batches << " micro-batches, world " << p.world << ", share " << p.share << ", "
             << p.kept << " units and " << p.kept_sums << " sums kept" << (p.reuses ? ", units reused" : "");
}

// The table, for a param whose state is offloaded.
Crossed updated(const Placement& p, bool streamed, bool sum_kept) {
  const double weight = 2, state = p.split_master ? 10 : 12, old_weight = p.split_master ? weight : 0;
  const double reduced = p.world == 1 ? 2 : 4;  // several micro-batches leave as they were reduced
  Crossed link;
  link.out = p.micro_batches == 1 ? 2 : sum_kept ? 4 : reduced * p.micro_batches;
  if (streamed) {
    link.in = state + (p.micro_batches == 1 ? 2 : 4);
    link.out += state;
    if (p.params_on_cpu) link.in += old_weight, link.out += weight;
  } else if (!p.params_on_cpu) {
    link.in = weight;
    link.out += old_weight;
  }
  return link;
}

// In a step, of all units: each has a fetch in the forward and one in the backward of a micro-batch. What is fetched
// twice in a row, where one of them follows on the other, is gathered once.
int gathers(const Placement& p) {
  const int turns = 2 * p.micro_batches - 1;
  return p.reuses ? static_cast<int>(kUnits) : 2 * p.micro_batches * static_cast<int>(kUnits) - turns;
}

Crossed table(const Placement& p) {
  Crossed all;
  const auto add = [&all](double units, const Crossed& each) {
    all.in += units / kUnits * each.in;
    all.out += units / kUnits * each.out;
  };
  for (const bool sum_kept : {false, true}) {
    const double units = sum_kept ? p.kept_sums : static_cast<double>(kUnits) - p.kept - p.kept_sums;
    add(units * p.share, updated(p, true, sum_kept));
    add(units * (1 - p.share), updated(p, false, sum_kept));
  }
  // The state does not move, and the weights do where they lie on the other side.
  if (p.params_on_cpu) add(p.kept, {p.split_master ? 2.0 : 0.0, 2.0});
  if (p.params_on_cpu) add(1, {2.0 * gathers(p), 0});
  return all;
}

Trial trial_of(const Placement& p) {
  Trial t;
  t.gpu = "gpu_sim";
  t.stage = 3;
  t.world = p.world;
  t.micro_batches = p.micro_batches;
  t.offload_optimizer = "cpu";
  t.offload_param = p.params_on_cpu ? "cpu" : "none";
  t.device_updates = true;
  t.model = vectors(std::vector<int64_t>(kUnits, static_cast<int64_t>(kOwned) * p.world), STRATA_BF16);
  const uint64_t state = p.split_master ? 10 : 12;
  const uint64_t budget = kOwned * (state * static_cast<uint64_t>(p.kept) + 4 * static_cast<uint64_t>(p.kept_sums));
  t.overrides = {kZero + "param_persistence_threshold=0", kZero + "sub_group_size=2048", kOffload + "split_update=true",
                 kOffload + "split_share=" + std::to_string(p.share),
                 kOffload + "device_state_budget=" + std::to_string(budget)};
  if (!p.reuses) t.overrides.push_back(kZero + "max_reuse_distance=0");
  if (p.split_master) t.overrides.push_back("optimizer.params.state_layout=split");
  return t;
}

Crossed counted(const Trial& t) { return crossed(t, kUnits * kOwned); }

void expect_as_in_the_table(const Placement& p) {
  const Crossed wanted = table(p), found = counted(trial_of(p));
  EXPECT_DOUBLE_EQ(found.in, wanted.in) << "to the device: " << p;
  EXPECT_DOUBLE_EQ(found.out, wanted.out) << "to the host: " << p;
}

TEST(HostLink, EveryShareMovesWhatTheTableSays) {
  for (const bool params_on_cpu : {false, true}) {
    for (const bool split_master : {false, true}) {
      for (const int micro_batches : {1, 3}) {
        for (const int world : {1, 2}) {
          for (const double share : {0.0, 0.5, 1.0})
            expect_as_in_the_table({params_on_cpu, split_master, micro_batches, world, share});
        }
      }
    }
  }
}

TEST(HostLink, WhatTheDeviceKeepsMovesWhatTheTableSays) {
  for (const bool params_on_cpu : {false, true}) {
    for (const bool split_master : {false, true}) {
      for (const int world : {1, 2}) {
        for (const double share : {0.0, 0.5}) {
          expect_as_in_the_table({params_on_cpu, split_master, 1, world, share, 2});
          expect_as_in_the_table({params_on_cpu, split_master, 3, world, share, 1});
          expect_as_in_the_table({params_on_cpu, split_master, 3, world, share, 1, 2});
        }
      }
    }
  }
}

// What a fetch finds on the device, because max_reuse_distance kept it, does not come again.
TEST(HostLink, AUnitThatStaysIsGatheredOnceAStep) {
  for (const int micro_batches : {1, 3}) {
    for (const int world : {1, 2}) {
      Placement p{true, false, micro_batches, world};
      p.reuses = true;
      expect_as_in_the_table(p);
    }
  }
}

// Of each rank its own shard: for the forward, for a block that is computed again, and for its backward. The gradient
// is all that goes back, where the host updates the weight in place.
TEST(HostLink, EachGatherBringsTwoBytesAParam) {
  for (const int world : {1, 2}) {
    Trial t = trial_of({true, false, 1, world});
    t.overrides.push_back(kZero + "prefetch_bucket_size=0");
    t.gpu_body = [&](int, strata_engine* e, Gpu* gpu) {
      ASSERT_EQ(build_model(e, t.model), "");
      const auto totals = [e] {
        strata_counters c;
        STRATA_INIT(&c);
        EXPECT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &c), STRATA_OK) << last();
        return c;
      };
      const strata_counters before = totals();
      uint64_t gathers = 0;
      for (const uint32_t unit : {0u, 1u, 2u, 3u, 3u, 2u, 1u, 0u}) {
        ASSERT_EQ(strata_fetch(e, unit, gpu->stream()), STRATA_OK) << last();
        gpu->sync();
        EXPECT_EQ(totals().tier_read[1] - before.tier_read[1], ++gathers * 2 * kOwned) << "unit " << unit;
        ASSERT_EQ(strata_release(e, unit, gpu->stream()), STRATA_OK) << last();
      }
      EXPECT_EQ(totals().tier_write[1], before.tier_write[1]);
      for (size_t k = kUnits; k-- > 0;) give_gradient_on(*gpu, e, t.model, k);
      gathers += kUnits;
      ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
      EXPECT_EQ(totals().tier_read[1] - before.tier_read[1], gathers * 2 * kOwned);
      EXPECT_EQ(totals().tier_write[1] - before.tier_write[1], 2 * kUnits * kOwned);
    };
    EXPECT_EQ(run(t).error, "");
  }
}

}  // namespace
}  // namespace strata::test
