#include "channel.h"

#include <sched.h>

#include <cstring>
#include <thread>

#include "process.h"

namespace comm_mpi {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr int kTag = 1;

// How a wait passes its time between two looks. Testing again at once is what moves data, so the thread only yields
// for a while, longer where a transfer is under way than where a rank is late; then it sleeps.
class Pause {
 public:
  explicit Pause(microseconds awake) : awake_until_(std::chrono::steady_clock::now() + awake) {}
  void take() {
    if (std::chrono::steady_clock::now() < awake_until_) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(nap_);
      nap_ = std::min(nap_ * 2, kLongest);
    }
  }

 private:
  static constexpr microseconds kLongest{500};
  std::chrono::steady_clock::time_point awake_until_;
  microseconds nap_{20};
};
constexpr microseconds kAwakeForRanks{200};
constexpr microseconds kAwakeForData{20'000};

void copy_text(const std::string& from, char* to, size_t size) {
  const size_t length = std::min(from.size(), size - 1);
  std::memcpy(to, from.data(), length);
  to[length] = 0;
}

}  // namespace

Channel::Channel(const Group& group, Channel* whole)
    : comm_(group.control),
      rank_(group.rank),
      world_(group.world),
      whole_(whole),
      job_(group.job),
      numbers_(group.numbers),
      peers_(static_cast<size_t>(group.world)),
      receives_(static_cast<size_t>(group.world), MPI_REQUEST_NULL),
      arrived_(static_cast<size_t>(group.world)) {
  copy_text(group.node, post_.text, sizeof(post_.text));
}

Error Channel::open(const Deadline& deadline) {
  for (int r = 0; r < world_; ++r) {
    if (r == rank_) continue;
    if (Error e = receive(r); !e.ok()) return e;
  }
  Post hello{};
  copy_text(job_, hello.label, sizeof(hello.label));
  for (const char c : job_) hello.digest = hello.digest * 31 + static_cast<unsigned char>(c);
  const Error e = meet(hello, "opening job \"" + job_ + "\" (world " + std::to_string(world_) + ")", deadline);
  if (e.ok()) complete();
  return e;
}

std::string Channel::who(int rank) const {
  const std::string& node = peers_[static_cast<size_t>(rank)].node;
  return "rank " + std::to_string(number(rank)) + (node.empty() ? "" : " (on " + node + ")");
}

// ---- messages ----

Error Channel::send_to_all(const Message& message, std::vector<MPI_Request>* requests) {
  Error first;
  for (int step = 1; step < world_; ++step) {
    const int to = (rank_ + step) % world_;
    requests->push_back(MPI_REQUEST_NULL);
    Error e = check_mpi(MPI_Isend(&message, sizeof(message), MPI_BYTE, to, kTag, comm_, &requests->back()),
                        "MPI_Isend of a control message to " + who(to));
    if (first.ok()) first = std::move(e);
  }
  return first;
}

Error Channel::receive(int from) {
  return check_mpi(MPI_Irecv(&peers_[static_cast<size_t>(from)].in, sizeof(Message), MPI_BYTE, from, kTag, comm_,
                             &receives_[static_cast<size_t>(from)]),
                   "MPI_Irecv of a control message of " + who(from));
}

void Channel::take(int from, const Message& message) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  if (message.kind == Message::kPost) {
    peer.posts[message.post.call % 2] = message.post;
    peer.posted = message.post.call + 1;
    if (message.post.op == Op::kOpen) peer.node = message.text;
  } else if (message.kind == Message::kFail) {
    adopt({message.code, message.text}, message.done);
  } else {
    peer.left = true;
  }
}

// Takes every control message that has come. A test that finds nothing done moves MPI on, and only the next one shows
// what that brought; so two in a row have to find nothing.
Error Channel::poll() {
  for (int idle = 0; idle < 2;) {
    int count = 0;
    const int code = MPI_Testsome(world_, receives_.data(), &count, arrived_.data(), MPI_STATUSES_IGNORE);
    if (Error e = check_mpi(code, "MPI_Testsome of the control messages"); !e.ok()) return fail(e);
    if (count == MPI_UNDEFINED) break;  // world 1
    idle = count > 0 ? 0 : idle + 1;
    for (int k = 0; k < count; ++k) {
      const int from = arrived_[static_cast<size_t>(k)];
      const Message message = peers_[static_cast<size_t>(from)].in;
      if (Error e = receive(from); !e.ok()) return fail(e);
      take(from, message);
    }
  }
  if (!failed_.load()) return {};
  std::lock_guard lock(mutex_);
  return call_ >= fails_from_ ? failure_ : Error();
}

Error Channel::poll_all() {
  if (whole_) {
    (void)whole_->poll_all();
    if (Error e = whole_->failure(); !e.ok()) return fail(e);
  }
  return poll();
}

// ---- waiting ----

