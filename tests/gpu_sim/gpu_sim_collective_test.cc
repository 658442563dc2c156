// Collectives of the simulated GPU: comm_local's bits, on streams, in the order of their calls, and how they fail.
#include <sys/wait.h>

#include <random>

#include "gpu_sim_fixture.h"

namespace strata::test {
namespace {

using testing::Each;
using testing::HasSubstr;

constexpr int64_t kShort = 100'000'000;  // a deadline that a test waits for

strata_coll_item item(const void* in, void* out, uint64_t count, strata_dtype in_dtype = STRATA_F32,
                      strata_dtype out_dtype = STRATA_F32) {
  return {sizeof(strata_coll_item), STRATA_ABI_MINOR, in, out, count, in_dtype, out_dtype};
}

struct Args {
  Args(std::vector<strata_coll_item> group, uint64_t tag, const strata_stream* on, int64_t deadline_ns = -1)
      : items(std::move(group)),
        c{sizeof(c), STRATA_ABI_MINOR, items.data(), items.size(), sizeof(strata_coll_item), tag, "a test", 0,
          0,         deadline_ns,      on,           nullptr} {}
  std::vector<strata_coll_item> items;
  strata_coll_args c;
};

// An all_gather of one number per rank, on a stream; `out` is device memory for all of them.
Event gather(SimRank& rank, const float* in, float* out, uint64_t tag, const strata_stream& on,
             int64_t deadline_ns = -1) {
  const Args args({item(in, out, 1)}, tag, &on, deadline_ns);
  Event done = Event::create();
  const strata_status code = rank.comm->all_gather(rank.self, &args.c, done.get());
  if (code != STRATA_OK) done->set(take_failure(code));
  return done;
}

Status barrier(SimRank& rank) {
  const Args args({}, 0, nullptr);
  return take_failure(rank.comm->barrier(rank.self, &args.c));
}

// Every rank's number, or -1 where the exchange failed.
std::vector<int> exchange(SimRank& rank, int number, int world, Status* status) {
  std::vector<int> all(static_cast<size_t>(world), -1);
  const Args args({}, 7, nullptr);
  *status = take_failure(rank.comm->exchange(rank.self, &number, all.data(), sizeof number, &args.c));
  return all;
}

// --- numbers --------------------------------------------------------------------------------------------------------

std::vector<uint32_t> random_bits(uint64_t count, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<uint32_t> bits(count);
  for (uint32_t& word : bits) word = static_cast<uint32_t>(random());
  return bits;
}

constexpr uint64_t kMost = 5000;  // elements of 4 bytes per rank

// What every operation gives on this rank; inputs and outputs in memory of the collective's alloc.
std::vector<std::vector<uint32_t>> all_operations(SimRank& rank, int number, int world, const strata_stream* on) {
  const uint64_t words = kMost * static_cast<uint64_t>(world);
  const std::vector<uint32_t> bits = random_bits(words, number + 1);
  void *in = nullptr, *out = nullptr;
  EXPECT_EQ(rank.comm->alloc(rank.self, words * 4, &in), STRATA_OK);
  EXPECT_EQ(rank.comm->alloc(rank.self, words * 4, &out), STRATA_OK);
  std::vector<std::vector<uint32_t>> results;
  const auto run = [&](auto slot, uint64_t count, strata_dtype in_dtype, strata_dtype out_dtype, bool in_place) {
    EXPECT_EQ(rank.device->copy(rank.gpu, in, bits.data(), words * 4, on), STRATA_OK);
    EXPECT_EQ(rank.device->copy(rank.gpu, out, bits.data(), words * 4, on), STRATA_OK);
    // Two items, of which one is empty.
    const Args args({item(nullptr, nullptr, 0), item(in, in_place ? in : out, count, in_dtype, out_dtype)}, 3, on);
    const strata_status code = slot(rank.self, &args.c, nullptr);
    EXPECT_EQ(code, STRATA_OK) << reason(code);
    EXPECT_EQ(rank.device->stream_wait_host(rank.gpu, on), STRATA_OK);
    std::vector<uint32_t> got(words);
    EXPECT_EQ(rank.device->copy(rank.gpu, got.data(), in_place ? in : out, words * 4, nullptr), STRATA_OK);
    results.push_back(got);
  };
  for (uint64_t count : {uint64_t{1}, uint64_t{999}, kMost}) {
    run(rank.comm->all_gather, count, STRATA_BF16, STRATA_BF16, false);
    run(rank.comm->reduce_scatter, count, STRATA_BF16, STRATA_F32, false);
    run(rank.comm->reduce_scatter, count, STRATA_F32, STRATA_BF16, false);
    run(rank.comm->all_reduce, count, STRATA_F32, STRATA_F32, false);
    run(rank.comm->all_reduce, count, STRATA_F16, STRATA_F16, true);
    run(rank.comm->broadcast, count, STRATA_F32, STRATA_F32, true);
    run(rank.comm->all_to_all, count, STRATA_F32, STRATA_F32, false);
  }
  return results;
}

class GpuSimWorld : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GpuSimWorld, testing::Values(1, 2, 3));

TEST_P(GpuSimWorld, GivesTheBitsOfCommLocal) {
  const int world = GetParam();
  std::vector<std::vector<std::vector<uint32_t>>> want(static_cast<size_t>(world)), now = want, queued = want;
  as_ranks(
      world, {}, [&](SimRank& rank, int r) { want[static_cast<size_t>(r)] = all_operations(rank, r, world, nullptr); },
      "comm_local");
  as_ranks(world, {{"delay_us", 50}}, [&](SimRank& rank, int r) {
    now[static_cast<size_t>(r)] = all_operations(rank, r, world, nullptr);
    const strata_stream on = rank.stream();
    queued[static_cast<size_t>(r)] = all_operations(rank, r, world, &on);
  });
  EXPECT_EQ(now, want);
  EXPECT_EQ(queued, want);
}

TEST(GpuSimCollective, RanksMayBeProcesses) {
  const std::string job = fresh_job();
  const auto sum_of_ranks = [&](int r) {
    SimRank rank({}, job, r, 2);
    rank.args.threads = 0;
    rank.open();
    const strata_stream on = rank.stream();
    auto* number = rank.put<float>({static_cast<float>(r + 1)});
    const Args args({item(number, number, 1)}, 1, &on);
    return rank.comm->all_reduce(rank.self, &args.c, nullptr) == STRATA_OK && rank.wait(on).ok() &&
           rank.get(number, 1)[0] == 3;
  };
  const pid_t child = fork();
  if (child == 0) _exit(sum_of_ranks(1) ? 0 : 1);
  EXPECT_TRUE(sum_of_ranks(0));
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(GpuSimCollective, RefusesToWrapItself) {
  SimRank rank;
  const strata_collective_api* table = nullptr;
  ASSERT_TRUE(rank.set.find("gpu_sim", STRATA_COLLECTIVE, &table).ok());
  Options wraps;
  rank.args.options = wraps.set("wraps", "gpu_sim").c();
  ASSERT_EQ(table->open(&rank.args, &rank.self), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("itself"));
}

TEST(GpuSimCollective, AllocGivesZeroedDeviceMemoryOfTheBudget) {
  SimRank rank({{"memory_bytes", 10'000}});
  rank.open();
  strata_collective_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_DONE(rank.comm->caps(rank.self, &caps));
  EXPECT_EQ(caps.memory, STRATA_CUDA);
  EXPECT_EQ(caps.flags, STRATA_COLL_FIXED_ORDER | STRATA_COLL_ANY_MEMORY | STRATA_COLL_ANY_OUTPUT);
  void *at = nullptr, *more = nullptr;
  ASSERT_DONE(rank.comm->alloc(rank.self, 6000, &at));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % 4096, 0u);
  EXPECT_THAT(rank.get(static_cast<uint8_t*>(at), 6000), Each(0));
  EXPECT_EQ(rank.device->alloc(rank.gpu, 6000, &more), STRATA_RESOURCE_EXHAUSTED);
  rank.comm->free(rank.self, at);
  EXPECT_EQ(rank.device->alloc(rank.gpu, 6000, &more), STRATA_OK);
}

// --- order ----------------------------------------------------------------------------------------------------------

TEST(GpuSimCollective, RunsInTheOrderOfCallsWhateverTheStream) {
  as_ranks(2, {{"delay_us", 100}}, [&](SimRank& rank, int r) {
    const strata_stream held = rank.stream(), free = rank.stream();
    auto* in = rank.put<float>({static_cast<float>(r + 1)});
    auto *one = rank.put<float>({0, 0}), *two = rank.put<float>({0, 0});
    Gate gate(rank, held);
    const Event first = gather(rank, in, one, 1, held), second = gather(rank, in, two, 2, free);
    EXPECT_FALSE(second->is_set());  // its stream is free, its turn has not come
    // The host's business does not wait for either.
    EXPECT_TRUE(barrier(rank).ok());
    Status status;
    EXPECT_EQ(exchange(rank, 10 + r, 2, &status), (std::vector<int>{10, 11}));
    EXPECT_TRUE(status.ok()) << status.text();
    gate.open();
    EXPECT_TRUE(wait(second).ok()) << wait(second).text();
    EXPECT_TRUE(wait(first).ok());
    EXPECT_EQ(rank.get(one, 2), (std::vector<float>{1, 2}));
    EXPECT_EQ(rank.get(two, 2), (std::vector<float>{1, 2}));
  });
}

TEST(GpuSimCollective, ReadsItsInputsWhenItsStreamGetsThere) {
  as_ranks(2, {}, [&](SimRank& rank, int r) {
    const strata_stream on = rank.stream();
    auto *in = rank.put<float>({-1}), *out = rank.put<float>({0, 0});
    const float number = static_cast<float>(10 + r);
    float got[2] = {0, 0};
    Gate gate(rank, on);
    EXPECT_EQ(rank.device->copy(rank.gpu, in, &number, 4, &on), STRATA_OK);
    const Event done = gather(rank, in, out, 1, on);
    EXPECT_EQ(rank.device->copy(rank.gpu, got, out, 8, &on), STRATA_OK);
    gate.open();
    EXPECT_TRUE(rank.wait(on).ok());
    EXPECT_TRUE(wait(done).ok());
    EXPECT_EQ(got[0], 10);
    EXPECT_EQ(got[1], 11);
  });
}

// --- failure --------------------------------------------------------------------------------------------------------

TEST(GpuSimCollective, AnotherOrderOnAnotherRankIsAnErrorThatNamesBoth) {
  as_ranks(2, {}, [&](SimRank& rank, int r) {
    const strata_stream a = rank.stream(), b = rank.stream();
    auto *in = rank.put<float>({1}), *out = rank.put<float>({0, 0});
    const Event first = gather(rank, in, out, r == 0 ? 1 : 2, a), second = gather(rank, in, out, r == 0 ? 2 : 1, b);
    const Status failed = wait(first);
    EXPECT_EQ(failed.code(), STRATA_FAILED_PRECONDITION);
    EXPECT_THAT(failed.text(), testing::AllOf(HasSubstr("rank 0"), HasSubstr("rank 1")));
    EXPECT_THAT(wait(second).text(), HasSubstr(failed.text()));  // refused at the call, or when its turn came
  });
}

TEST(GpuSimCollective, AnExchangeOutOfOrderIsAnErrorToo) {
  as_ranks(2, {}, [&](SimRank& rank, int r) {
    const strata_stream on = rank.stream();
    auto *in = rank.put<float>({1}), *out = rank.put<float>({0, 0});
    Event done;
    Status status;
    if (r == 0) done = gather(rank, in, out, 1, on);
    (void)exchange(rank, r, 2, &status);
    if (r == 1) done = gather(rank, in, out, 1, on);
    // CANCELLED where the other rank's enqueued collective was told of the failure first.
    EXPECT_THAT(status.code(), testing::AnyOf(STRATA_FAILED_PRECONDITION, STRATA_CANCELLED));
    EXPECT_THAT(status.text(), testing::AllOf(HasSubstr("a test, after 1 enqueued"), HasSubstr("after 0 enqueued")));
    EXPECT_FALSE(wait(done).ok());
  });
}

TEST(GpuSimCollective, AMissingRankIsNamedAtTheDeadlineAndTheFailureStays) {
  std::atomic<bool> failed{false};
  as_ranks(2, {}, [&](SimRank& rank, int r) {
    if (r == 1) {  // never calls
      while (!failed) std::this_thread::yield();
      return;
    }
    const strata_stream on = rank.stream();
    auto *in = rank.put<float>({1}), *out = rank.put<float>({0, 0});
    const Event first = gather(rank, in, out, 1, on, kShort), queued = gather(rank, in, out, 2, on);
    const Status missing = wait(first);
    EXPECT_EQ(missing.code(), STRATA_DEADLINE_EXCEEDED);
    EXPECT_THAT(missing.text(), testing::AllOf(HasSubstr("a test"), HasSubstr("rank 1")));
    EXPECT_THAT(wait(queued).text(), HasSubstr(missing.text()));
    const Args args({item(in, out, 1)}, 3, &on);
    const Event unset = Event::create();
    ASSERT_EQ(rank.comm->all_gather(rank.self, &args.c, unset.get()), STRATA_DEADLINE_EXCEEDED);
    EXPECT_THAT(reason(STRATA_DEADLINE_EXCEEDED), HasSubstr("rank 1"));
    EXPECT_FALSE(unset->is_set());
    EXPECT_EQ(barrier(rank).code(), STRATA_DEADLINE_EXCEEDED);
    Status status;
    (void)exchange(rank, 0, 2, &status);
    EXPECT_THAT(status.text(), HasSubstr(missing.text()));
    EXPECT_TRUE(rank.wait(on).ok());  // the device itself is well
    failed = true;
  });
}

TEST(GpuSimCollective, AStreamThatIsHeldUpHoldsUpTheNextUntilTheDeadline) {
  as_ranks(1, {}, [&](SimRank& rank, int) {
    const strata_stream held = rank.stream(), free = rank.stream();
    auto *in = rank.put<float>({1}), *out = rank.put<float>({0});
    Gate gate(rank, held);
    const Event first = gather(rank, in, out, 1, held), second = gather(rank, in, out, 2, free, kShort);
    const Status late = wait(second);
    EXPECT_EQ(late.code(), STRATA_DEADLINE_EXCEEDED);
    EXPECT_THAT(late.text(), testing::AllOf(HasSubstr("call 2"), HasSubstr("0.100 s for call 1")));
    gate.open();
    EXPECT_EQ(wait(first).text(), late.text());
  });
}

TEST(GpuSimCollective, AbortEndsWhatIsQueuedOnEveryRank) {
  as_ranks(2, {}, [&](SimRank& rank, int r) {
    const strata_stream on = rank.stream();
    auto *in = rank.put<float>({1}), *out = rank.put<float>({0, 0});
    if (r == 1) {
      rank.comm->abort(rank.self, STRATA_DATA_LOSS, "the disk is gone");
      EXPECT_THAT(barrier(rank).text(), HasSubstr("the disk is gone"));
      return;
    }
    const Status told = wait(gather(rank, in, out, 1, on));
    EXPECT_EQ(told.code(), STRATA_CANCELLED);
    EXPECT_THAT(told.text(), testing::AllOf(HasSubstr("rank 1"), HasSubstr("the disk is gone")));
  });
}

TEST(GpuSimCollective, AFailedDeviceFailsItsCollectivesOnEveryRank) {
  as_ranks(2, {}, [&](SimRank& rank, int r) {
    const strata_stream on = rank.stream();
    auto *in = rank.put<float>({1}), *out = rank.put<float>({0, 0});
    const uint64_t bytes = r == 1 ? 5 : 0;  // past the end
    EXPECT_EQ(rank.device->copy(rank.gpu, in, in, bytes, &on), STRATA_OK);
    const Status failed = wait(gather(rank, in, out, 1, on));
    EXPECT_EQ(failed.code(), r == 1 ? STRATA_OUT_OF_RANGE : STRATA_CANCELLED);
    EXPECT_THAT(failed.text(), HasSubstr("5 bytes at device address"));
  });
}

TEST(GpuSimCollective, FreedMemoryIsFoundWhenTheCollectiveRuns) {
  as_ranks(1, {}, [&](SimRank& rank, int) {
    const strata_stream on = rank.stream();
    auto *in = rank.put<float>({1}), *out = rank.put<float>({0});
    Gate gate(rank, on);
    const Event done = gather(rank, in, out, 1, on);
    rank.device->free(rank.gpu, in);
    gate.open();
    EXPECT_EQ(wait(done).code(), STRATA_OUT_OF_RANGE);
    EXPECT_THAT(wait(done).text(),
                testing::AllOf(HasSubstr("call 1, all_gather"), HasSubstr("4 bytes at device address")));
  });
}

TEST(GpuSimCollective, CloseEndsWhatIsNotDone) {
  std::atomic<bool> closed{false};
  as_ranks(2, {}, [&](SimRank& rank, int r) {
    if (r == 1) {  // never calls
      while (!closed) std::this_thread::yield();
      return;
    }
    const strata_stream on = rank.stream();
    auto *in = rank.put<float>({1}), *out = rank.put<float>({0, 0});
    const Event running = gather(rank, in, out, 1, on), queued = gather(rank, in, out, 2, on);
    rank.close_comm();
    closed = true;
    for (const Event& done : {running, queued}) {
      EXPECT_EQ(wait(done).code(), STRATA_CANCELLED);
      EXPECT_THAT(wait(done).text(), HasSubstr("closed before 2 of its collectives were done"));
    }
  });
}

}  // namespace
}  // namespace strata::test
