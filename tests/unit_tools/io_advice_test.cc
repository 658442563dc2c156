// What `strata bench io` makes of rates: medians, a setting other than the default only where it is faster, also in the
// pipeline of an update, no advice out of noise.
#include "tools/io_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace strata::cli {
namespace {

using testing::AllOf;
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

std::pair<unsigned, uint64_t> chosen(const Advice& advice) { return {advice.chosen().depth, advice.chosen().piece}; }
// Of a pipeline that ran at these MB/s.
Advice confirmed(const Advice& advice, double candidate, double by_default) {
  return confirm(advice, {{candidate * 1e6, by_default * 1e6}});
}
// One that the pipeline speaks for.
std::pair<unsigned, uint64_t> candidate(const Advice& advice) { return chosen(confirmed(advice, 2, 1)); }
const std::pair kDefaults(kDefaultDepth, kDefaultPiece);

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
  EXPECT_EQ(candidate(advise(disk({500, 990, 1000, 900, 995}, 0.001))), std::pair(4u, kMiB / 8));
  EXPECT_EQ(candidate(advise(disk({500, 900, 980, 900, 1000}, 0.001))), std::pair(4u, kMiB));
  EXPECT_EQ(candidate(advise(disk({500, 600, 700, 800, 1000}, 0.001))), std::pair(kDefaultDepth, 4 * kMiB));
  EXPECT_EQ(advise(disk({500, 600, 700, 800, 1000}, 0.001)).tolerance, kLeastTolerance);
}

// A smaller depth gains nothing: whatever else is as good, there is no reason to leave the defaults.
TEST(IoAdvice, TheDefaultsStayWhereNothingIsFasterBeyondTheNoise) {
  for (const auto& [rates, noise] : std::vector<std::pair<std::vector<double>, double>>{
           {{1000, 990, 1000, 980, 995}, 0.01}, {{930, 700, 1000, 940, 980}, 0.08}, {{1000, 1, 1, 1000, 1}, 0.001}}) {
    const Advice advice = advise(disk(rates, noise));
    EXPECT_EQ(candidate(advice), kDefaults);
    EXPECT_FALSE(advice.has_candidate());
    EXPECT_THAT(advice.reason, HasSubstr("the defaults are within"));
  }
  // One restless combination is not the noise of the disk.
  std::vector<Rates> one = disk({930, 700, 1000, 940, 980}, 0.01);
  one[0].spread = 0.5;
  EXPECT_EQ(candidate(advise(one)), std::pair(4u, kMiB));
}

TEST(IoAdvice, TooMuchNoiseIsSaid) {
  const Advice lost = advise(disk({1000, 10, 20, 30, 40}, 0.3));
  EXPECT_FALSE(lost.measured);
  EXPECT_EQ(candidate(lost), kDefaults);
  EXPECT_THAT(lost.reason, HasSubstr("the noise is 30 %, too much to compare"));
}

TEST(IoAdvice, NothingIsAdvisedThatThePipelineIsNotFasterWith) {
  const Advice advice = advise(disk({1000, 600, 700, 800, 900}, 0.08));
  const Advice slower = confirmed(advice, 3300, 3480), same = confirmed(advice, 3300, 3300),
               faster = confirmed(advice, 3960, 3300);
  for (const Advice& kept : {slower, same}) {
    EXPECT_EQ(chosen(kept), kDefaults);
    EXPECT_THAT(kept.reason,
                HasSubstr("is depth 1, 1024 KiB, but the pipeline runs no faster with that: the defaults"));
    EXPECT_THAT(manifest_text({{"/a", kept}}), HasSubstr("queue_depth = 32\nblock_bytes = 1048576\n"));
  }
  EXPECT_EQ(chosen(faster), std::pair(1u, kMiB));
  EXPECT_THAT(faster.reason, HasSubstr("the pipeline runs 20 % faster than by default"));
  // By medians: one round that stands out changes nothing.
  const Advice hit = confirm(advice, {{3300e6, 3480e6}, {9900e6, 3480e6}, {3300e6, 3480e6}});
  EXPECT_EQ(chosen(hit), kDefaults);
  EXPECT_EQ(hit.pipeline.candidate, 3300e6);
}

