// offload_nvme where the system fails it: each call once, transfers that come up short or are interrupted, a disk that
// does not answer, a kernel without io_uring, blocks of 65536 bytes. The plugin is linked in, with calls that obey
// faulty_calls.h.
#include <cerrno>
#include <set>

#include "faulty_calls.h"
#include "shadow.h"
#include "strata/plugin.h"
#include "tests/support/disk_dirs.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;

class NvmeFaults : public testing::TestWithParam<std::string> {
 protected:
  NvmeFaults() { faults().clear(); }
  ~NvmeFaults() override { faults().clear(); }
  static const strata_offload_api* linked() {
    return static_cast<const strata_offload_api*>(strata_plugin_entry_v1(0)->get_interface(STRATA_OFFLOAD));
  }
  Options options(const std::string& io) {
    return Options().set("nvme_path", dir.path).set("probe_ms", 0).set("io", io).set("queue_depth", 8);
  }
  // Why there is no io_uring here; "" when there is.
  std::string no_ring() {
    const strata_status code = tier.open(options("io_uring"));
    const std::string why = code == STRATA_OK ? "" : reason(code);
    tier.close();
    tier.rank.log_lines.clear();
    return why;
  }
  size_t mentions(const std::string& text) {
    const auto& lines = tier.rank.log_lines;
    return static_cast<size_t>(
        std::count_if(lines.begin(), lines.end(), [&](const auto& line) { return line.find(text) != line.npos; }));
  }
  DiskDir dir;
  Tier tier{linked()};
};

class NvmeFaultsBothWays : public NvmeFaults {
 protected:
  void SetUp() override {
    if (GetParam() == "threads") return;
    if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
    faults().clear();
  }
};

// What a step does of it: text and code of the first failing call, and whether the fault had struck by the call before.
struct Outcome {
  strata_status code = STRATA_OK;
  std::string text;
  bool late = false;
};

// A tier's life, up to the first failure.
Outcome live(Tier& tier, Options options) {
  const auto failed = [&](strata_status code, bool late) {
    const Outcome outcome{code, reason(code), late};
    tier.close();
    return outcome;
  };
  if (const strata_status code = tier.open(std::move(options))) return {code, reason(code), false};
  alignas(4096) static char memory[3 * kMiB], back[3 * kMiB];
  for (int round = 0; round < 2; ++round) {
    strata_region region = 0;
    const bool before_alloc = faults().has_fired();
    if (const strata_status code = tier.api->alloc(tier.self, 3 * kMiB, "layer3 exp_avg", &region)) {
      return failed(code, before_alloc);
    }
    std::memset(memory, 'a' + round, sizeof(memory));
    const bool before_write = faults().has_fired();
    if (const strata_status code = tier.write(region, 0, memory, 3 * kMiB)) return failed(code, before_write);
    const bool before_read = faults().has_fired();
    if (const strata_status code = tier.read(region, 0, back, 3 * kMiB)) return failed(code, before_read);
    EXPECT_EQ(std::memcmp(memory, back, sizeof(back)), 0) << "success, and other bytes";
    tier.api->free(tier.self, region);
  }
  tier.close();
  return {};
}

TEST_P(NvmeFaultsBothWays, EachCallFailsOnce) {
  ASSERT_EQ(live(tier, options(GetParam()).set("fast_init", true)).text, "");
  const std::map<std::string, int> counts = faults().counts();
  EXPECT_GT(counts.size(), 5u);
  // Without these it goes on, in another way or by trying again.
  const std::set<std::string> dispensable = {
      "setup", "register_files", "register_memory", "update_file", "submit", "statx", "peek", "wait"};
  int fired = 0, told = 0;
  for (const auto& [call, count] : counts) {
    for (int error : {EIO, ENOSPC, EINTR}) {
      for (int n = 1; n <= count; n += 1 + count / 12) {
        faults().clear();
        faults().fail(call, n, error);
        const Outcome outcome = live(tier, options(GetParam()).set("fast_init", true));
        const std::string what = call + " " + std::to_string(n) + " of " + std::to_string(count) + ": " + outcome.text;
        fired += faults().has_fired();
        told += outcome.code != STRATA_OK;
        EXPECT_FALSE(outcome.late) << what << ": told by a later call";
        if (outcome.code != STRATA_OK) {
          EXPECT_THAT(outcome.text, HasSubstr(dir.path)) << what;
        }
        const bool transfer = call == "pread" || call == "pwrite" || call == "completion";
        if (faults().has_fired() && error != EINTR && !dispensable.count(call)) {
          EXPECT_NE(outcome.code, STRATA_OK) << what << ": nobody was told";
        }
        if (transfer && error == EINTR) {
          EXPECT_EQ(outcome.code, STRATA_OK) << what;
        }
        if (transfer && error == ENOSPC && outcome.code) {
          EXPECT_EQ(outcome.code, STRATA_RESOURCE_EXHAUSTED) << what;
        }
        EXPECT_EQ(dir.entries(), 0u) << what << ": something is left";
      }
    }
  }
  EXPECT_GT(fired, 20);
  EXPECT_GT(told, 10);
  faults().clear();
  EXPECT_EQ(live(tier, options(GetParam())).text, "");
}

