// crossed.h - what a step moves between host memory and a device, for tests that hold it against a formula.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tests/train/harness.h"

namespace strata::test {

// Of rank 0, in bytes over `params`.
struct Crossed {
  double in = 0, out = 0;  // to the device, and from it
};

// The first steps also record the order of fetches: a step is half of what two more add.
inline Crossed crossed(Trial t, uint64_t params) {
  std::vector<strata_counters> totals;
  for (const int steps : {3, 5}) {
    t.steps = steps;
    const Result r = run(t);
    EXPECT_EQ(r.error, "");
    totals.push_back(r.counters);
  }
  const auto each = [params](uint64_t more, uint64_t less) {
    return static_cast<double>(more - less) / 2 / static_cast<double>(params);
  };
  return {each(totals[1].tier_read[1], totals[0].tier_read[1]), each(totals[1].tier_write[1], totals[0].tier_write[1])};
}

}  // namespace strata::test
