// channel.h - the control messages of an instance: posts before each collective, failures, and leaving.
//
// Every message has one size and goes point to point, so that a rank knows whom it has not heard of; a collective of
// MPI's own could only say that somebody is missing. Each rank keeps one receive open per peer. Messages between two
// ranks do not overtake each other: a post that came before its sender's failure or leaving is seen before it. A peer
// may be one call ahead, never two, because its second call waits for our post; hence two places per peer.
//
// MPI has no wait with a limit, so every wait is a loop: test, look at the control messages, look at the clock, sleep.
//
// Failure: the first error of a rank is kept and returned for ever, and sent to the others, who keep it unless they
// have one. It is sent with the number of calls that went well: a rank that is still in one of these goes on with it,
// and fails in the next. A channel that failed leaves requests open; its memory must then outlive it (Process::keep).
//
// The channel of a part also fails when that of the whole does, and the other way round. Its waits for ranks look at
// both; a transfer under way is only cut short by the part's own failure, since all its ranks have come.
//
// Threads: everything is the collective thread's, but for fail() and failure(), which are any thread's.
#pragma once

#include <mpi.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "collective_kit/post.h"
#include "group.h"

namespace comm_mpi {

using strata::collective_kit::Op;

using Post = strata::collective_kit::ShownPost;

// Small enough to be sent eagerly by every transport: a sender never waits for a receiver.
struct Message {
  enum Kind : int32_t { kPost = 1, kFail, kLeave };
  int32_t kind;
  int32_t code;    // kFail
  uint64_t done;   // kFail: calls of the sender that went well
  Post post;       // kPost
  char text[488];  // kFail: why; the post of an open: the name of the machine
};
static_assert(sizeof(Message) <= 1024);

class Channel {
 public:
  // `whole`: of what this is a part; it outlives this.
  explicit Channel(const Group& group, Channel* whole = nullptr);
  // Opens the receives and makes the first meeting: nobody is used before everybody is there.
  Error open(const Deadline& deadline);

  // Posts, waits until every rank has posted the same call, and compares. `what` opens the text of an error.
  Error meet(const Post& mine, const std::string& what, const Deadline& deadline);
  // Waits until all requests are done, and empties the vector. After an error they are left under way.
  Error finish(std::vector<MPI_Request>* requests, const std::string& what, const Deadline& deadline);

  // The call that meet() began has gone well.
  void complete() { done_.store(call_ + 1); }

  // Keeps the first error and tells the other ranks; returns the one that is kept. [any thread]
  Error fail(const Error& mine, const Error& others);
  Error fail(const Error& both) { return fail(both, both); }
  Error failure();  // [any thread]

  // Tells the others that this rank is gone, and closes the receives. True when MPI uses nothing of this any more.
  bool leave();

  std::string who(int rank) const;  // "rank 2 (on node17)"
  int number(int rank) const { return numbers_.empty() ? rank : numbers_[static_cast<size_t>(rank)]; }
  int rank() const { return rank_; }
  int world() const { return world_; }

 private:
  struct Peer {
    Message in;                 // being received
    std::array<Post, 2> posts;  // by parity of the call
    uint64_t posted = 0;        // calls it has posted
    bool left = false;
    std::string node;
  };

  Error send_to_all(const Message& message, std::vector<MPI_Request>* requests);
  Error receive(int from);
  void take(int from, const Message& message);
  Error poll();
  Error poll_all();
  Error look_at_missing(uint64_t call, const std::string& what, bool deadline_passed, const Deadline& deadline);
  Error compare(uint64_t call);
  void adopt(const Error& error, uint64_t done);

  const MPI_Comm comm_;
  const int rank_;
  const int world_;
  Channel* const whole_;
  std::string job_;
  std::vector<int> numbers_;
  std::vector<Peer> peers_;
  std::vector<MPI_Request> receives_;  // by rank; our own is null
  std::vector<int> arrived_;           // scratch of poll()
  Message post_{};                     // being sent
  std::vector<MPI_Request> sends_;
  uint64_t call_ = 0;              // the one that meet() began
  std::atomic<uint64_t> done_{0};  // calls that went well

  std::mutex mutex_;  // guards what follows
  Error failure_;
  Message last_{};  // being sent: our failure, or our leaving
  std::vector<MPI_Request> last_sends_;
  uint64_t fails_from_ = 0;  // the first call that failure_ ends
  std::atomic<bool> failed_{false};
};

}  // namespace comm_mpi
