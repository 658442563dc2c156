// What is particular to comm_mpi: ranks that are missing, abort, refusals at open, sizes beyond MPI's counts, who owns
// MPI, and that every process ends in bounded time whatever has failed.
//
// Run by run_ranks under mpirun; every rank runs the same tests in the same order. A rank writes its verdict to a file
// and then waits for the others', because mpirun ends the job as soon as one rank exits without MPI_Finalize.
#include <gtest/gtest.h>
#include <mpi.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "mpi_ranks.h"
#include "reference.h"

namespace strata::test {
namespace {

using std::chrono::milliseconds;

Setup mpi() { return {"comm_mpi", false, mpi_world()}; }
std::filesystem::path results() { return std::getenv("STRATA_TEST_RESULTS"); }

// A mark that other ranks can wait for.
void mark(const std::string& name) { std::ofstream(results() / (name + "." + std::to_string(mpi_rank()))); }
bool wait_for_mark(const std::string& name, int rank) {
  for (int k = 0; k < 20'000; ++k) {
    if (std::filesystem::exists(results() / (name + "." + std::to_string(rank)))) return true;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return false;
}

Status gather(Peer& peer, uint64_t count, const char* label = "gather layer3") {
  std::vector<float> in(count), out(count * static_cast<uint64_t>(mpi_world()));
  return peer.call(peer.api->all_gather, {item(in.data(), out.data(), count, STRATA_F32, STRATA_F32)}, 1, label);
}

// ---- split ----

// Rank 0 aborts its part. Rank 1 waits in the other one for rank 3, which does not come before rank 1 has given up.
TEST(MpiSplit, AnAbortOfOnePartEndsAll) {
  run_ranks(mpi(), [](Peer& peer, int rank) -> std::string {
    strata_coll_args args = peer.args({}, 77, "split");
    strata_comm *part = nullptr, *const whole = peer.comm;
    RETURN_IF_BAD(expect_ok(take_failure(peer.api->split(whole, rank % 2, 0, &args, &part))));
    RETURN_IF_BAD(expect_ok(peer.barrier("parts are there")));
    peer.comm = part;
    if (rank == 0) peer.api->abort(part, STRATA_DATA_LOSS, "shard 3 cannot be read");
    if (rank == 3 && !wait_for_mark("part_failed", 1)) return "rank 1 did not give up";
    Status status;
    while (status.ok()) status = peer.barrier("in the part");
    if (rank == 1) mark("part_failed");
    peer.close();
    peer.comm = whole;
    const strata_status code = rank == 0 ? STRATA_DATA_LOSS : STRATA_CANCELLED;
    RETURN_IF_BAD(expect_error(status, code, {"aborted", "shard 3 cannot be read"}));
    return expect_error(peer.barrier("of all"), code, {"shard 3 cannot be read"});
  });
}

// ---- failures ----

// For a rank that comes when others have called the barrier and given up: every rank has called it then, so it may
// return well if the news of the failure is still under way. The next one cannot.
Status late_barrier(Peer& peer) {
  Status status = peer.barrier("late");
  return status.ok() ? peer.barrier("late again") : status;
}

TEST(MpiFailure, DeadlineNamesTheMissingRankWhichIsToldWhenItComes) {
  run_ranks(mpi(), [](Peer& peer, int rank) -> std::string {
    RETURN_IF_BAD(expect_ok(peer.barrier()));
    if (rank == 1) {
      for (int r = 0; r < mpi_world(); ++r) {
        if (r != 1 && !wait_for_mark("gave_up", r)) return "nobody gave up";
      }
      return expect_error(late_barrier(peer), STRATA_DEADLINE_EXCEEDED, {"missing: rank 1"});
    }
    const Status status = peer.barrier("end of step", 200'000'000);
    mark("gave_up");
    RETURN_IF_BAD(expect_error(status, STRATA_DEADLINE_EXCEEDED,
                               {"call 2, barrier [end of step]", "waited 0.200 s", "missing: rank 1"}));
    return expect_error(gather(peer, 4), STRATA_DEADLINE_EXCEEDED, {"missing: rank 1"});
  });
}

TEST(MpiFailure, AbortFromAnotherThreadEndsTheRunningCallEverywhere) {
  run_ranks(mpi(), [](Peer& peer, int rank) -> std::string {
    const int last = mpi_world() - 1;
    if (rank == last) {  // comes when rank 0 has given up, and is told why
      if (!wait_for_mark("stopped", 0)) return "rank 0 did not stop";
      return expect_error(late_barrier(peer), STRATA_CANCELLED, {"rank 0", "aborted: stop now"});
    }
    std::thread aborter;
    if (rank == 0) {
      aborter = std::thread([&peer] {
        std::this_thread::sleep_for(milliseconds(50));
        peer.api->abort(peer.comm, STRATA_DATA_LOSS, "stop now");
      });
    }
    const Status status = peer.barrier("waits");
    if (rank == 0) {
      aborter.join();
      mark("stopped");
    }
    return expect_error(status, rank == 0 ? STRATA_DATA_LOSS : STRATA_CANCELLED, {"aborted: stop now"});
  });
}

using Make = std::function<strata_coll_item(float* memory)>;

void expect_refusal(decltype(strata_collective_api::all_gather) strata_collective_api::*slot, const Make& make,
                    const std::string& part) {
  run_ranks(mpi(), [&](Peer& peer, int rank) -> std::string {
    std::vector<float> memory(64);
    const auto good = item(memory.data(), memory.data() + 32, 4, STRATA_F32, STRATA_F32);
    const Status status = peer.call(peer.api->*slot, {rank == 1 ? make(memory.data()) : good}, 1, "bad");
    if (rank != 1) return expect_error(status, STRATA_FAILED_PRECONDITION, {"rank 1", "gave up", part});
    RETURN_IF_BAD(expect_error(status, STRATA_INVALID_ARGUMENT, {"[bad]: item 0", part}));
    return expect_error(peer.barrier("later"), STRATA_INVALID_ARGUMENT, {part});
  });
}

TEST(MpiFailure, WrongItemsAreRefusedAndToldToOthers) {
  using Api = strata_collective_api;
  expect_refusal(
      &Api::all_gather, [](float* m) { return item(m, m + 32, uint64_t{1} << 62, STRATA_F32, STRATA_F32); }, "64 bits");
  expect_refusal(
      &Api::all_gather, [](float* m) { return item(m, m + 32, 4, STRATA_F32, STRATA_BF16); }, "must be the same");
  expect_refusal(
      &Api::all_gather, [](float* m) { return item(m, m + 32, 4, 99, 99); }, "unknown dtype");
  expect_refusal(
      &Api::all_reduce, [](float* m) { return item(m, m + 32, 4, STRATA_F64, STRATA_F64); }, "f32, bf16 and f16");
  expect_refusal(
      &Api::all_reduce, [](float* m) { return item(m, m + 1, 4, STRATA_F32, STRATA_F32); }, "overlap");
  expect_refusal(
      &Api::reduce_scatter, [](float* m) { return item(m, nullptr, 4, STRATA_F32, STRATA_F32); },
      "NULL or not aligned");
}

// A second instance has messages of its own, and one that failed does not stand in its way.
TEST(MpiFailure, InstancesAreApart) {
  run_ranks(mpi(), [](Peer& first, int rank) -> std::string {
    Peer second(mpi(), rank, "second");
    RETURN_IF_BAD(expect_ok(second.open()));
    if (rank == 0) first.api->abort(first.comm, STRATA_CANCELLED, "only the first");
    RETURN_IF_BAD(expect_error(first.barrier(), STRATA_CANCELLED, {"only the first"}));
    for (int k = 0; k < 10; ++k) RETURN_IF_BAD(expect_ok(gather(second, 1000)));
    return "";
  });
}

// ---- who am I ----

std::string open_error(const std::function<void(strata_open_args&)>& change, strata_status code,
                       const std::vector<std::string>& parts) {
  Peer peer(mpi(), mpi_rank(), "refused");
  strata_open_args args = peer.base;
  change(args);
  return expect_error(peer.open_with(args), code, parts);
}

TEST(MpiIdentity, RanksThatAreThreadsAreRefused) {
  EXPECT_EQ(open_error([](strata_open_args& a) { a.threads = 1; }, STRATA_INVALID_ARGUMENT, {"threads", "comm_local"}),
            "");
}

TEST(MpiIdentity, OneThreadAloneIsAWorldOfItsOwn) {
  Peer peer({"comm_mpi", true, 1}, 0, "alone");
  ASSERT_EQ(expect_ok(peer.open()), "");
  EXPECT_EQ(expect_ok(gather(peer, 1 + static_cast<uint64_t>(mpi_rank()))), "") << "other counts on other ranks";
}

TEST(MpiIdentity, AnotherRankThanMpisIsRefused) {
  EXPECT_EQ(open_error([](strata_open_args& a) { a.rank = a.world = 7; }, STRATA_INVALID_ARGUMENT,
                       {"rank 7 of 7", "rank " + std::to_string(mpi_rank()) + " of " + std::to_string(mpi_world())}),
            "");
}

TEST(MpiIdentity, ALauncherThatMpiDoesNotKnowIsRefused) {
  ::setenv("WORLD_SIZE", "64", 1);
  ::setenv("RANK", "3", 1);
  EXPECT_EQ(open_error([](strata_open_args&) {}, STRATA_FAILED_PRECONDITION, {"WORLD_SIZE=64", "mpirun"}), "");
  ::unsetenv("WORLD_SIZE");
  ::unsetenv("RANK");
}

TEST(MpiIdentity, RankAndJobComeFromMpi) {
  Peer peer(mpi(), mpi_rank(), "unused");
  strata_open_args args = peer.base;
  args.rank = args.world = args.local_rank = args.local_world = -1;
  args.job = nullptr;
  ASSERT_EQ(expect_ok(peer.open_with(args)), "");
  strata_collective_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_EQ(expect_ok(take_failure(peer.api->caps(peer.comm, &caps))), "");
  EXPECT_EQ(caps.rank, mpi_rank());
  EXPECT_EQ(caps.world, mpi_world());
  EXPECT_EQ(caps.local_rank, mpi_rank());
  EXPECT_EQ(caps.local_world, mpi_world());
  EXPECT_NE(std::string(caps.job), "");
  EXPECT_EQ(caps.flags, STRATA_COLL_FIXED_ORDER | STRATA_COLL_ANY_MEMORY | STRATA_COLL_ANY_OUTPUT);
}

TEST(MpiIdentity, ForkedChildIsRefusedAndHarmsNobody) {
  run_ranks(mpi(), [](Peer& peer, int) -> std::string {
    const pid_t child = ::fork();
    if (child == 0) {
      const std::string said = expect_error(peer.barrier(), STRATA_FAILED_PRECONDITION, {"forked"});
      peer.close();
      ::_exit(said.empty() ? 0 : 1);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (status != 0) return "the child was not refused";
    return expect_ok(gather(peer, 100));
  });
}

// ---- more bytes than an int counts ----

uint64_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  uint64_t kib = 0;
  while (meminfo >> word) {
    if (word == "MemAvailable:" && meminfo >> kib) return kib << 10;
  }
  return 0;
}

TEST(MpiLarge, SlicesBeyondTwoGibibytes) {
  const uint64_t slice = (uint64_t{1} << 31) + 4099;
  // Rank 0 decides for all: every rank has a share of the output, and MPI may keep copies.
  const bool fits = available_bytes() > slice * static_cast<uint64_t>(mpi_world()) * 3 / 2 + (uint64_t{1} << 30);
  if (mpi_rank() == 0 && fits) mark("fits");
  if (mpi_rank() == 0) mark("decided");
  ASSERT_TRUE(wait_for_mark("decided", 0));
  if (!std::filesystem::exists(results() / "fits.0")) GTEST_SKIP() << "not enough memory is free";
  run_ranks(mpi(), [&](Peer& peer, int rank) -> std::string {
    auto* memory = peer.alloc<uint8_t>(slice);
    const std::vector<uint64_t> places = {
        0, 1, (uint64_t{1} << 30) - 1, uint64_t{1} << 30, (uint64_t{1} << 31) - 1, uint64_t{1} << 31, slice - 1};
    if (rank == 1) {
      for (uint64_t at : places) memory[at] = static_cast<uint8_t>(at % 251 + 1);
    }
    strata_coll_args args = peer.args({}, 1, "large");
    const strata_coll_item one = item(memory, memory, slice, STRATA_U8, STRATA_U8);
    args.items = &one;
    args.item_count = 1;
    args.root = 1;
    RETURN_IF_BAD(expect_ok(take_failure(peer.api->broadcast(peer.comm, &args, nullptr))));
    for (uint64_t at : places) {
      if (memory[at] != at % 251 + 1) return "byte " + std::to_string(at) + " is wrong";
    }
    return "";
  });
}

// ---- who owns MPI ----

TEST(MpiHost, Multiple) {
  int initialised = 0;
  MPI_Initialized(&initialised);
  ASSERT_TRUE(initialised) << "main() has initialised MPI";
  run_ranks(mpi(), [](Peer& peer, int) { return expect_ok(gather(peer, 1000)); });
  int finalised = 1;
  MPI_Finalized(&finalised);
  EXPECT_FALSE(finalised) << "closing has finalised the host's MPI";
  EXPECT_EQ(MPI_Barrier(MPI_COMM_WORLD), MPI_SUCCESS);
}

TEST(MpiHost, Funneled) {
  EXPECT_EQ(open_error([](strata_open_args&) {}, STRATA_FAILED_PRECONDITION, {"by the host", "MPI_THREAD_MULTIPLE"}),
            "");
}

// ---- the end, whatever has failed ----

TEST(MpiExit, AbsentAtOpen) {
  Peer peer(mpi(), mpi_rank(), "late");
  strata_open_args args = peer.base;
  args.deadline_ns = 500'000'000;
  if (mpi_rank() == 1) {
    ASSERT_TRUE(wait_for_mark("gave_up", 0));
    return;
  }
  const Status status = peer.open_with(args);
  mark("gave_up");
  EXPECT_EQ(expect_error(status, STRATA_DEADLINE_EXCEEDED, {"waited 0.500 s"}), "");
  EXPECT_EQ(expect_error(peer.open_with(args), STRATA_FAILED_PRECONDITION, {"end the process"}), "");
}

// Rank 1 never comes and never ends by itself: rank 0 fails by its deadline and exits, and mpirun ends the rest.
TEST(MpiExit, AbsentForEver) {
  static Peer peer(mpi(), mpi_rank(), "hangs");  // rank 0 also shows that an instance may be left open
  ASSERT_EQ(expect_ok(peer.open()), "");
  if (mpi_rank() == 1) {
    std::ofstream(results() / "1") << "passed\n";
    for (;;) ::pause();
  }
  EXPECT_EQ(expect_error(peer.barrier("end", 200'000'000), STRATA_DEADLINE_EXCEEDED, {"missing: rank 1"}), "");
}

// A transfer that stops half way, because a rank does: it fails by the deadline, and nothing is opened after it.
TEST(MpiExit, StoppedInTransfer) {
  Peer peer(mpi(), mpi_rank(), "stops");
  ASSERT_EQ(expect_ok(peer.open()), "");
  const uint64_t count = 50'000'000;
  std::vector<float> in(count), out(count * 2);
  strata_coll_args args = peer.args({}, 1, "large");
  const strata_coll_item one = item(in.data(), out.data(), count, STRATA_F32, STRATA_F32);
  args.items = &one;
  args.item_count = 1;
  args.deadline_ns = 1'000'000'000;
  if (mpi_rank() == 1) {
    std::ofstream(results() / "1") << "passed\n";
    std::ofstream(results() / "pid") << ::getpid();
    mark("ready");
    for (;;) (void)peer.api->all_gather(peer.comm, &args, nullptr);
  }
  ASSERT_TRUE(wait_for_mark("ready", 1));
  pid_t other = 0;
  std::ifstream(results() / "pid") >> other;
  std::thread stopper([other] {
    std::this_thread::sleep_for(milliseconds(300));
    ::kill(other, SIGSTOP);
  });
  strata_status code = STRATA_OK;
  while (code == STRATA_OK) code = peer.api->all_gather(peer.comm, &args, nullptr);
  const Status status = take_failure(code);
  stopper.join();
  ::kill(other, SIGCONT);
  EXPECT_EQ(expect_error(status, STRATA_DEADLINE_EXCEEDED, {"all_gather [large]", "waited 1.000 s"}), "");
  peer.close();
}

}  // namespace

// Writes the verdict and waits for the others to have theirs.
void tell(bool passed) {
  const std::string own = std::to_string(mpi_rank());
  std::ofstream(results() / (own + ".new")) << (passed ? "passed" : "failed") << "\n";
  std::filesystem::rename(results() / (own + ".new"), results() / own);
  for (int k = 0; k < 20'000; ++k) {
    bool all = true;
    for (int r = 0; r < mpi_world(); ++r) all = all && std::filesystem::exists(results() / std::to_string(r));
    if (all) return;
    std::this_thread::sleep_for(milliseconds(1));
  }
}

}  // namespace strata::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  const char* init = std::getenv("STRATA_TEST_MPI_INIT");
  if (init) {
    int level = 0;
    const bool multiple = std::string(init) == "multiple";
    MPI_Init_thread(&argc, &argv, multiple ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED, &level);
  }
  const int failed = RUN_ALL_TESTS();
  const bool none = testing::UnitTest::GetInstance()->test_to_run_count() == 0;
  strata::test::tell(failed == 0 && !none);
  if (init) MPI_Finalize();
  return failed;
}
