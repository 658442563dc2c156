// offload_nvme where the system fails it: each call once, transfers that come up short or are interrupted, a disk that
// does not answer, a kernel without io_uring, blocks of 65536 bytes. The plugin is linked in, with calls that obey
// faulty_calls.h.
#include <sys/mman.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <set>
#include <thread>

#include "nvme_faults_fixture.h"
#include "shadow.h"
#include "tests/support/waiting.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

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
  if (const strata_status code = tier.api->register_memory(tier.self, memory, sizeof(memory)))
    return failed(code, false);
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
  const std::set<std::string> dispensable = {"setup",       "register_files", "fstat",  "register_buffers",
                                             "update_file", "update_buffer",  "submit", "statx",
                                             "peek",        "wait",           "unlink", "rmdir"};
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
        const bool is_close = call == "eventfd_write" && n == count;  // which cannot fail
        if (faults().has_fired() && error != EINTR && !dispensable.count(call) && !is_close) {
          EXPECT_NE(outcome.code, STRATA_OK) << what << ": nobody was told";
        }
        if (transfer && error == EINTR) {
          EXPECT_EQ(outcome.code, STRATA_OK) << what;
        }
        if (transfer && error == ENOSPC && outcome.code) {
          EXPECT_EQ(outcome.code, STRATA_RESOURCE_EXHAUSTED) << what;
        }
        const bool says_so = (call == "unlink" || call == "rmdir") && mentions(" could not be removed: ");
        EXPECT_EQ(dir.entries(), says_so ? 1u : 0u) << what << ": something is left";
        for (const auto& entry : fs::directory_iterator(dir.path)) fs::remove_all(entry.path());
        tier.rank.log_lines.clear();
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

// Fresh room for a stripe of a linked segment could not be had, or filled: the write says so, and nothing has changed.
TEST_P(NvmeFaultsBothWays, AStripeThatCannotMoveStaysWhereItIs) {
  ASSERT_EQ(tier.open(options(GetParam())), STRATA_OK);
  Shadow region(tier, 2 * kMiB, 1);
  ASSERT_EQ(region.write(0, 2 * kMiB), "");
  const std::filesystem::path job = *std::filesystem::directory_iterator(dir.path);
  std::filesystem::create_hard_link(job / "segment-0", dir.path + "/kept");
  const bool threads = GetParam() == "threads";
  const std::string read = threads ? "pread" : "completion", write = threads ? "pwrite" : "completion";
  for (const auto& [call, nth, error] : {std::tuple{std::string("open"), 1, EMFILE},
                                         {std::string("fallocate"), 1, ENOSPC},
                                         {read, 1, EIO},
                                         {write, threads ? 1 : 2, EIO},
                                         {write, threads ? 2 : 4, EIO}}) {
    faults().clear();
    faults().fail(call, nth, error);
    EXPECT_THAT(region.write(4096, 8192),
                AllOf(HasSubstr("layer3 exp_avg"), HasSubstr(dir.path), HasSubstr("segment-0"), HasSubstr("linked"),
                      HasSubstr(std::strerror(error))));
    EXPECT_TRUE(faults().has_fired()) << call;
    EXPECT_EQ(region.read_all(), "") << call << " " << nth;
  }
  // Who cannot ask takes it that somebody links.
  faults().clear();
  std::filesystem::remove(dir.path + "/kept");
  const auto files = [&] { return std::distance(std::filesystem::directory_iterator(job), {}); };
  EXPECT_EQ(region.write(4096, 8192), "");
  EXPECT_EQ(files(), 2) << "the owner and segment-0";
  faults().fail("fstat", 1, EIO, true);
  EXPECT_EQ(region.write(4096, 8192), "");
  EXPECT_EQ(files(), 3);
  faults().clear();
  EXPECT_EQ(region.read_all(), "");
  EXPECT_EQ(region.random_calls(10, 4096), "");
}

