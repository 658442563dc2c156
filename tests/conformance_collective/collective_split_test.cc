// split: parts of the world as instances of their own, which keep the ranks' names in errors and share one fate.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "ranks.h"

namespace strata::test {
namespace {

class CollectiveSplit : public CollectiveTest {};
class CollectiveSplitAlone : public CollectiveTest {};
INSTANTIATE_TEST_SUITE_P(All, CollectiveSplit, testing::ValuesIn(all_setups({4})),
                         [](const auto& p) { return setup_name(p.param); });
INSTANTIATE_TEST_SUITE_P(All, CollectiveSplitAlone, testing::ValuesIn(all_setups({1})),
                         [](const auto& p) { return setup_name(p.param); });

Status split(Peer& peer, int32_t colour, int32_t key, strata_comm** out, int64_t deadline_ns = -1) {
  strata_coll_args args = peer.args({}, 77, "split");
  args.deadline_ns = deadline_ns;
  *out = nullptr;
  return take_failure(peer.api->split(peer.comm, colour, key, &args, out));
}

// The same, and every rank's part is there.
Status split_all(Peer& peer, int32_t colour, strata_comm** out) {
  const Status status = split(peer, colour, 0, out);
  return status.ok() ? peer.barrier("parts are there") : status;
}

// While it lives, the peer's calls go to the part, which it closes.
class InPart {
 public:
  InPart(Peer& peer, strata_comm* part) : peer_(peer), other_(part), mirror_(peer.make_mirror()) { swap(); }
  ~InPart() {
    peer_.close();
    swap();
  }
  InPart(const InPart&) = delete;
  strata_collective_caps caps() const {
    strata_collective_caps caps{};
    caps.struct_size = sizeof(caps);
    (void)peer_.api->caps(peer_.comm, &caps);
    return caps;
  }
  // The peer's calls go to the whole, and with the next swap to the part again.
  void swap() {
    std::swap(peer_.comm, other_);
    std::swap(peer_.mirror, mirror_);
    if (peer_.comm) peer_.base.world = caps().world;
  }

 private:
  Peer& peer_;
  strata_comm* other_;
  std::unique_ptr<Mirror> mirror_;
};

// The ranks of the part, in its order, as a gather and an exchange find them.
std::string members(Peer& peer, int rank, const std::vector<int>& expected) {
  const auto world = static_cast<size_t>(peer.base.world);
  std::vector<float> gathered(world);
  auto* in = peer.alloc<float>(1);
  *in = static_cast<float>(rank);
  RETURN_IF_BAD(
      expect_ok(peer.call(peer.api->all_gather, {item(in, gathered.data(), 1, STRATA_F32, STRATA_F32)}, 5, "members")));
  std::vector<int32_t> exchanged(world);
  const int32_t mine = rank;
  const strata_coll_args args = peer.args({}, 6, "exchange");
  RETURN_IF_BAD(expect_ok(take_failure(peer.api->exchange(peer.comm, &mine, exchanged.data(), sizeof(mine), &args))));
  if (std::vector<int>(exchanged.begin(), exchanged.end()) != expected) return "other ranks in the exchange";
  for (size_t r = 0; r < world; ++r) {
    if (static_cast<int>(gathered[r]) != expected[r]) return "other ranks in the gather";
  }
  return "";
}

TEST_P(CollectiveSplit, PartsAreRankedByKeyAndThenByRank) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    struct Case {
      int32_t colour, key;
      std::vector<int> members;
    };
    const std::vector<int> evens = {0, 2}, odds = {3, 1};
    for (const Case& c :
         {Case{rank % 2, rank % 2 ? -rank : 7, rank % 2 ? odds : evens},
          Case{rank == 1 ? 1'000'000 : -5, 0, rank == 1 ? std::vector<int>{1} : std::vector<int>{0, 2, 3}},
          Case{0, rank == 3 ? -1 : 0, {3, 0, 1, 2}}}) {
      strata_comm* part = nullptr;
      RETURN_IF_BAD(expect_ok(split(peer, c.colour, c.key, &part)));
      InPart in(peer, part);
      const strata_collective_caps caps = in.caps();
      if (caps.world != static_cast<int>(c.members.size()) || c.members[static_cast<size_t>(caps.rank)] != rank) {
        return "rank " + std::to_string(caps.rank) + " of " + std::to_string(caps.world);
      }
      RETURN_IF_BAD(members(peer, rank, c.members));
    }
    return members(peer, rank, {0, 1, 2, 3});  // the whole is as it was
  });
}

