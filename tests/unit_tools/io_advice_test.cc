// What `strata bench io` makes of rates: medians, the smallest setting that is as good, no advice out of noise.
#include "tools/io_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace strata::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr uint64_t kMiB = uint64_t{1} << 20;

// Of a disk with these mixed rates; `spread` is the same for all.
std::vector<Rates> disk(const std::vector<double>& mixed, double spread) {
  const std::vector<std::pair<unsigned, uint64_t>> settings = {
      {1, kMiB}, {4, kMiB / 8}, {4, kMiB}, {kDefaultDepth, kDefaultPiece}, {kDefaultDepth, 4 * kMiB}};
  std::vector<Rates> rates;
  for (size_t i = 0; i < mixed.size(); ++i) {
    rates.push_back({settings[i].first, settings[i].second, 0, 0, mixed[i] * 1e6, spread});
  }
  return rates;
}

std::pair<unsigned, uint64_t> chosen(const Advice& advice) { return {advice.chosen.depth, advice.chosen.piece}; }

TEST(IoAdvice, OneRoundThatStandsOutChangesNothing) {
  const Rates steady = rates_of(4, kMiB, {{1, 2, 100}, {1, 2, 102}, {1, 2, 101}, {9, 9, 98}, {1, 2, 99}});
  const Rates hit = rates_of(4, kMiB, {{1, 2, 100}, {1, 2, 102}, {1, 2, 101}, {9, 9, 5}, {1, 2, 900}});
  EXPECT_EQ(steady.mixed, 100);
  EXPECT_EQ(hit.mixed, 101);
  EXPECT_EQ(std::pair(hit.read, hit.write), std::pair(1.0, 2.0));
  EXPECT_DOUBLE_EQ(steady.spread, 0.02);
  EXPECT_GT(hit.spread, 1);
}

TEST(IoAdvice, TheSmallestDepthThenPieceWithinTheToleranceOfTheBest) {
  EXPECT_EQ(chosen(advise(disk({500, 990, 1000, 980, 995}, 0.001))), std::pair(4u, kMiB / 8));
  EXPECT_EQ(chosen(advise(disk({500, 900, 980, 1000, 999}, 0.001))), std::pair(4u, kMiB));
  EXPECT_EQ(chosen(advise(disk({500, 600, 700, 800, 1000}, 0.001))), std::pair(kDefaultDepth, 4 * kMiB));
  EXPECT_EQ(advise(disk({500, 600, 700, 800, 1000}, 0.001)).tolerance, kLeastTolerance);
}

TEST(IoAdvice, WhatIsNotBeyondTheNoiseCountsAsTheSame) {
  const std::vector<double> rates = {930, 700, 940, 1000, 980};
  EXPECT_EQ(chosen(advise(disk(rates, 0.01))), std::pair(kDefaultDepth, kDefaultPiece));
  const Advice noisy = advise(disk(rates, 0.08));
  EXPECT_EQ(chosen(noisy), std::pair(1u, kMiB));
  EXPECT_EQ(noisy.tolerance, 0.08);
  EXPECT_THAT(noisy.reason, HasSubstr("the noise is 8 %"));
  // One restless combination is not the noise of the disk.
  std::vector<Rates> one = disk(rates, 0.01);
  one[0].spread = 0.5;
  EXPECT_EQ(chosen(advise(one)), std::pair(kDefaultDepth, kDefaultPiece));
}

TEST(IoAdvice, NoDifferenceAndTooMuchNoiseAreSaid) {
  EXPECT_THAT(advise(disk({1000, 990, 1000, 980, 995}, 0.01)).reason, HasSubstr("any will do"));
  const Advice lost = advise(disk({1000, 10, 20, 30, 40}, 0.3));
  EXPECT_FALSE(lost.measured);
  EXPECT_EQ(chosen(lost), std::pair(kDefaultDepth, kDefaultPiece));
  EXPECT_THAT(lost.reason, HasSubstr("the noise is 30 %, too much to compare"));
}

TEST(IoAdvice, TheManifestHasPathsSharesAndRemarks) {
  const Advice fast = advise(disk({500, 900, 980, 1000, 999}, 0.001)), slow = advise(disk({50, 49, 50, 51, 50}, 0.001));
  const std::string one = manifest_text({{"/a", fast, false}});
  EXPECT_THAT(one, HasSubstr("nvme_path = \"/a\"\n"));
  EXPECT_THAT(one, HasSubstr("queue_depth = 4\nblock_bytes = 1048576\n"));
  EXPECT_THAT(one, HasSubstr("# put these keys into the sections that are there"));
  EXPECT_THAT(one, HasSubstr("# [zero_optimization.offload_param] with device = \"nvme\" needs the same nvme_path\n"));
  EXPECT_THAT(one, Not(HasSubstr("weights")));
  EXPECT_THAT(one, Not(HasSubstr("RAM")));
  const std::string two = manifest_text({{"/a", fast, false}, {"/b\"c\\", slow, true}});
  EXPECT_THAT(two, HasSubstr("nvme_path = \"/a, /b\\\"c\\\\\"\n"));
  EXPECT_THAT(two, HasSubstr("weights = \"981, 51\"\n"));
  EXPECT_THAT(two, HasSubstr("# /b\"c\\ lies in RAM (tmpfs)"));
  EXPECT_THAT(manifest_text({{"/a", fast, false}, {"/b", fast, false}}), HasSubstr("weights = \"1, 1\"\n"));
}

}  // namespace
}  // namespace strata::cli