TEST_P(NvmeFaultsBothWays, ADiskThatDoesNotAnswerIsNotWaitedForForEver) {
  alignas(4096) static char data[4 * kMiB];  // the disk may answer after the test
  tier.rank.base.deadline_ns = 200'000'000;
  ASSERT_EQ(tier.open(options(GetParam())), STRATA_OK);
  const strata_region region = tier.alloc(4 * kMiB, "layer9 master");
  faults().hang(true);
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
  faults().hang(false);
}

// Nor does the disk find the caller's memory where the tier has put its own in between, which stays as long as it
// takes.
TEST_P(NvmeFaultsBothWays, WhatItAnswersBehindTheEndHasItsMemory) {
  alignas(4096) static char data[4096];
  std::memset(data, 'a', sizeof(data));
  tier.rank.base.deadline_ns = 1'000'000'000;
  ASSERT_EQ(tier.open(options(GetParam())), STRATA_OK);
  const strata_region region = tier.alloc(kMiB, "layer9 master");
  faults().hang_reads = true;
  EXPECT_EQ(tier.read(region, 100, data, 1000), STRATA_DEADLINE_EXCEEDED);
  tier.close();
  faults().hang(false);
  EXPECT_TRUE(eventually([] { return faults().have_ended(); }, std::chrono::seconds(20)));
  EXPECT_EQ(faults().lost, 0u);
  EXPECT_EQ(std::count(data, data + sizeof(data), 'a'), 4096);
}

// What else goes wrong with a transfer is of no account then: with any other status its memory would be free.
TEST_P(NvmeFaultsBothWays, ATransferThatFailsAndIsNotAnsweredIsNotAnswered) {
  alignas(4096) static char data[2 * kMiB];
  tier.rank.base.deadline_ns = 1'000'000'000;
  DiskDir second;
  const std::string paths = dir.path + "," + second.path;
  ASSERT_EQ(tier.open(Options().set("nvme_path", paths).set("probe_ms", 0).set("io", GetParam())), STRATA_OK);
  const strata_region region = tier.alloc(2 * kMiB, "layer9 master");
  faults().hang_reads = true;
  // A stripe on each disk: one hangs, and the other fails.
  GetParam() == "threads" ? faults().fail("pread", 2, EIO) : faults().fail("completion", 1, EIO);
  EXPECT_EQ(tier.read(region, 0, data, 2 * kMiB), STRATA_DEADLINE_EXCEEDED);
  EXPECT_THAT(reason(STRATA_DEADLINE_EXCEEDED), HasSubstr("did not answer"));
  EXPECT_TRUE(faults().has_fired());
  tier.close();
  faults().hang(false);
}

// Ranks of a machine share a path, and neither queues nor locks: one whose transfers stand still, more of them than it
// may have under way, holds up nothing of another one's.
TEST_P(NvmeFaultsBothWays, ARankThatWaitsHoldsUpNoOther) {
  Tier other(linked());
  ASSERT_EQ(tier.open(options(GetParam())), STRATA_OK);
  ASSERT_EQ(other.open(options(GetParam())), STRATA_OK);
  alignas(4096) static char data[kMiB], mine[4 * kMiB];
  const strata_region region = tier.alloc(kMiB), free_one = other.alloc(4 * kMiB);
  ASSERT_EQ(tier.write(region, 0, data, kMiB), STRATA_OK);
  faults().hang_reads = true;
  std::vector<Event> stuck;
  for (uint64_t i = 0; i < 32; ++i) {
    stuck.push_back(Event::create());
    ASSERT_EQ(tier.read(region, i * 32768, data + i * 32768, 32768, stuck.back().get()), STRATA_OK);
  }
  for (int round = 0; round < 20; ++round) {
    const Event done = Event::create();
    ASSERT_EQ(other.write(free_one, 0, mine, 4 * kMiB, done.get()), STRATA_OK);
    ASSERT_TRUE(done->wait(std::chrono::seconds(20)).ok()) << round;
  }
  for (const Event& each : stuck) EXPECT_FALSE(each->is_set());
  faults().hang_reads = false;
  for (const Event& each : stuck) EXPECT_TRUE(each->wait(std::chrono::seconds(20)).ok());
  other.close();
  tier.close();
  EXPECT_EQ(dir.entries(), 0u);
}