TEST_P(CollectiveSplit, PartsWorkByThemselvesBesideTheWhole) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    strata_comm* part = nullptr;
    RETURN_IF_BAD(expect_ok(split(peer, rank / 2, rank, &part)));
    InPart in(peer, part);
    float sum = 0;
    for (int call = 0; call < (rank < 2 ? 1 : 5); ++call) {
      auto* mine = peer.alloc<float>(2);
      float out[2];
      mine[0] = static_cast<float>(rank + 1);
      mine[1] = static_cast<float>(call);
      RETURN_IF_BAD(
          expect_ok(peer.call(peer.api->all_reduce, {item(mine, out, 2, STRATA_F32, STRATA_F32)}, 3, "reduce")));
      sum += out[0];
    }
    in.swap();
    RETURN_IF_BAD(members(peer, rank, {0, 1, 2, 3}));
    in.swap();
    return sum == (rank < 2 ? 3.0f : 35.0f)
               ? members(peer, rank, rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3})
               : "sum " + std::to_string(sum);
  });
}

// Ranks leave a part while others are still on their way out of it; nobody waits for anybody, so nothing is wrong.
TEST_P(CollectiveSplit, LeavingAPartHarmsNobody) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    for (int again = 0; again < 20; ++again) {
      strata_comm* part = nullptr;
      RETURN_IF_BAD(expect_ok(split(peer, rank % 2, 0, &part)));
      const InPart in(peer, part);
      RETURN_IF_BAD(expect_ok(peer.barrier("in the part")));
    }
    return expect_ok(peer.barrier("of all"));
  });
}

TEST_P(CollectiveSplit, APartCanBeSplitAgain) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    strata_comm *part = nullptr, *smaller = nullptr;
    RETURN_IF_BAD(expect_ok(split(peer, rank == 0, 0, &part)));
    InPart in(peer, part);
    RETURN_IF_BAD(expect_ok(split(peer, rank == 2, -rank, &smaller)));
    const InPart deeper(peer, smaller);
    if (rank == 0 || rank == 2) return members(peer, rank, {rank});
    return members(peer, rank, {3, 1});
  });
}

TEST_P(CollectiveSplitAlone, IsAPartOfOne) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    strata_comm* part = nullptr;
    RETURN_IF_BAD(expect_ok(split(peer, 3, 4, &part)));
    {
      const InPart in(peer, part);
      RETURN_IF_BAD(members(peer, rank, {0}));
      peer.api->abort(part, STRATA_DATA_LOSS, "enough");
      RETURN_IF_BAD(expect_error(peer.barrier(), STRATA_DATA_LOSS, {"enough"}));
    }
    return expect_error(peer.barrier(), STRATA_DATA_LOSS, {"enough"});
  });
}

// ---- failures ----

TEST_P(CollectiveSplit, ErrorsNameRanksAsTheWholeDoes) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    strata_comm* part = nullptr;
    RETURN_IF_BAD(expect_ok(split(peer, rank % 2, -rank, &part)));
    RETURN_IF_BAD(expect_ok(peer.barrier("parts are there")));
    const InPart in(peer, part);
    std::vector<float> out(32);
    const uint64_t count = rank == 1 ? 8 : 4;  // ranks 3 and 1 are a part
    Status status = peer.call(peer.api->all_gather,
                              {item(peer.alloc<float>(8), out.data(), count, STRATA_F32, STRATA_F32)}, 1, "gather");
    if (rank % 2) return expect_error(status, STRATA_FAILED_PRECONDITION, {"rank 3 is in", "rank 1 in", "gather"});
    while (status.ok()) status = peer.barrier("next");
    return expect_error(status, STRATA_FAILED_PRECONDITION, {"rank 3 is in", "rank 1 in"});
  });
}

// Rank 0 aborts its part. Rank 1 waits in the other one for rank 3, which does not come before all have failed.
TEST_P(CollectiveSplit, AnAbortOfOnePartEndsAll) {
  SharedCount failed;
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    strata_comm* part = nullptr;
    RETURN_IF_BAD(expect_ok(split_all(peer, rank % 2, &part)));
    InPart in(peer, part);
    if (rank == 0) peer.api->abort(part, STRATA_DATA_LOSS, "shard 3 cannot be read");
    if (rank == 3) failed.wait_for(2);
    Status status;
    while (status.ok()) status = peer.barrier("in the part");  // the news may be on its way
    failed.add();
    const strata_status code = rank == 0 ? STRATA_DATA_LOSS : STRATA_CANCELLED;
    RETURN_IF_BAD(expect_error(status, code, {"aborted", "shard 3 cannot be read"}));
    in.swap();
    const std::string whole = expect_error(peer.barrier("of all"), code, {"shard 3 cannot be read"});
    in.swap();
    return whole;
  });
}

