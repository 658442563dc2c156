// meeting.h - how the ranks of a job find each other, once, in open.
//
// Threads meet in a registry of this process, by job name. Processes meet at rank 0, which binds an abstract Unix
// socket whose name has the user and the job in it; such a name vanishes with its process, and nothing is ever on disk.
// Rank 0 keeps the name bound until it closes, so a second job of that name is told so.
//
//   rank r                                   rank 0
//   connect, retried until the deadline      bind, listen, make the area
//   hello: rank, world, own memfd      ->    check user, world, that the seat is free
//   seated: the area (who has come)    <-    at once
//   welcome: all memfds and pidfds     <-    when the last rank is there
//
// An instance that is split meets again in the same way, each part under a name of its own.
//
// Both ends drop the connection then: from there on a death shows in the pidfd. Rank 0 makes all pidfds, while the
// connection proves that the process it names is still the one that called.
#pragma once

#include <memory>

#include "board.h"
#include "env.h"
#include "memory.h"

namespace comm_local {

// Being part of a job; the destructor leaves it.
class Membership {
 public:
  virtual ~Membership() = default;
  // Keeps memory that other ranks of this process may still be reading, until they have left too.
  virtual void keep(std::vector<Mapping> /*memory*/) {}
};

// What a rank has after the meeting. Members are destroyed bottom up: the area outlives the board.
struct Met {
  std::unique_ptr<Membership> membership;
  std::unique_ptr<Board> board;
  Memory memory;
  // Of a part: the board of the instance that was split, whose ranks are watched meanwhile, and who of them is here.
  Board* whole = nullptr;
  std::vector<int> members;

  void take_board(Area* area, const Identity& id);
};

Error meet_alone(const Identity& id, Met* out);
Error meet_threads(const Identity& id, const Deadline& deadline, Met* out);
Error meet_processes(const Identity& id, const Deadline& deadline, Met* out);

}  // namespace comm_local
