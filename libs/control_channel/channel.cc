#include "control_channel/channel.h"

#include <poll.h>
#include <sys/eventfd.h>

namespace strata::control_channel {
namespace {

using plugin_kit::join;

// How much longer than the deadline a rank waits for the verdict of rank 0, which knows who is missing.
constexpr std::chrono::milliseconds kGrace{300};
// Between the first and the last answer of rank 0.
constexpr std::chrono::milliseconds kOnItsWay{50};

Error gone(const Post& post, const std::string& who) {
  return {STRATA_UNAVAILABLE, join(title(post), ": ", who, " closed the connection")};
}

}  // namespace

Channel::Channel(Place place, Hooks hooks, Channel* whole)
    : place_(std::move(place)),
      hooks_(std::move(hooks)),
      whole_(whole),
      seats_(static_cast<size_t>(place_.world)),
      // A spinning rank on a machine with a core or two keeps the rank it waits for from running.
      may_spin_(std::thread::hardware_concurrency() >= 4),
      lanes_(seats_.size()),
      ledger_(
          place_.world, [this](int r) { return who(r); }, [this](int r) { return number(r); }),
      bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      failed_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Error Channel::open(const Deadline& deadline, std::chrono::nanoseconds silence) {
  if (!bell_ || !failed_) return {STRATA_INTERNAL, opening(place_) + ": no event descriptors are left"};
  if (Error e = meet(place_, deadline, &seats_); !e.ok()) {
    const Error why = whole_ ? whole_->failure() : Error();
    return why.ok() ? e : why;
  }
  silence_ = silence;
  for (size_t r = 0; r < seats_.size(); ++r) {
    lanes_[r].open = static_cast<bool>(seats_[r].control);
    lanes_[r].heard = Deadline(silence);
  }
  watcher_ = std::thread([this] { watch(); });
  return {};
}

Error Channel::open_door(Fd* door, Address* address) const {
  const Seat& other = seats_[place_.rank == 0 ? 1 : 0];
  return listen_beside(other.control.get(), door, address);
}

void Channel::leave() {
  if (!watcher_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    queue_for_all(message(Type::kBye, Goodbye{calls_}));
    stop_ = true;
  }
  ring();
  watcher_.join();
  for (Seat& seat : seats_) {
    for (Fd* lane : {&seat.control, &seat.exchange}) {
      if (*lane) ::shutdown(lane->get(), SHUT_WR);  // so that what was sent is read before the end
      *lane = Fd();
    }
  }
}

// ---- calls ----

// Whole milliseconds, as the caller gave it: what the microseconds since then took away is not worth showing.
int64_t Channel::length_of(const Deadline& deadline) { return (deadline.left_ns() + 999'999) / 1'000'000 * 1'000'000; }

Error Channel::record(const Announcement& said) {
  if (Error e = whole_ ? whole_->failure() : Error(); !e.ok()) return e;
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  last_ = said.post;
  ++calls_;
  if (place_.rank == 0) return ledger_.add(0, said);
  // Rank 0 may be done with this call, which is not done here, and have left.
  if (!lanes_[0].open && calls_ > rank0_left_after_) {
    return {STRATA_UNAVAILABLE, join(title(said.post), ": ", who(0), " closed")};
  }
  queue_for(0, message(Type::kPost, said));
  return {};
}

Error Channel::post(const Post& post, const Deadline& deadline) {
  const Error e = record({post, length_of(deadline)});
  return e.ok() ? e : fail(e, e);
}

Error Channel::exchange(const Post& post, const void* in, void* out, uint64_t bytes, const Deadline& deadline) {
  const size_t own = static_cast<size_t>(place_.rank) * bytes;
  if (bytes > 0) std::memcpy(static_cast<char*>(out) + own, in, bytes);
  const Deadline patience(std::chrono::nanoseconds(deadline.left_ns()) + kGrace);
  Error e = place_.rank == 0 ? record({post, length_of(deadline)}) : give(post, in, out, bytes, patience);
  if (e.ok() && place_.rank == 0) e = gather(post, out, bytes, patience);
  return e.ok() ? e : fail(e, e);
}

// Guest: ours to rank 0, all from rank 0. The post goes first: with the bytes, rank 0 may be done with this call and
// leave.
Error Channel::give(const Post& post, const void* in, void* out, uint64_t bytes, const Deadline& deadline) {
  if (Error e = record({post, length_of(deadline) - std::chrono::nanoseconds(kGrace).count()}); !e.ok()) return e;
  std::string letter(reinterpret_cast<const char*>(&post), sizeof(post));
  if (bytes > 0) letter.append(static_cast<const char*>(in), bytes);
  const int lane = seats_[0].exchange.get();
  Outcome outcome = send_all(lane, letter.data(), letter.size(), deadline, failed_.get());
  char ready;  // so that an exchange of nothing ends when all have come, too
  if (outcome == Outcome::kDone) outcome = receive_all(lane, &ready, 1, deadline, failed_.get(), may_spin_);
  // A rank that had its answer may have failed in its next call; ours, of the same exchange, is on its way then.
  if (outcome == Outcome::kStopped) outcome = receive_all(lane, &ready, 1, Deadline(kOnItsWay), -1, false);
  if (outcome == Outcome::kDone) {
    outcome = receive_all(lane, out, bytes * seats_.size(), deadline, failed_.get(), false);
  }
  return outcome == Outcome::kDone ? Error() : verdict(outcome, 0, post, deadline);
}

Error Channel::gather(const Post& post, void* out, uint64_t bytes, const Deadline& deadline) {
  for (int r = 1; r < place_.world; ++r) {
    const int lane = seats_[static_cast<size_t>(r)].exchange.get();
    Post theirs{};
    Outcome outcome = receive_all(lane, &theirs, sizeof(theirs), deadline, failed_.get(), may_spin_);
    if (outcome == Outcome::kDone && !collective_kit::same(post, theirs)) {
      return {STRATA_FAILED_PRECONDITION, collective_kit::difference(post, number(0), theirs, number(r))};
    }
    char* to = static_cast<char*>(out) + static_cast<uint64_t>(r) * bytes;
    if (outcome == Outcome::kDone) outcome = receive_all(lane, to, bytes, deadline, failed_.get(), false);
    if (outcome != Outcome::kDone) return verdict(outcome, r, post, deadline);
  }
  std::string all(1, '\1');
  all.append(static_cast<const char*>(out), bytes * seats_.size());
  for (int r = 1; r < place_.world; ++r) {
    const int lane = seats_[static_cast<size_t>(r)].exchange.get();
    const Outcome outcome = send_all(lane, all.data(), all.size(), deadline, failed_.get());
    if (outcome != Outcome::kDone) return verdict(outcome, r, post, deadline);
  }
  return {};
}

// Why an exchange ended early. The watcher hears the reason on the control lanes, perhaps a moment later.
Error Channel::verdict(Outcome outcome, int peer, const Post& post, const Deadline& deadline) {
  pollfd one = {failed_.get(), POLLIN, 0};
  ::poll(&one, 1, static_cast<int>(kGrace.count()));
  if (Error e = failure(); !e.ok()) return e;
  if (outcome == Outcome::kClosed) return gone(post, who(peer));
  return {STRATA_DEADLINE_EXCEEDED, join(title(post), ": waited ", deadline.text(), ": ", who(peer), " is missing")};
}

// ---- failing ----

Error Channel::fail(const Error& mine, const Error& others) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    // The whole first, and both before anybody can answer: ranks that hear of it through the one tell the other.
    if (whole_) (void)whole_->fail(mine, others);
    keep(mine, message(Type::kFail, Failure{others.code()}, others.text()));
  }
  ring();
  return mine;
}

Error Channel::failure() const {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok() || !whole_) return failure_;
  }
  return whole_->failure();
}

