// The batch rule (cases.md 53): any two of three keys give the third, exactly, or all numbers are named.
#include "core/manifest/batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit_manifest/manifest_text.h"

namespace strata {
namespace {

using ::testing::HasSubstr;

struct Batch {
  int64_t total, micro, steps;
  bool operator==(const Batch&) const = default;
};

Settings settings_of(Batch b) {
  std::string text;
  if (b.total) text += "train_batch_size = " + std::to_string(b.total) + "\n";
  if (b.micro) text += "train_micro_batch_size_per_gpu = " + std::to_string(b.micro) + "\n";
  if (b.steps) text += "gradient_accumulation_steps = " + std::to_string(b.steps) + "\n";
  return test::accepted(text);
}

Batch solved(int64_t world, Batch given) {
  Settings s = settings_of(given);
  const Status status = resolve_batch(world, &s);
  EXPECT_TRUE(status.ok()) << status.text();
  return {s.train_batch_size, s.train_micro_batch_size_per_gpu, s.gradient_accumulation_steps};
}

std::string refused(int64_t world, Batch given) {
  Settings s = settings_of(given);
  const Status status = resolve_batch(world, &s);
  EXPECT_EQ(status.code(), STRATA_INVALID_ARGUMENT);
  EXPECT_EQ((Batch{s.train_batch_size, s.train_micro_batch_size_per_gpu, s.gradient_accumulation_steps}), given);
  return status.text();
}

TEST(BatchRule, AnyTwoGiveTheThird) {
  EXPECT_EQ(solved(4, {1536, 8, 0}), (Batch{1536, 8, 48}));
  EXPECT_EQ(solved(4, {1536, 0, 16}), (Batch{1536, 24, 16}));
  EXPECT_EQ(solved(4, {0, 8, 16}), (Batch{512, 8, 16}));
  EXPECT_EQ(solved(4, {512, 8, 16}), (Batch{512, 8, 16}));
}

TEST(BatchRule, OneAloneMeansOneMicroBatch) {
  EXPECT_EQ(solved(3, {0, 2, 0}), (Batch{6, 2, 1}));
  EXPECT_EQ(solved(3, {12, 0, 0}), (Batch{12, 4, 1}));
}

TEST(BatchRule, RemaindersNameAllNumbersAndTheNearestTotals) {
  EXPECT_EQ(refused(7, {256, 2, 0}),
            "batch sizes: train_batch_size must be a multiple of 14; nearest: 252 or 266; train_batch_size = 256 "
            "(m.toml:1:1), train_micro_batch_size_per_gpu = 2 (m.toml:2:1), gradient_accumulation_steps = not given, "
            "world = 7");
  EXPECT_THAT(refused(8, {4, 0, 0}), HasSubstr("must be a multiple of 8; nearest: 8;"));
  EXPECT_THAT(refused(2, {10, 2, 3}), HasSubstr("train_batch_size must be exactly 12;"));
  EXPECT_THAT(refused(3, {10, 0, 2}), HasSubstr("nearest: 6 or 12"));
}

TEST(BatchRule, TooLittleIsRefused) {
  EXPECT_THAT(refused(2, {0, 0, 4}), HasSubstr("give `train_micro_batch_size_per_gpu` or `train_batch_size`"));
  EXPECT_THAT(refused(2, {0, 0, 0}), HasSubstr("not given"));
  EXPECT_THAT(refused(0, {8, 0, 0}), HasSubstr("at least 1"));
}

TEST(BatchRule, ZeroAndNegativeAreRefusedByTheManifest) {
  for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}) {
    EXPECT_THAT(test::refusal(std::string(key) + " = 0"), HasSubstr("must be 1 or more, got 0"));
    EXPECT_THAT(test::refusal(std::string(key) + " = -4"), HasSubstr("must be 1 or more, got -4"));
  }
}

TEST(BatchRule, HugeNumbersDoNotOverflow) {
  const int64_t huge = 9'000'000'000'000'000'000;
  EXPECT_THAT(refused(8, {0, huge, 4}), HasSubstr("does not fit into 64 bits"));
  EXPECT_THAT(refused(7, {huge, 0, 0}), HasSubstr("nearest: "));
}

}  // namespace
}  // namespace strata