TEST_P(CollectiveSplit, AnAbortOfTheWholeEndsItsParts) {
  SharedCount failed;
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    strata_comm *part = nullptr, *whole = peer.comm;
    RETURN_IF_BAD(expect_ok(split_all(peer, rank % 2, &part)));
    const InPart in(peer, part);
    if (rank == 0) peer.api->abort(whole, STRATA_CANCELLED, "stop now");
    if (rank == 3) failed.wait_for(2);
    Status status;
    while (status.ok()) status = peer.barrier("in the part");  // the news may be on its way
    failed.add();
    return expect_error(status, STRATA_CANCELLED, {"aborted", "stop now"});
  });
}

TEST_P(CollectiveSplit, ARankThatLeavesAPartEndsAllThatWait) {
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    strata_comm* part = nullptr;
    RETURN_IF_BAD(expect_ok(split_all(peer, rank % 2, &part)));
    const InPart in(peer, part);
    if (rank == 3) return "";
    Status status;
    while (status.ok()) status = peer.barrier("in the part");  // of rank 1: the first
    return expect_error(status, STRATA_UNAVAILABLE, {"rank 3", "closed"});
  });
}

TEST_P(CollectiveSplit, ARankThatDoesNotSplitIsNamed) {
  SharedCount failed;
  run_ranks(GetParam(), [&](Peer& peer, int rank) -> std::string {
    strata_comm* part = nullptr;
    if (rank == 2) failed.wait_for(3);
    const Status status = split(peer, 0, 0, &part, rank == 2 ? -1 : 300'000'000);
    failed.add();
    return expect_error(status, STRATA_DEADLINE_EXCEEDED, {"[split]", "waited 0.300 s", "rank 2"});
  });
}

TEST_P(CollectiveSplit, ARankInAnotherCallIsNamed) {
  run_ranks(GetParam(), [](Peer& peer, int rank) -> std::string {
    strata_comm* part = nullptr;
    const Status status = rank == 2 ? peer.barrier("end of step") : split(peer, 0, 0, &part);
    return expect_error(status, STRATA_FAILED_PRECONDITION, {"[split]", "rank 2 in barrier [end of step]"});
  });
}

// Rank 3 is killed. Rank 1, which waits for it, sees that; ranks 0 and 2 are in a part without it.
TEST(CollectiveSplitDeath, AKilledRankEndsAllParts) {
  const std::string job = fresh_job();
  Processes ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.start([&, r](Processes& self) -> std::string {
      Peer peer({"comm_local", false, 4}, r, job);
      RETURN_IF_BAD(expect_ok(peer.open()));
      strata_comm* part = nullptr;
      RETURN_IF_BAD(expect_ok(split(peer, r % 2, 0, &part)));
      const InPart in(peer, part);
      for (int n = 0;; ++n) {
        const Status s = peer.barrier("in the part");
        if (!s.ok()) return std::string(status_name(s.code())) + ": " + s.text();
        if (n == 2) self.say("working");
      }
    });
  }
  for (int r = 0; r < 4; ++r) ASSERT_EQ(ranks.line(r), "working");
  ranks.signal(3, SIGKILL);
  for (int r = 0; r < 3; ++r) {
    const std::string line = ranks.line(r);
    for (const char* part : {"UNAVAILABLE", "rank 3", "died"}) EXPECT_NE(line.find(part), std::string::npos) << line;
  }
}

// The ranks of rank 3's part wait for it to meet; those of the other part are through.
TEST(CollectiveSplitDeath, ARankKilledWhilePartsMeetIsNamed) {
  for (int dead : {0, 2}) {  // rank 0 of its part, and a guest
    const std::string job = fresh_job();
    Processes ranks;
    for (int r = 0; r < 3; ++r) {
      ranks.start([&, r](Processes& self) -> std::string {
        Peer peer({"comm_local", false, 3}, r, job);
        RETURN_IF_BAD(expect_ok(peer.open()));
        self.say("open");
        if (r == dead) {
          // Takes part in the exchange of wishes and is gone.
          struct {
            int32_t colour, key;
          } mine = {0, 0}, all[3];
          const strata_coll_args args = peer.args({}, 77, "split");
          (void)take_failure(peer.api->exchange(peer.comm, &mine, all, sizeof(mine), &args));
          ::raise(SIGKILL);
        }
        strata_comm* part = nullptr;
        const Status s = split(peer, 0, 0, &part);
        return std::string(status_name(s.code())) + ": " + s.text();
      });
    }
    for (int r = 0; r < 3; ++r) {
      ASSERT_EQ(ranks.line(r), "open");
    }
    for (int r = 0; r < 3; ++r) {
      if (r == dead) continue;
      const std::string line = ranks.line(r);
      for (const std::string& part :
           {std::string("UNAVAILABLE"), "rank " + std::to_string(dead), std::string("died")}) {
        EXPECT_NE(line.find(part), std::string::npos) << line;
      }
    }
  }
}

}  // namespace
}  // namespace strata::test