void Channel::keep(const Error& mine, const std::string& bytes) {
  failure_ = mine;
  queue_for_all(bytes);
  const uint64_t one = 1;
  (void)!::write(failed_.get(), &one, sizeof(one));
}

void Channel::ring() const {
  const uint64_t one = 1;
  (void)!::write(bell_.get(), &one, sizeof(one));
}

// ---- sending on control lanes; under the lock ----

void Channel::queue_for_all(const std::string& bytes) {
  for (int r = 0; r < place_.world; ++r) queue_for(r, bytes);
}

void Channel::queue_for(int peer, const std::string& bytes) {
  Lane& lane = lanes_[static_cast<size_t>(peer)];
  if (!lane.open) return;
  lane.outbox += bytes;
  flush(peer);
}

void Channel::flush(int peer) {
  Lane& lane = lanes_[static_cast<size_t>(peer)];
  while (lane.open && !lane.outbox.empty()) {
    const int socket = seats_[static_cast<size_t>(peer)].control.get();
    const ssize_t sent = ::send(socket, lane.outbox.data(), lane.outbox.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent <= 0) return;  // full: the watcher goes on when there is room. Closed: it finds out by reading.
    lane.outbox.erase(0, static_cast<size_t>(sent));
  }
}

std::string Channel::last_call() const { return last_.call == 0 ? "" : title(last_) + ": "; }

}  // namespace strata::control_channel