// While a disk works it is busy, once for all that is under way; one of two disks is half of the time.
TEST_P(NvmeFaultsBothWays, TimeUnderWayIsCountedOnceAndIsTheMeanOfTheDisks) {
  alignas(4096) static char data[4 * kMiB];
  for (const uint64_t disks : {1u, 2u}) {
    DiskDir second;
    const std::string paths = disks == 1 ? dir.path : dir.path + "," + second.path;
    ASSERT_EQ(tier.open(Options().set("nvme_path", paths).set("probe_ms", 0).set("io", GetParam())), STRATA_OK);
    const strata_region region = tier.alloc(kMiB, "layer9 master");  // one stripe: on one of them
    const uint64_t idle = tier.caps().busy_ns;
    faults().hang(true);
    std::vector<Event> done;
    for (uint64_t i = 0; i < 4; ++i) {
      done.push_back(Event::create());
      ASSERT_EQ(tier.read(region, i * kMiB / 4, data + i * kMiB / 4, kMiB / 4, done.back().get()), STRATA_OK);
    }
    while (tier.caps().busy_ns == idle) sched_yield();
    using Clock = std::chrono::steady_clock;
    const auto ns = [](Clock::duration time) { return static_cast<uint64_t>(std::chrono::nanoseconds(time).count()); };
    const Clock::time_point before = Clock::now();
    const uint64_t first = tier.caps().busy_ns;
    const Clock::time_point between = Clock::now();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const Clock::time_point then = Clock::now();
    const uint64_t last = tier.caps().busy_ns;
    EXPECT_LE(disks * (last - first), ns(Clock::now() - before) + disks);
    EXPECT_GE(disks * (last - first) + disks, ns(then - between));
    faults().hang(false);
    for (Event& each : done) EXPECT_TRUE(each->wait(std::chrono::seconds(20)).ok());
    tier.close();
  }
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

TEST_F(NvmeFaults, ARingWithoutResourcesNamesTheLimits) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
  const strata_region region = tier.alloc(kMiB);
  faults().fail("submit", 1, EAGAIN, true);
  alignas(4096) static char block[4096];
  EXPECT_EQ(tier.write(region, 0, block, 4096), STRATA_INTERNAL);
  EXPECT_THAT(reason(STRATA_INTERNAL), AllOf(HasSubstr(dir.path), HasSubstr("RLIMIT_NPROC (ulimit -u)")));
}

// The ring's thread sleeps, and cannot be told of what is to be moved.
TEST_F(NvmeFaults, ARingThatCannotBeWokenEndsItsTransfers) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
  const strata_region region = tier.alloc(kMiB);
  alignas(4096) static char block[4096];
  strata_status code = STRATA_OK;
  faults().fail("eventfd_write", 1, EIO);
  while (!faults().has_fired()) code = tier.write(region, 0, block, 4096);
  EXPECT_EQ(code, STRATA_DATA_LOSS);
  EXPECT_THAT(reason(STRATA_DATA_LOSS), AllOf(HasSubstr(dir.path), HasSubstr(std::strerror(EIO))));
  tier.close();
  EXPECT_EQ(dir.entries(), 0u);
}