TEST_P(NvmeFaultsBothWays, ShortTransfersAreContinued) {
  ASSERT_EQ(tier.open(options(GetParam())), STRATA_OK);
  faults().short_transfers = true;
  Shadow whole(tier, 5 * kMiB, 1), any(tier, 2 * kMiB + 777, 2);
  EXPECT_EQ(whole.random_calls(20, 4096), "");
  EXPECT_EQ(any.random_calls(20, 1), "");
}

TEST_P(NvmeFaultsBothWays, InterruptedTransfersAreTriedAgain) {
  ASSERT_EQ(tier.open(options(GetParam())), STRATA_OK);
  faults().interrupt_every = 3;
  Shadow region(tier, 5 * kMiB, 1);
  EXPECT_EQ(region.random_calls(20, 4096), "");
}

TEST_P(NvmeFaultsBothWays, AnErrorOfAWriteSaysWhereAndHowMuch) {
  ASSERT_EQ(tier.open(options(GetParam())), STRATA_OK);
  const strata_region region = tier.alloc(8 * kMiB, "layer9 master");
  std::vector<char> memory(8 * kMiB + 4096);
  char* data = memory.data() + (4096 - reinterpret_cast<uintptr_t>(memory.data()) % 4096);
  const std::string call = GetParam() == "threads" ? "pwrite" : "completion";
  for (const auto& [error, code] : {std::pair{EIO, STRATA_DATA_LOSS},
                                    {EROFS, STRATA_PERMISSION_DENIED},
                                    {ENOSPC, STRATA_RESOURCE_EXHAUSTED},
                                    {ENODEV, STRATA_UNAVAILABLE}}) {
    faults().clear();
    faults().fail(call, 5, error);
    Event done = Event::create();
    ASSERT_EQ(tier.write(region, 0, data, 8 * kMiB, done.get()), STRATA_OK);
    const Status status = done->wait(std::chrono::seconds(20));
    EXPECT_EQ(status.code(), code);
    EXPECT_THAT(status.text(), AllOf(HasSubstr("layer9 master"), HasSubstr(dir.path), HasSubstr("segment-0"),
                                     HasSubstr("8388608 bytes"), HasSubstr(" moved"), HasSubstr(std::strerror(error))));
    // Others go on, and so does this one.
    Shadow other(tier, kMiB, 3);
    EXPECT_EQ(other.random_calls(3, 4096), "");
    EXPECT_EQ(tier.write(region, 0, data, 8 * kMiB), STRATA_OK);
  }
}

TEST_P(NvmeFaultsBothWays, ADiskThatDoesNotAnswerIsNotWaitedForForEver) {
  alignas(4096) static char data[4 * kMiB];  // the disk may answer after the test
  tier.rank.base.deadline_ns = 200'000'000;
  ASSERT_EQ(tier.open(options(GetParam())), STRATA_OK);
  const strata_region region = tier.alloc(4 * kMiB, "layer9 master");
  faults().hang = true;
  Event done = Event::create();
  ASSERT_EQ(tier.write(region, 0, data, 2 * kMiB, done.get()), STRATA_OK);
  EXPECT_EQ(tier.read(region, 2 * kMiB, data + 2 * kMiB, 2 * kMiB), STRATA_DEADLINE_EXCEEDED);
  EXPECT_THAT(reason(STRATA_DEADLINE_EXCEEDED),
              AllOf(HasSubstr("layer9 master"), HasSubstr(dir.path), HasSubstr("2097152 bytes")));
  EXPECT_EQ(done->wait(std::chrono::seconds(20)).code(), STRATA_DEADLINE_EXCEEDED);
  // The queue stays given up.
  EXPECT_EQ(tier.read(region, 0, data, 4096), STRATA_DEADLINE_EXCEEDED);
  tier.close();
  EXPECT_EQ(dir.entries(), 0u);
  faults().hang = false;
}

