// Training with the optimizer's state, the params or both on disk: the bits of the plain run, whatever the disks, the
// queue and the cut into sub-groups; nothing left behind; a failing disk ends the run with its name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/support/disk_dirs.h"
#include "tests/train/harness.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::string kState = "zero_optimization.offload_optimizer.", kParam = "zero_optimization.offload_param.";

// Optimizer state on disk, at `paths`.
Trial on_disk(Trial t, const std::string& paths) {
  t.offload_optimizer = "none";
  t.overrides.push_back(kState + "device=nvme");
  t.overrides.push_back(kState + "nvme_path=\"" + paths + "\"");
  t.manifest_extra += "[plugin.offload_nvme]\nprobe_ms = 0\n";
  return t;
}

struct Shape {
  int stage, world, micro;
};

class NvmeKeepsBits : public testing::TestWithParam<Shape> {
 protected:
  Trial base() const {
    Trial t;
    t.stage = GetParam().stage;
    t.world = GetParam().world;
    t.micro_batches = GetParam().micro;
    t.clip = 0.05;
    t.steps = 5;
    if (t.stage == 3) t.overrides = {"zero_optimization.param_persistence_threshold=50"};
    return t;
  }
  void expect_plain(Trial t, const std::string& what) {
    const Result other = run(t);
    ASSERT_EQ(other.error, "") << what;
    EXPECT_TRUE(other == plain_) << what << " changed the numbers";
    EXPECT_GT(other.counters.tier_read[2], 0u) << what;
    EXPECT_GT(other.counters.tier_write[2], 0u) << what;
    EXPECT_EQ(a.entries() + b.entries(), 0u) << what << " left something behind";
  }
  Result plain_;
  DiskDir a, b;
};

TEST_P(NvmeKeepsBits, OfThePlainRun) {
  plain_ = run(base());
  ASSERT_EQ(plain_.error, "");
  expect_plain(on_disk(base(), a.path), "state on disk");
  const auto with = [&](const std::vector<std::string>& overrides, const std::string& options = "") {
    Trial t = on_disk(base(), a.path + ", " + b.path);
    t.overrides.insert(t.overrides.end(), overrides.begin(), overrides.end());
    t.manifest_extra += options;
    expect_plain(t, (overrides.empty() ? "" : overrides[0]) + options);
  };
  with({});
  with({"zero_optimization.sub_group_size=2048"});
  with({"optimizer.params.state_layout=split"});
  with({kState + "fast_init=true"});
  with({}, "io = \"threads\"\nchecksum = true\nqueue_depth = 2\n");
  with({}, "segment_bytes = 1048576\nweights = \"5, 1\"\n");
  if (GetParam().stage < 3) return;
  const std::string same = kParam + "nvme_path=\"" + a.path + ", " + b.path + "\"";
  with({kParam + "device=nvme", same});
  with({kParam + "device=nvme", same, "zero_optimization.sub_group_size=2048"});
  with({kParam + "device=cpu"});
}
INSTANTIATE_TEST_SUITE_P(Matrix, NvmeKeepsBits,
                         testing::Values(Shape{0, 1, 1}, Shape{1, 2, 3}, Shape{2, 2, 1}, Shape{3, 1, 3},
                                         Shape{3, 3, 1}),
                         [](const auto& tested) {
                           return "stage" + std::to_string(tested.param.stage) + "_world" +
                                  std::to_string(tested.param.world) + "_micro" + std::to_string(tested.param.micro);
                         });

// Two engines of one process, one directory: each has its own files.
TEST(Nvme, TwoEnginesShareADirectory) {
  DiskDir dir;
  Trial small = on_disk({}, dir.path), large = small;
  large.world = 2;
  large.stage = 2;
  const Result alone_small = run(small), alone_large = run(large);
  ASSERT_EQ(alone_small.error + alone_large.error, "");
  Result beside;
  std::thread other([&] { beside = run(large); });
  const Result here = run(small);
  other.join();
  EXPECT_TRUE(here == alone_small);
  EXPECT_TRUE(beside == alone_large);
  EXPECT_EQ(dir.entries(), 0u);
}

TEST(Nvme, AFailingDiskEndsTheRunWithItsName) {
  DiskDir dir;
  for (const auto& [rule, what] : {std::pair{"write:40:fail=DATA_LOSS", "write"}, {"read:40:fail=DATA_LOSS", "read"}}) {
    Trial t = on_disk({}, dir.path);
    t.steps = 8;
    t.overrides.push_back("deadline_seconds=2");
    t.overrides.push_back("plugins.offload_nvme=fault");
    t.manifest_extra += std::string("[plugin.fault]\nwraps = \"offload_nvme\"\nrules = \"") + rule + "\"\n";
    const Result r = run(t);
    EXPECT_THAT(r.error, AllOf(HasSubstr(what), HasSubstr("unit \""))) << rule;
    EXPECT_EQ(dir.entries(), 0u);
  }
}

TEST(Nvme, RefusesWhatCannotBe) {
  const auto refused = [](std::vector<std::string> overrides) {
    Trial t;
    t.stage = 3;
    t.overrides = std::move(overrides);
    return run(t).error;
  };
  const std::string at = kState + "nvme_path=";
  EXPECT_THAT(refused({kState + "device=nvme", at + "/no/such/directory"}),
              AllOf(HasSubstr("offload_nvme"), HasSubstr("/no/such/directory"), HasSubstr("No such file")));
  EXPECT_THAT(refused({kState + "device=nvme", at + "/a", kParam + "device=nvme", kParam + "nvme_path=/b"}),
              AllOf(HasSubstr("\"/a\""), HasSubstr("\"/b\""), HasSubstr("differ")));
}

}  // namespace
}  // namespace strata::test
