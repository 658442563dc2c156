// What happens when ranks differ, die, stop, leave or give up: every other rank gets a named error, and soon.
//
// "Soon" is tested without clocks: the instance's deadline is 20 s and the error must not be DEADLINE_EXCEEDED, and the
// whole test has a time limit. Where the deadline itself is under test it is given to the call.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "ranks.h"

namespace strata::test {
namespace {

using Slot = Peer::Slot;

class CollectiveFailure : public CollectiveTest {};
INSTANTIATE_TEST_SUITE_P(All, CollectiveFailure, testing::ValuesIn(all_setups({3})),
                         [](const auto& p) { return setup_name(p.param); });

// One gather of `count` floats per rank.
Status gather(Peer& peer, uint64_t count, uint64_t tag = 1, const char* label = "gather layer3") {
  static thread_local std::vector<float> out;
  out.resize(count * static_cast<uint64_t>(peer.base.world));
  return peer.call(peer.api->all_gather, {item(peer.alloc<float>(count), out.data(), count, STRATA_F32, STRATA_F32)},
                   tag, label);
}

std::string sticky(Peer& peer, strata_status code, const std::string& part) {
  RETURN_IF_BAD(expect_error(peer.barrier("later"), code, {part}));
  return expect_error(gather(peer, 4), code, {part});
}

// ---- ranks that differ ----

TEST_P(CollectiveFailure, OtherOperationIsNamedOnEveryRank) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    RETURN_IF_BAD(expect_ok(peer.barrier()));
    Status status;
    if (rank == 1) {
      std::vector<float> out(8);
      auto* in = peer.alloc<float>(24);
      status = peer.call(peer.api->reduce_scatter, {item(in, out.data(), 8, STRATA_F32, STRATA_F32)}, 9, "grad layer3");
    } else {
      status = gather(peer, 8);
    }
    RETURN_IF_BAD(expect_error(status, STRATA_FAILED_PRECONDITION,
                               {"call 2: rank 0 is in all_gather [gather layer3] (96 bytes, tag 0x1), rank 1 in "
                                "reduce_scatter [grad layer3] (96 bytes, tag 0x9)"}));
    return sticky(peer, STRATA_FAILED_PRECONDITION, "call 2: rank 0");
  });
}

TEST_P(CollectiveFailure, OtherTagBytesItemsOrDtypesAreNamed) {
  struct Case {
    uint64_t tag, count, items;
    strata_dtype dtype;
    const char* part;
  };
  for (const Case& odd : {Case{2, 8, 1, STRATA_F32, "tag 0x2"}, Case{1, 16, 1, STRATA_F32, "16 x f32"},
                          Case{1, 8, 2, STRATA_F32, "in 2 items"}, Case{1, 16, 1, STRATA_BF16, "16 x bf16 to bf16"}}) {
    run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
      const Case mine = rank == 2 ? odd : Case{1, 8, 1, STRATA_F32, ""};
      std::vector<std::vector<char>> outs;
      std::vector<strata_coll_item> items;
      for (uint64_t k = 0; k < mine.items; ++k) {
        outs.emplace_back(mine.count * 12);
        items.push_back(item(peer.alloc<char>(mine.count * 4), outs.back().data(), mine.count, mine.dtype, mine.dtype));
      }
      return expect_error(peer.call(peer.api->all_gather, items, mine.tag), STRATA_FAILED_PRECONDITION,
                          {"rank 0 is in", "rank 2 in", odd.part});
    });
  }
}

TEST_P(CollectiveFailure, OtherRootIsNamed) {
  run_ranks(GetParam(), [](Peer& peer, int rank) {
    float out[4];
    const std::vector<strata_coll_item> items = {item(peer.alloc<float>(4), out, 4, STRATA_F32, STRATA_F32)};
    strata_coll_args args = peer.args(items, 1, "weights");
    args.root = rank == 1 ? 1 : 0;
    return expect_error(take_failure(peer.api->broadcast(peer.comm, &args, nullptr)), STRATA_FAILED_PRECONDITION,
                        {"root 0", "root 1"});
  });
}

// ---- wrong arguments ----

using Break = std::function<strata_coll_item(Peer&, float* out)>;

void expect_refusal(const Setup& setup, Slot strata_collective_api::*slot, const Break& make, const std::string& part) {
  run_ranks(setup, [&](Peer& peer, int rank) -> std::string {
    std::vector<float> out(64);
    strata_coll_item good = item(peer.alloc<float>(16), out.data(), 4, STRATA_F32, STRATA_F32);
    const strata_coll_item mine = rank == 1 ? make(peer, out.data()) : good;
    const Status status = peer.call(peer.api->*slot, {mine}, 1, "bad");
    if (rank != 1) return expect_error(status, STRATA_FAILED_PRECONDITION, {"rank 1", "gave up", part});
    RETURN_IF_BAD(expect_error(status, STRATA_INVALID_ARGUMENT, {"[bad]: item 0", part}));
    return sticky(peer, STRATA_INVALID_ARGUMENT, part);
  });
}