INSTANTIATE_TEST_SUITE_P(Io, NvmeFaultsBothWays, testing::Values("io_uring", "threads"),
                         [](const auto& tested) { return tested.param; });

TEST_F(NvmeFaults, ThreadsStandInWhereTheKernelForbidsIoUring) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  for (int error : {EPERM, ENOSYS}) {
    faults().clear();
    faults().fail("setup", 1, error, true);
    ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
    EXPECT_EQ(mentions(error == EPERM ? "io_uring_disabled" : "has no io_uring"), 1u) << "said once";
    Shadow region(tier, 3 * kMiB, 1);
    EXPECT_EQ(region.random_calls(10, 4096), "");
    tier.close();
  }
  ASSERT_EQ(tier.open(options("io_uring")), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(reason(STRATA_FAILED_PRECONDITION), HasSubstr("has no io_uring"));
  EXPECT_EQ(dir.entries(), 0u);
}

TEST_F(NvmeFaults, ARingThatFailsForGoodEndsItsTransfers) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  for (const char* call : {"submit", "wait"}) {
    faults().clear();
    ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
    const strata_region region = tier.alloc(kMiB);
    faults().fail(call, 1, EBADF, true);
    alignas(4096) static char block[4096];
    EXPECT_EQ(tier.write(region, 0, block, 4096), STRATA_INTERNAL) << call;
    EXPECT_THAT(reason(STRATA_INTERNAL), AllOf(HasSubstr(dir.path), HasSubstr("Bad file descriptor")));
    tier.close();
    EXPECT_EQ(dir.entries(), 0u);
  }
}

TEST_F(NvmeFaults, AShallowerRingWhereMemoryIsShort) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  faults().fail("setup", 1, ENOMEM);
  ASSERT_EQ(tier.open(options("io_uring")), STRATA_OK);
  EXPECT_EQ(mentions("depth 4, not 8"), 1u);
  EXPECT_EQ(mentions("RLIMIT_MEMLOCK"), 1u);
  Shadow region(tier, 3 * kMiB, 1);
  EXPECT_EQ(region.random_calls(10, 4096), "");
}

TEST_F(NvmeFaults, UnregisteredMemoryWhereItMayNotBeLocked) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  faults().fail("register_memory", 1, ENOMEM);
  ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
  EXPECT_EQ(mentions("RLIMIT_MEMLOCK"), 1u);
  Shadow region(tier, 3 * kMiB, 1);
  EXPECT_EQ(region.random_calls(10, 4096), "");
}

// A file system with blocks of 65536: found by trying, and neighbours within a block do not disturb each other.
TEST_F(NvmeFaults, BlocksOf65536) {
  for (const bool checksum : {false, true}) {
    faults().alignment = 65536;
    ASSERT_EQ(tier.open(options("threads").set("checksum", checksum)), STRATA_OK);
    EXPECT_EQ(mentions("alignment 65536"), checksum ? 2u : 1u);
    EXPECT_EQ(mentions("page cache"), 0u);
    Shadow whole(tier, 5 * kMiB + 12288, 1), any(tier, kMiB + 777, 2);
    EXPECT_EQ(whole.random_calls(40, 4096), "");
    EXPECT_EQ(any.random_calls(20, 1), "");
    EXPECT_EQ(whole.read_all(), "");
    tier.close();
  }
}

// A file system that cannot allot space ahead.
TEST_F(NvmeFaults, WithoutFallocate) {
  faults().fail("fallocate", 1, EOPNOTSUPP, true);
  ASSERT_EQ(tier.open(options("auto").set("fast_init", true)), STRATA_OK);
  for (int i = 0; i < 3; ++i) {
    Shadow region(tier, 3 * kMiB, 1);
    EXPECT_EQ(region.read_all(), "") << "fresh";
    EXPECT_EQ(region.random_calls(5, 4096), "");
    tier.api->free(tier.self, region.region);
  }
}

}  // namespace
}  // namespace strata::test
