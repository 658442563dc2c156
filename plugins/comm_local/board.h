// board.h - the control area of a job: who has come, who is where, and who failed.
//
// One Area lies in memory all ranks share (a memfd between processes, plain memory between threads). Each rank has a
// seat, written by its owner only; the others read it. No lock crosses ranks, so a rank killed at any point leaves
// nothing held. Ranks move in steps: sync() publishes "I reached step n" and waits until every seat says so. What a
// rank wrote before its sync is seen by all after theirs (sequentially consistent stores and loads of `step`).
//
// Waiting: spin for a moment when every rank can have a core, then sleep on the bell, a futex word. Whoever
// completes a step, fails or leaves rings it. Sleeps are cut into slices of 10 ms, after which the missing ranks are
// looked at: dead (their pidfd is readable; a zombie counts), left, stopped, or just late until the deadline.
//
// Failure: the first error of a rank is kept and returned for ever, and published on its seat, so that the others take
// it over at their next look. The board of a part also publishes it on the board of the whole, and looks there.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "collective_kit/post.h"
#include "io/fd.h"
#include "plugin_kit/deadline.h"
#include "plugin_kit/error.h"

namespace comm_local {

using strata::io::Fd;
using strata::plugin_kit::Deadline;
using strata::plugin_kit::Error;

constexpr int kMaxRanks = 64;

// Where bytes of some rank lie: byte `offset` of the chunk that starts at `chunk` (a file offset between processes, an
// address between threads). See memory.h.
struct Place {
  uint64_t chunk = 0;
  uint64_t chunk_bytes = 0;
  uint64_t offset = 0;
};

struct Post : strata::collective_kit::Post {
  Place table;    // the items, in the rank's own shared memory
  Place scratch;  // all_reduce only
};

struct alignas(64) SharedSeat {
  std::atomic<uint32_t> step;
  std::atomic<uint32_t> pid;     // 0 until the rank has come
  std::atomic<uint32_t> left;    // 1: closed
  std::atomic<uint32_t> failed;  // 1: code and text are complete
  std::atomic<uint64_t> calls;   // collectives begun
  std::atomic<uint64_t> frees;   // chunks freed; others then drop what they mapped
  int32_t code;
  char text[1020];
  cpu_set_t cpus;  // where the rank may run
  Post posts[2];   // by parity of the call
};

struct Area {
  alignas(64) std::atomic<uint32_t> bell;
  std::atomic<uint32_t> sleepers;
  SharedSeat seats[kMaxRanks];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

// One rank's view of the area.
class Board {
 public:
  // `pidfds` has one entry per rank, -1 where a rank cannot be watched (threads, or the kernel has no pidfd).
  Board(Area* area, int rank, int world);
  // The board of a part of `whole`'s ranks: one fails when the other does, and ranks keep their names.
  void belong_to(Board* whole, const std::vector<int>& members);
  void watch(std::vector<Fd> pidfds) { pidfds_ = std::move(pidfds); }

  void come();  // takes the seat
  // After the first sync: decides about spinning, which helps only while every rank can run at once; with more ranks
  // than cores it would keep the others from arriving. A launcher may have bound each rank to a core of its own, so the
  // cores of all ranks count together.
  void settle();
  void leave();
  bool has_come(int rank) const { return seat(rank).pid.load() != 0; }

  // Waits until every rank has made as many sync calls. `what` opens the text of an error.
  Error sync(const std::string& what, const Deadline& deadline);

  // Keeps the first error and tells the other ranks; returns the one that is kept. [any thread]
  Error fail(const Error& mine, const Error& others);
  Error fail(const Error& both) { return fail(both, both); }
  // This rank's kept error, or the one another rank published. [any thread]
  Error failure();
  // The same, and whether a rank has died; where nobody waits in a step.
  Error look(const std::string& what);

  SharedSeat& mine() { return area_->seats[rank_]; }
  const SharedSeat& seat(int rank) const { return area_->seats[rank]; }
  // In errors: the rank's number in the instance that was opened, and with its process, "rank 2 (pid 4711)".
  int number(int rank) const { return numbers_.empty() ? rank : numbers_[static_cast<size_t>(rank)]; }
  std::string who(int rank) const;
  int rank() const { return rank_; }
  int world() const { return world_; }

 private:
  bool all_reached(uint32_t step) const;
  bool reached(int rank, uint32_t step) const;
  bool spin(uint32_t step) const;
  void ring();
  void sleep(uint32_t bell, int64_t ns);
  Error look_at_missing(uint32_t step, const std::string& what, bool deadline_passed, const Deadline& deadline);
  std::vector<bool> dead() const;

  Area* area_;
  int rank_;
  int world_;
  uint32_t step_ = 0;
  bool may_spin_ = false;
  std::vector<Fd> pidfds_;
  Board* whole_ = nullptr;
  std::vector<int> numbers_;
  std::mutex mutex_;  // guards failure_ and the writing of our seat's text
  Error failure_;
};

}  // namespace comm_local