Error Channel::meet(const Post& mine, const std::string& what, const Deadline& deadline) {
  call_ = mine.call;
  post_.kind = Message::kPost;
  post_.post = mine;
  Peer& self = peers_[static_cast<size_t>(rank_)];
  self.posts[mine.call % 2] = mine;
  self.posted = mine.call + 1;
  if (Error e = send_to_all(post_, &sends_); !e.ok()) return fail(e);
  Pause pause(kAwakeForRanks);
  for (;;) {
    if (Error e = poll_all(); !e.ok()) return e;
    int sent = 0;
    const int code = MPI_Testall(static_cast<int>(sends_.size()), sends_.data(), &sent, MPI_STATUSES_IGNORE);
    if (Error e = check_mpi(code, what + ": sending the post"); !e.ok()) return fail(e);
    bool all = sent != 0;
    for (const Peer& peer : peers_) all = all && peer.posted > mine.call;
    if (all) break;
    if (Error e = look_at_missing(mine.call, what, deadline.passed(), deadline); !e.ok()) return fail(e);
    pause.take();
  }
  sends_.clear();
  const Error e = compare(mine.call);
  return e.ok() ? e : fail(e);
}

Error Channel::look_at_missing(uint64_t call, const std::string& what, bool deadline_passed, const Deadline& deadline) {
  std::string missing;
  for (int r = 0; r < world_; ++r) {
    const Peer& peer = peers_[static_cast<size_t>(r)];
    if (peer.posted > call) continue;
    if (peer.left) return {STRATA_UNAVAILABLE, what + ": " + who(r) + " has closed its collective"};
    missing += (missing.empty() ? "" : ", ") + who(r);
  }
  if (!deadline_passed) return {};
  if (missing.empty()) missing = "nobody, but a post could not be sent";
  return {STRATA_DEADLINE_EXCEEDED, what + ": waited " + deadline.text() + "; missing: " + missing};
}

Error Channel::compare(uint64_t call) {
  const Post& first = peers_[0].posts[call % 2];
  for (int r = 1; r < world_; ++r) {
    const Post& other = peers_[static_cast<size_t>(r)].posts[call % 2];
    if (!same(first, other)) return {STRATA_FAILED_PRECONDITION, difference(first, number(0), other, number(r))};
  }
  return {};
}

Error Channel::finish(std::vector<MPI_Request>* requests, const std::string& what, const Deadline& deadline) {
  Pause pause(kAwakeForData);
  for (;;) {
    int done = 0;
    const int code = MPI_Testall(static_cast<int>(requests->size()), requests->data(), &done, MPI_STATUSES_IGNORE);
    if (Error e = check_mpi(code, what); !e.ok()) return fail(e);
    if (done) break;
    if (Error e = poll(); !e.ok()) return e;
    if (deadline.passed()) {
      return fail({STRATA_DEADLINE_EXCEEDED, what + ": waited " + deadline.text() +
                                                 "; every rank had come, but the transfer did not end, and MPI does "
                                                 "not say which rank it waits for"});
    }
    pause.take();
  }
  requests->clear();
  return {};
}

// ---- failure and leaving ----

void Channel::adopt(const Error& error, uint64_t done) {
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return;
  failure_ = error;
  fails_from_ = done;
  failed_.store(true);
  Process::get().give_up();
}

Error Channel::failure() {
  std::lock_guard lock(mutex_);
  return failure_.ok() && whole_ ? whole_->failure() : failure_;
}

Error Channel::fail(const Error& mine, const Error& others) {
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  failure_ = mine;
  failed_.store(true);
  if (whole_) (void)whole_->fail(mine, others);  // before others hear of it and tell it
  if (world_ == 1) return failure_;
  Process::get().give_up();
  last_.kind = Message::kFail;
  last_.code = others.code();
  last_.done = done_.load();
  copy_text(others.text(), last_.text, sizeof(last_.text));
  (void)send_to_all(last_, &last_sends_);  // who does not get it waits until its deadline
  // Eager messages are on their way now; a transport that was busy gets a moment more.
  const Deadline moment(milliseconds(100));
  for (int sent = 0; !sent && !moment.passed(); sched_yield()) {
    if (MPI_Testall(static_cast<int>(last_sends_.size()), last_sends_.data(), &sent, MPI_STATUSES_IGNORE)) break;
  }
  return failure_;
}

bool Channel::leave() {
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return world_ == 1;
  last_.kind = Message::kLeave;
  (void)send_to_all(last_, &last_sends_);
  for (MPI_Request& request : receives_) {
    if (request == MPI_REQUEST_NULL) continue;
    MPI_Cancel(&request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);  // local: a cancelled receive ends at once
  }
  const Deadline moment(milliseconds(100));
  int sent = 0;
  while (!sent && !moment.passed()) {
    if (MPI_Testall(static_cast<int>(last_sends_.size()), last_sends_.data(), &sent, MPI_STATUSES_IGNORE)) break;
    sched_yield();
  }
  return sent != 0;
}

}  // namespace comm_mpi
