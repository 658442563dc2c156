// watcher.cc - the channel's own thread: it reads the control lanes, keeps the heartbeat and finds what is wrong.
#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "control_channel/channel.h"
#include "plugin_kit/plugin_kit.h"

namespace strata::control_channel {
namespace {

using plugin_kit::join;

constexpr int kTickMs = 20;
constexpr std::chrono::milliseconds kLongestBeat{500};
constexpr std::chrono::seconds kGoodbye{1};  // for what is still to be sent when we leave

}  // namespace

void Channel::watch() {
  bool told = false;
  Deadline goodbye(kGoodbye);
  for (;;) {
    bool stop;
    {
      std::lock_guard lock(mutex_);
      stop = stop_;
    }
    if (!stop) goodbye = Deadline(kGoodbye);
    if (stop && (drained() || goodbye.passed())) return;
    wait_for_news();
    for (int r = 0; r < place_.world; ++r) read_lane(r);
    beat();
    Error e = failure();
    if (!e.ok() && whole_) e = fail(e, e);  // it may be the whole's
    if (e.ok() && !stop) {
      e = look_around();
      if (e.ok() && hooks_.tick) e = plugin_kit::attempt(hooks_.tick);
      if (!e.ok()) e = fail(e, e);
    }
    if (e.ok() || told) continue;
    told = true;
    if (hooks_.failed) hooks_.failed(e);
  }
}

bool Channel::drained() const {
  std::lock_guard lock(mutex_);
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& l) { return !l.open || l.outbox.empty(); });
}

void Channel::wait_for_news() {
  std::vector<pollfd> polls = {{bell_.get(), POLLIN, 0}};
  {
    std::lock_guard lock(mutex_);
    for (size_t r = 0; r < lanes_.size(); ++r) {
      const short events = static_cast<short>(POLLIN | (lanes_[r].outbox.empty() ? 0 : POLLOUT));
      if (lanes_[r].open) polls.push_back({seats_[r].control.get(), events, 0});
    }
  }
  ::poll(polls.data(), polls.size(), kTickMs);
  uint64_t count;
  (void)!::read(bell_.get(), &count, sizeof(count));
  std::lock_guard lock(mutex_);
  for (int r = 0; r < place_.world; ++r) flush(r);
}

void Channel::read_lane(int peer) {
  Lane& lane = lanes_[static_cast<size_t>(peer)];
  {
    std::lock_guard lock(mutex_);
    if (!lane.open) return;
  }
  char bytes[16 * 1024];
  ssize_t got;
  while ((got = ::recv(seats_[static_cast<size_t>(peer)].control.get(), bytes, sizeof(bytes), MSG_DONTWAIT)) > 0) {
    lane.inbox.append(bytes, static_cast<size_t>(got));
    lane.heard = Deadline(silence_);
  }
  const bool ended = got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  Type type;
  std::string payload;
  while (take_message(&lane.inbox, &type, &payload)) handle(peer, type, payload);
  if (ended) lost(peer);
}

void Channel::handle(int peer, Type type, const std::string& payload) {
  Error e;
  std::unique_lock lock(mutex_);
  Lane& lane = lanes_[static_cast<size_t>(peer)];
  if (type == Type::kPost && place_.rank == 0) {
    Announcement said = payload_as<Announcement>(payload);
    said.post.label[sizeof(said.post.label) - 1] = 0;
    e = ledger_.add(peer, said);
  } else if (type == Type::kFail) {
    e = {payload_as<Failure>(payload).code, payload.substr(std::min(payload.size(), sizeof(Failure)))};
  } else if (type == Type::kBye) {
    lane.open = false;
    if (place_.rank == 0) {
      e = ledger_.leave(peer);
    } else {
      rank0_left_after_ = payload_as<Goodbye>(payload).calls;
      if (rank0_left_after_ < calls_) {
        e = {STRATA_UNAVAILABLE, join(last_call(), who(0), " closed while others wait for it")};
      }
    }
  }
  lock.unlock();
  if (!e.ok()) (void)fail(e, e);
}

// The end of a connection without a goodbye. One who has said ours gets none back.
void Channel::lost(int peer) {
  Error e;
  {
    std::lock_guard lock(mutex_);
    Lane& lane = lanes_[static_cast<size_t>(peer)];
    if (!lane.open) return;
    lane.open = false;
    if (stop_) return;
    const std::string newest = place_.rank == 0 ? ledger_.newest() : "";
    e = {STRATA_UNAVAILABLE, join(newest.empty() ? last_call() : newest, who(peer), " died",
                                  place_.rank == 0 ? " " + ledger_.progress(peer) : "")};
  }
  (void)fail(e, e);
}

void Channel::beat() {
  if (!next_beat_.passed()) return;
  next_beat_ = Deadline(std::min<std::chrono::nanoseconds>(silence_ / 8, kLongestBeat));
  std::lock_guard lock(mutex_);
  const std::string bytes = message(Type::kBeat);
  for (int r = 0; r < place_.world; ++r) {
    if (lanes_[static_cast<size_t>(r)].outbox.empty()) queue_for(r, bytes);
  }
}

Error Channel::look_around() {
  std::lock_guard lock(mutex_);
  if (Error e = ledger_.overdue(); !e.ok()) return e;
  for (size_t r = 0; r < lanes_.size(); ++r) {
    if (!lanes_[r].open || !lanes_[r].heard.passed()) continue;
    return {STRATA_DEADLINE_EXCEEDED,
            join(last_call(), who(static_cast<int>(r)), " has said nothing for ", lanes_[r].heard.text(),
                 ": it is stopped, or its machine or the network is gone")};
  }
  return {};
}

}  // namespace strata::control_channel