TEST_P(CollectiveFailure, WrongItemsAreRefusedAndToldToOthers) {
  using Api = strata_collective_api;
  expect_refusal(
      GetParam(), &Api::all_gather, [](Peer&, float* out) { return item(out + 32, out, 4, STRATA_F32, STRATA_F32); },
      "allocate it through the collective");
  expect_refusal(
      GetParam(), &Api::all_gather,
      [](Peer& p, float* out) { return item(p.alloc<float>(1024), out, 1025, STRATA_F32, STRATA_F32); },
      "allocate it through the collective");
  expect_refusal(
      GetParam(), &Api::all_gather,
      [](Peer& p, float* out) { return item(p.alloc<float>(4), out, uint64_t{1} << 62, STRATA_F32, STRATA_F32); },
      "64 bits");
  expect_refusal(
      GetParam(), &Api::all_gather,
      [](Peer& p, float* out) { return item(p.alloc<float>(4), out, 4, STRATA_F32, STRATA_BF16); }, "same");
  expect_refusal(
      GetParam(), &Api::all_gather, [](Peer& p, float* out) { return item(p.alloc<float>(4), out, 4, 99, 99); },
      "unknown dtype");
  expect_refusal(
      GetParam(), &Api::all_reduce,
      [](Peer& p, float* out) { return item(p.alloc<float>(8), out, 4, STRATA_F64, STRATA_F64); }, "f32, bf16 and f16");
  expect_refusal(
      GetParam(), &Api::all_reduce,
      [](Peer& p, float*) {
        auto* in = p.alloc<float>(8);
        return item(in, in + 1, 4, STRATA_F32, STRATA_F32);
      },
      "overlap");
  expect_refusal(
      GetParam(), &Api::all_to_all,
      [](Peer& p, float*) {
        auto* in = p.alloc<float>(12);
        return item(in, in, 4, STRATA_F32, STRATA_F32);
      },
      "overlap");
  expect_refusal(
      GetParam(), &Api::reduce_scatter,
      [](Peer& p, float*) { return item(p.alloc<float>(12), nullptr, 4, STRATA_F32, STRATA_F32); },
      "NULL or not aligned");
}

// ---- ranks that leave or give up ----

// A rank may be through with a call, and fail in the next, before another has noticed that the call is complete.
TEST_P(CollectiveFailure, ARankThatFailsNextDoesNotSpoilWhatIsComplete) {
  for (int round = 0; round < 100; ++round) {
    run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
      for (int call = 0; call < 3; ++call) {
        RETURN_IF_BAD(expect_ok(peer.barrier()));  // as is the opening
      }
      if (rank == 1) peer.api->abort(peer.comm, STRATA_ABORTED, "enough");
      return "";
    });
  }
}

TEST_P(CollectiveFailure, CloseWhileOthersWaitNamesTheRank) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    RETURN_IF_BAD(expect_ok(gather(peer, 1000)));
    if (rank == 2) {
      peer.close();
      return "";
    }
    RETURN_IF_BAD(
        expect_error(gather(peer, 1000), STRATA_UNAVAILABLE, {"call 2", "gather layer3", "rank 2", "closed"}));
    return sticky(peer, STRATA_UNAVAILABLE, "rank 2");
  });
}

// The last call of a rank that closes right after it must still succeed everywhere.
TEST_P(CollectiveFailure, CloseRightAfterACallHarmsNobody) {
  for (int again = 0; again < 20; ++again) {
    run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
      if (rank == again % 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      return expect_ok(gather(peer, 20'000));
    });
  }
}

TEST_P(CollectiveFailure, AbortWakesEveryRankWithItsText) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    RETURN_IF_BAD(expect_ok(peer.barrier()));
    if (rank == 0) {
      peer.api->abort(peer.comm, STRATA_DATA_LOSS, "shard 3 cannot be read");
      return sticky(peer, STRATA_DATA_LOSS, "shard 3 cannot be read");
    }
    RETURN_IF_BAD(expect_error(gather(peer, 4), STRATA_CANCELLED, {"rank 0", "aborted", "shard 3 cannot be read"}));
    return sticky(peer, STRATA_CANCELLED, "shard 3");
  });
}

// abort is for any thread, also while this rank sits in a collective that cannot end.
TEST_P(CollectiveFailure, AbortFromAnotherThreadEndsTheRunningCall) {
  SharedCount failed;
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    if (rank == 2) {  // comes when the others have given up, and is told why
      failed.wait_for(2);
      return expect_error(peer.barrier(), STRATA_CANCELLED, {"rank 0", "stop now"});
    }
    std::thread aborter;
    if (rank == 0) {
      aborter = std::thread([&peer] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        peer.api->abort(peer.comm, STRATA_CANCELLED, "stop now");
      });
    }
    const Status status = peer.barrier("waits");
    if (rank == 0) aborter.join();
    failed.add();
    return expect_error(status, STRATA_CANCELLED, {"stop now"});
  });
}

