// crossed.h - what a step moves between ranks, and between host memory and a device, for tests of formulas.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/train/harness.h"

namespace strata::test {

// Of rank 0, in bytes over `params`.
struct Crossed {
  double in = 0, out = 0;  // to the device, and from it
};

// Rank 0's counters of one step, those of bytes between ranks and over the host link. The first steps also record the
// order of fetches: a step is half of what two more add.
inline strata_counters of_a_step(Trial t) {
  std::vector<strata_counters> totals;
  for (const int steps : {3, 5}) {
    t.steps = steps;
    const Result r = run(t);
    EXPECT_EQ(r.error, "");
    totals.push_back(r.counters);
  }
  strata_counters step{};
  const auto half = [&](auto field) { return (totals[1].*field - totals[0].*field) / 2; };
  step.gather_bytes = half(&strata_counters::gather_bytes);
  step.reduce_bytes = half(&strata_counters::reduce_bytes);
  step.tier_read[1] = (totals[1].tier_read[1] - totals[0].tier_read[1]) / 2;
  step.tier_write[1] = (totals[1].tier_write[1] - totals[0].tier_write[1]) / 2;
  return step;
}

inline Crossed crossed(const Trial& t, uint64_t params) {
  const strata_counters step = of_a_step(t);
  const auto each = [params](uint64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(params); };
  return {each(step.tier_read[1]), each(step.tier_write[1])};
}

}  // namespace strata::test