TEST(IoAdvice, SecondsOfAStepAreItsBytesOverTheRate) {
  EXPECT_DOUBLE_EQ(seconds_per_billion(2e9).full, 12);
  EXPECT_DOUBLE_EQ(seconds_per_billion(2e9).split, 10);
  const Advice faster = confirmed(advise(disk({1000, 600, 700, 800, 900}, 0.01)), 2000, 1000);
  EXPECT_THAT(manifest_text({{"/a", faster}}), HasSubstr("# /a: the pipeline reaches 2000 MB/s: an update takes 12.0 s "
                                                         "per 1e9 params, 10.0 with state_layout = \"split\"\n"));
}

TEST(IoAdvice, TheManifestHasPathsSharesAndRemarks) {
  const Advice fast = confirmed(advise(disk({500, 900, 980, 900, 999}, 0.001)), 2, 1);
  const Advice slow = confirmed(advise(disk({50, 49, 50, 49, 52}, 0.001)), 2, 1);
  const std::string one = manifest_text({{"/a", fast}});
  EXPECT_THAT(one, HasSubstr("nvme_path = \"/a\"\n"));
  EXPECT_THAT(one, HasSubstr("queue_depth = 4\nblock_bytes = 1048576\n"));
  EXPECT_THAT(one, HasSubstr("# put these keys into the sections that are there"));
  EXPECT_THAT(one, HasSubstr("# [zero_optimization.offload_param] with device = \"nvme\" needs the same nvme_path\n"));
  EXPECT_THAT(one, AllOf(Not(HasSubstr("weights")), Not(HasSubstr("RAM")), Not(HasSubstr("one file system"))));
  const std::string two = manifest_text({{"/a", fast, false, 7}, {"/b\"c\\", slow, true, 8}});
  EXPECT_THAT(two, HasSubstr("nvme_path = \"/a, /b\\\"c\\\\\"\n"));
  EXPECT_THAT(two, HasSubstr("weights = \"981, 53\"\n"));
  EXPECT_THAT(two, HasSubstr("# /b\"c\\ lies in RAM (tmpfs)"));
  EXPECT_THAT(two, Not(HasSubstr("one file system")));
  EXPECT_THAT(manifest_text({{"/a", fast}, {"/b", fast}}), HasSubstr("weights = \"1, 1\"\n"));
}

TEST(IoAdvice, PathsOfOneFileSystemAreNamed) {
  const Advice fast = confirmed(advise(disk({500, 900, 980, 900, 999}, 0.001)), 2, 1);
  const std::string text = manifest_text({{"/a", fast, false, 7}, {"/b", fast, false, 8}, {"/c", fast, false, 7}});
  EXPECT_THAT(text, HasSubstr("# /a and /c lie on one file system: they share its room and its speed"));
  EXPECT_THAT(text, Not(HasSubstr("/b lie on")));
}

// None of them was measured with the other's.
TEST(IoAdvice, DisksThatAskForDifferentSettingsKeepTheDefaults) {
  const Advice small = confirmed(advise(disk({500, 900, 980, 900, 999}, 0.001)), 2000, 1000);
  const Advice large = confirmed(advise(disk({500, 600, 700, 800, 1000}, 0.001)), 3000, 1000);
  const std::string text = manifest_text({{"/a", small}, {"/b", large}});
  EXPECT_THAT(text, HasSubstr("# the disks ask for different settings: the defaults stay\n"));
  EXPECT_THAT(text, HasSubstr("queue_depth = 32\nblock_bytes = 1048576\n"));
  EXPECT_THAT(text, HasSubstr("# /b: the pipeline reaches 1000 MB/s"));
}

}  // namespace
}  // namespace strata::cli