TEST_P(CollectiveFailure, DeadlineNamesTheMissingRank) {
  SharedCount failed;
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    RETURN_IF_BAD(expect_ok(peer.barrier()));
    if (rank == 1) {  // comes when the others have given up, and is told why
      failed.wait_for(2);
      return expect_error(peer.barrier(), STRATA_DEADLINE_EXCEEDED, {"rank 1", "missing"});
    }
    const Status status = peer.barrier("end of step", 200'000'000);
    failed.add();
    RETURN_IF_BAD(expect_error(status, STRATA_DEADLINE_EXCEEDED,
                               {"call 2, barrier [end of step]", "waited 0.200 s", "rank 1", "missing"}));
    return sticky(peer, STRATA_DEADLINE_EXCEEDED, "rank 1");
  });
}

// ---- processes that die or stop ----

const Setup kProcesses = {"comm_local", false, 3};

// Ranks that gather for ever, and say what ended it.
std::string gather_until_error(Processes& self, int rank, const std::string& job, uint64_t count) {
  Peer peer(kProcesses, rank, job);
  RETURN_IF_BAD(expect_ok(peer.open()));
  auto* in = peer.alloc<float>(count);
  std::vector<float> out(count * 3);
  for (uint64_t n = 0;; ++n) {
    const Status s = peer.call(peer.api->all_gather, {item(in, out.data(), count, STRATA_F32, STRATA_F32)});
    if (!s.ok()) return std::string(status_name(s.code())) + ": " + s.text();
    if (n == 2) self.say("gathering");
  }
}

void expect_line(const std::string& line, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(line.find(part), std::string::npos) << part << " is not in: " << line;
}

// Killed somewhere in a stream of gathers, small ones (mostly waiting) and large ones (mostly copying). The dead
// process is not reaped: a zombie counts as dead.
TEST(CollectiveDeath, KillNineIsNamedOnEveryRank) {
  for (uint64_t count : {uint64_t{64}, uint64_t{3'000'000}}) {
    for (int round = 0; round < 5; ++round) {
      const std::string job = fresh_job();
      Processes ranks;
      for (int r = 0; r < 3; ++r)
        ranks.start([&, r](Processes& self) { return gather_until_error(self, r, job, count); });
      for (int r = 0; r < 3; ++r) ASSERT_EQ(ranks.line(r), "gathering");
      std::this_thread::sleep_for(std::chrono::milliseconds(3 * round));
      ranks.signal(round % 3, SIGKILL);
      for (int r = 0; r < 3; ++r) {
        if (r == round % 3) continue;
        expect_line(ranks.line(r), {"UNAVAILABLE", "all_gather", "died", "rank " + std::to_string(round % 3),
                                    "pid " + std::to_string(ranks.pid(round % 3))});
      }
    }
  }
}

TEST(CollectiveDeath, StoppedRankIsNamedAtTheDeadline) {
  const std::string job = fresh_job();
  Processes ranks;
  for (int r = 0; r < 3; ++r) {
    ranks.start([&, r](Processes& self) -> std::string {
      Peer peer(kProcesses, r, job);
      RETURN_IF_BAD(expect_ok(peer.open()));
      self.say("open");
      while (true) {
        const Status s = peer.barrier("step", 400'000'000);
        if (!s.ok()) return std::string(status_name(s.code())) + ": " + s.text();
      }
    });
  }
  for (int r = 0; r < 3; ++r) ASSERT_EQ(ranks.line(r), "open");
  ranks.signal(1, SIGSTOP);
  for (int r : {0, 2}) expect_line(ranks.line(r), {"DEADLINE_EXCEEDED", "rank 1", "stopped", "barrier [step]"});
  ranks.signal(1, SIGCONT);
  expect_line(ranks.line(1), {"DEADLINE_EXCEEDED", "rank 1"});
}

// A forked child would speak for its parent: it is told so, and its end does not disturb the parent.
TEST(CollectiveDeath, ForkedChildIsRefusedAndHarmsNobody) {
  run_ranks({"comm_local", false, 2}, [](Peer& peer, int rank) -> std::string {
    if (rank == 0) {
      Processes child;
      const int index = child.start([&](Processes&) {
        const std::string said = expect_error(peer.barrier(), STRATA_FAILED_PRECONDITION, {"forked"});
        peer.close();
        return said;
      });
      RETURN_IF_BAD(child.line(index));
    }
    return expect_ok(peer.barrier());
  });
}

}  // namespace
}  // namespace strata::test
