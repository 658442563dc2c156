// offload_nvme where files are made, grown and removed by calls that a disk does not answer. What such a call was of is
// said, by the one that made it and by those after it, which ask the disk nothing more.
#include <filesystem>

#include "nvme_faults_fixture.h"
#include "shadow.h"
#include "tests/support/waiting.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

class NvmeUnanswered : public NvmeFaults {
 protected:
  void SetUp() override { tier.rank.base.deadline_ns = 200'000'000; }
  // False, with the disk answering again, where it does not return by itself.
  static bool returns(const std::function<void()>& call) {
    return strata::test::returns(call, std::chrono::seconds(20), [] { faults().clear(); });
  }
  auto tells(const std::string& call, const std::string& file) {
    return testing::ContainsRegex(call + " of " + dir.path + "/[^ ]*/?" + file +
                                  ": the disk did not answer within 0.200 s");
  }
  // The disk answers late, when nobody of this tier is there any more: what it was asked then happens.
  static void answer(const std::function<bool()>& has_happened) {
    faults().clear();
    EXPECT_TRUE(eventually(has_happened, std::chrono::seconds(20)));
  }
  // "" where all is gone.
  fs::path job() {
    const fs::directory_iterator first(dir.path);
    return first == fs::directory_iterator() ? fs::path() : first->path();
  }
};

TEST_F(NvmeUnanswered, Close) {
  for (const std::string call : {"unlink", "rmdir"}) {
    ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
    for (int i = 0; i < 3; ++i) tier.alloc(kMiB);
    const fs::path left = job();
    faults().hold(call);
    EXPECT_TRUE(returns([&] { tier.close(); })) << call;
    EXPECT_EQ(faults().held(), 1u) << "the disk was asked again";
    const std::string told = testing::PrintToString(tier.rank.log_lines);
    EXPECT_THAT(told, tells(call, call == "unlink" ? "segment-0" : ""));
    EXPECT_EQ(mentions(left.string() + " could not be removed: "), 1u) << told;
    EXPECT_EQ(mentions("could not be removed ("), call == "unlink" ? 1u : 0u) << told;
    answer([&] { return !fs::exists(call == "unlink" ? left / "segment-0" : left); });
    fs::remove_all(left);
    tier.rank.log_lines.clear();
  }
}

TEST_F(NvmeUnanswered, ARegion) {
  for (const std::string call : {"open", "fallocate"}) {
    ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
    faults().hold(call);
    for (int i = 0; i < 2; ++i) {
      strata_region none = 0;
      strata_status code = STRATA_OK;
      std::string text;
      EXPECT_TRUE(returns([&] {
        code = tier.api->alloc(tier.self, kMiB, "layer9 master", &none);
        text = reason(code);
      }));
      EXPECT_EQ(code, STRATA_DEADLINE_EXCEEDED) << call;
      EXPECT_THAT(text, AllOf(HasSubstr("layer9 master"), tells(call, "segment-0")));
    }
    EXPECT_EQ(faults().held(), 1u) << "the disk was asked again";
    EXPECT_TRUE(returns([&] { tier.close(); }));
    ASSERT_EQ(dir.entries(), 1u) << "a disk that does not answer removes nothing";
    answer([&] { return fs::exists(job() / "segment-0"); });
    fs::remove_all(job());
  }
}

// A stripe of a linked segment moves: what the disk does not answer leaves its bytes where they were.
TEST_F(NvmeUnanswered, AMove) {
  ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
  Shadow region(tier, 2 * kMiB, 1);
  ASSERT_EQ(region.write(0, 2 * kMiB), "");
  fs::create_hard_link(job() / "segment-0", dir.path + "/kept");
  faults().hold("fallocate");
  std::string text;
  EXPECT_TRUE(returns([&] { text = region.write(4096, 8192); }));
  EXPECT_THAT(text, AllOf(HasSubstr("layer3 exp_avg"), HasSubstr("linked"), tells("fallocate", "segment-1")));
  EXPECT_EQ(region.read_all(), "") << "transfers go on";
  EXPECT_TRUE(returns([&] { tier.close(); }));
  faults().clear();
}

// The old segment goes behind the last of its stripes: that write has arrived, whether the disk removes the file or
// not.
TEST_F(NvmeUnanswered, TheEndOfAMove) {
  ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
  Shadow region(tier, 2 * kMiB, 1);
  ASSERT_EQ(region.write(0, 2 * kMiB), "");
  DiskDir other;
  fs::create_hard_link(job() / "segment-0", other.path + "/kept");
  faults().hold("unlink");
  std::string text = "never";
  EXPECT_TRUE(returns([&] { text = region.write(0, 2 * kMiB); }));
  EXPECT_EQ(text, "");
  EXPECT_EQ(region.read_all(), "");
  EXPECT_THAT(testing::PrintToString(tier.rank.log_lines), tells("unlink", "segment-0"));
  EXPECT_TRUE(returns([&] { tier.close(); }));
  EXPECT_EQ(faults().held(), 1u);
  answer([&] { return !fs::exists(job() / "segment-0"); });
}

TEST_F(NvmeUnanswered, TheStart) {
  for (const std::string call : {"open", "mkdir", "fallocate", "ftruncate", "unlink"}) {
    faults().hold(call);
    strata_status code = STRATA_OK;
    std::string text;
    EXPECT_TRUE(returns([&] {
      code = tier.open(options("auto"));
      text = reason(code);
    }));
    EXPECT_EQ(code, STRATA_DEADLINE_EXCEEDED) << call;
    EXPECT_THAT(text, AllOf(HasSubstr(call + " of " + dir.path), HasSubstr("did not answer within 0.200 s")));
    answer(
        [&] { return (call != "mkdir" || dir.entries() > 0) && (call != "unlink" || !fs::exists(job() / "probe")); });
    for (const auto& entry : fs::directory_iterator(dir.path)) fs::remove_all(entry.path());
  }
}

}  // namespace
}  // namespace strata::test