// A ring that fails has transfers under way: their memory is in use, and they do not end before the kernel is through
// with it.
TEST_F(NvmeFaults, ATransferOfARingThatFailsEndsBehindTheKernel) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  alignas(4096) static char first[4096], second[4096];
  const auto is_held = [] { return faults().held() > 0; };
  for (const char* call : {"eventfd_write", "wait"}) {
    ASSERT_EQ(tier.open(options("io_uring")), STRATA_OK);
    const strata_region region = tier.alloc(kMiB);
    std::memset(first, 'a', sizeof(first));
    const Event done = Event::create(), another = Event::create();
    if (std::string(call) == "wait") {  // the kernel has it, and nobody looks at what became of it
      faults().fail(call, 1, EBADF, true);
      ASSERT_EQ(tier.read(region, 0, first, 4096, done.get()), STRATA_OK);
      ASSERT_TRUE(eventually([] { return faults().has_fired(); }, std::chrono::seconds(20)));
      faults().hold("peek");
      ASSERT_TRUE(eventually(is_held, std::chrono::seconds(20)));
    } else {  // it is about to go to the kernel
      faults().hold("submit");
      ASSERT_EQ(tier.read(region, 0, first, 4096, done.get()), STRATA_OK);
      ASSERT_TRUE(eventually(is_held, std::chrono::seconds(20)));
      faults().fail(call, 1, EBADF);
      ASSERT_EQ(tier.read(region, 4096, second, 4096, another.get()), STRATA_OK);
      EXPECT_EQ(another->wait(std::chrono::seconds(20)).code(), STRATA_INTERNAL) << "nobody has it";
    }
    EXPECT_FALSE(done->is_set()) << call;
    faults().clear();
    EXPECT_EQ(done->wait(std::chrono::seconds(20)).code(), STRATA_INTERNAL) << call;
    EXPECT_EQ(std::count(first, first + 4096, '\0'), 4096) << "it has been read before that";
    tier.close();
    EXPECT_EQ(dir.entries(), 0u);
  }
}

TEST_F(NvmeFaults, AShallowerRingWhereMemoryIsShort) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  for (const int error : {ENOMEM, EAGAIN}) {
    tier.rank.log_lines.clear();
    faults().fail("setup", 1, error);
    ASSERT_EQ(tier.open(options("io_uring")), STRATA_OK);
    EXPECT_EQ(mentions("depth 4, not 8"), 1u);
    EXPECT_EQ(mentions(error == ENOMEM ? "found no memory (RLIMIT_MEMLOCK)" : "RLIMIT_NPROC (ulimit -u)"), 1u);
    Shadow region(tier, 3 * kMiB, 1);
    EXPECT_EQ(region.random_calls(10, 4096), "");
    tier.close();
  }
  // No depth will do: threads stand in.
  faults().fail("setup", 1, EAGAIN, true);
  ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
  EXPECT_EQ(mentions("kernel.threads-max, the cgroup's pids.max and memory.max; threads serve in its stead"), 1u);
  Shadow region(tier, 3 * kMiB, 1);
  EXPECT_EQ(region.random_calls(10, 4096), "");
}

// Memory that the kernel does not register is used all the same, and that is said once, with the reason.
TEST_F(NvmeFaults, UnregisteredMemoryWhereItMayNotBeLocked) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  alignas(4096) static char memory[4 * kMiB], back[kMiB];
  struct Refusal {
    const char* call;
    int error;
    bool always;
    const char* reason;
  };
  ASSERT_EQ(tier.open(options("auto")), STRATA_OK);
  if (mentions("registered")) GTEST_SKIP() << "the kernel locks no memory for this process";
  tier.close();
  for (const Refusal& refusal : {Refusal{"update_buffer", ENOMEM, true, "RLIMIT_MEMLOCK"},
                                 {"update_buffer", EFAULT, false, "Bad address"},  // another one works then
                                 {"register_buffers", EINVAL, true, "Invalid argument"}}) {
    faults().clear();
    faults().fail(refusal.call, 1, refusal.error, refusal.always);
    ASSERT_EQ(tier.open(options("auto").set("fast_init", true)), STRATA_OK);
    for (int i = 0; i < 4; ++i) ASSERT_EQ(tier.api->register_memory(tier.self, memory + i * kMiB, kMiB), STRATA_OK);
    EXPECT_EQ(mentions(refusal.reason), 1u) << refusal.call;
    const strata_region region = tier.alloc(kMiB);
    faults().fixed = faults().plain = 0;
    std::memset(memory + kMiB, 'a', kMiB);
    ASSERT_EQ(tier.write(region, 0, memory + kMiB, kMiB), STRATA_OK);
    ASSERT_EQ(tier.read(region, 0, back, kMiB), STRATA_OK);
    EXPECT_EQ(std::memcmp(memory + kMiB, back, kMiB), 0);
    EXPECT_EQ(faults().fixed > 0, !refusal.always) << refusal.call;
    for (int i = 0; i < 4; ++i) tier.api->unregister_memory(tier.self, memory + i * kMiB);
    tier.close();
    tier.rank.log_lines.clear();
  }
}

TEST_F(NvmeFaults, RegisteredMemoryIsUsed) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  alignas(4096) static char memory[4 * kMiB];
  ASSERT_EQ(tier.open(options("auto").set("fast_init", true)), STRATA_OK);
  const strata_region region = tier.alloc(4 * kMiB);
  const auto pieces = [&](uint64_t at, uint64_t bytes) {
    faults().fixed = faults().plain = 0;
    EXPECT_EQ(tier.write(region, at, memory + at, bytes), STRATA_OK);
    EXPECT_EQ(tier.read(region, at, memory + at, bytes), STRATA_OK);
    return std::pair{faults().fixed.load(), faults().plain.load()};
  };
  using Counts = std::pair<unsigned, unsigned>;
  EXPECT_EQ(pieces(0, 4 * kMiB), Counts(0, 8));
  ASSERT_EQ(tier.api->register_memory(tier.self, memory + kMiB, 2 * kMiB), STRATA_OK);
  if (mentions("registered")) GTEST_SKIP() << "the kernel locks no memory for this process";
  EXPECT_EQ(pieces(kMiB, 2 * kMiB), Counts(4, 0));
  EXPECT_EQ(pieces(0, 4 * kMiB), Counts(4, 4));
  EXPECT_EQ(pieces(kMiB / 2, kMiB), Counts(0, 2)) << "a piece half inside";
  ASSERT_EQ(tier.api->register_memory(tier.self, memory, kMiB), STRATA_OK);
  EXPECT_EQ(pieces(kMiB / 2, kMiB), Counts(0, 2)) << "over a border";
  EXPECT_EQ(pieces(0, 4 * kMiB), Counts(6, 2));
  tier.api->unregister_memory(tier.self, memory + kMiB);
  EXPECT_EQ(pieces(0, 4 * kMiB), Counts(2, 6));
  tier.api->unregister_memory(tier.self, memory);
  EXPECT_EQ(pieces(0, 4 * kMiB), Counts(0, 8));
}

// The kernel takes 1 GiB at a time.
TEST_F(NvmeFaults, MoreRegisteredMemoryThanTheKernelTakesAtOnce) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  constexpr uint64_t kBytes = (uint64_t{1} << 30) + 4 * kMiB;
  void* const mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  char* const memory = static_cast<char*>(mapped);
  ASSERT_EQ(tier.open(options("auto").set("fast_init", true)), STRATA_OK);
  ASSERT_EQ(tier.api->register_memory(tier.self, memory, kBytes), STRATA_OK);
  const bool refused = mentions("registered") > 0;
  const strata_region region = tier.alloc(4 * kMiB);
  for (const uint64_t at : {kBytes - 4 * kMiB, kBytes - 6 * kMiB - 4096}) {
    std::memset(memory + at, 'a' + static_cast<int>(at % 7), 4 * kMiB);
    faults().fixed = 0;
    ASSERT_EQ(tier.write(region, 0, memory + at, 4 * kMiB), STRATA_OK);
    ASSERT_EQ(tier.read(region, 0, memory, 4 * kMiB), STRATA_OK);
    EXPECT_EQ(std::memcmp(memory, memory + at, 4 * kMiB), 0) << at;
    if (!refused) {
      EXPECT_GT(faults().fixed, 6u) << at;
    }
  }
  tier.api->unregister_memory(tier.self, memory);
  faults().fixed = 0;
  ASSERT_EQ(tier.read(region, 0, memory + kBytes - 4 * kMiB, 4 * kMiB), STRATA_OK);
  EXPECT_EQ(faults().fixed, 0u) << "none of its parts is left";
  tier.close();
  ::munmap(mapped, kBytes);
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
