// channel.h - the ranks of a job, watching each other while a device does the work.
//
// Each collective is posted: (number, operation, tag, bytes, items, label) goes to rank 0 without waiting for anything,
// so that a launch costs one small send. Rank 0's watcher compares. What is wrong - a difference, a rank that is
// missing at the deadline, that died (its socket closed), that fell silent (no heartbeat for as long as the instance's
// deadline: stopped, or its machine is gone) - ends in one verdict that rank 0 sends to all, and every rank's watcher
// calls `failed`, where a plugin stops what runs on the device.
//
// `exchange` is the only call that waits: for every rank's bytes, read and sent by the calling thread itself.
//
// Some of the ranks can be a job of their own, a part, with a channel of its own. It fails when the whole does, and the
// whole when a part does.
//
// Threads: one watcher of its own, from open to leave; post and exchange come from one thread at a time; fail, failure
// and who from any.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <thread>

#include "control_channel/ledger.h"
#include "control_channel/meeting.h"

namespace strata::control_channel {

class Channel {
 public:
  struct Hooks {
    // Once, when the first failure is known; on the watcher.
    std::function<void(const Error&)> failed;
    // About every 20 ms, on the watcher. An error of it is a failure of all ranks.
    std::function<Error()> tick;
  };
  // `whole`, if any, outlives this.
  Channel(Place place, Hooks hooks, Channel* whole = nullptr);
  ~Channel() { leave(); }

  // Meets the other ranks. `silence`: how long a rank may say nothing.
  Error open(const Deadline& deadline, std::chrono::nanoseconds silence);
  // Of a world of several ranks: a new address for rank 0 of a part, as the others reach it, and what it listens with.
  Error open_door(Fd* door, Address* address) const;
  // Readable once this has failed.
  int failed() const { return failed_.get(); }
  // Says goodbye; does not wait for others.
  void leave();

  Error post(const Post& post, const Deadline& deadline);
  // Posts, and brings `bytes` of each rank to all: rank r's to out + r * bytes.
  Error exchange(const Post& post, const void* in, void* out, uint64_t bytes, const Deadline& deadline);

  // Keeps the first failure and tells the others `others`; returns the one that is kept.
  Error fail(const Error& mine, const Error& others);
  Error failure() const;
  std::string who(int rank) const { return name_of(number(rank), seats_[static_cast<size_t>(rank)].person); }
  int number(int rank) const { return place_.number(rank); }
  bool on_this_machine(int rank) const { return same_machine(seats_[static_cast<size_t>(rank)].person); }
  int rank() const { return place_.rank; }
  int world() const { return place_.world; }

 private:
  struct Lane {
    std::string inbox, outbox;
    Deadline heard = Deadline::after(0);  // when silence becomes too long
    bool open = false;
  };
  enum class Arrival { kNothing, kBytes, kEnd };

  void watch();
  void wait_for_news();
  void read_lane(int peer);
  void handle(int peer, Type type, const std::string& payload);
  void flush(int peer);
  void beat();
  Error look_around();
  void lost(int peer);
  void queue_for_all(const std::string& bytes);
  void queue_for(int peer, const std::string& bytes);
  void keep(const Error& mine, const std::string& bytes);
  void ring() const;
  bool drained() const;
  std::string last_call() const;

  static int64_t length_of(const Deadline& deadline);
  Error record(const Announcement& said);
  Error gather(const Post& post, void* out, uint64_t bytes, const Deadline& deadline);
  Error give(const Post& post, const void* in, void* out, uint64_t bytes, const Deadline& deadline);
  Error verdict(Outcome outcome, int peer, const Post& post, const Deadline& deadline);

  const Place place_;
  const Hooks hooks_;
  Channel* const whole_;
  std::vector<Seat> seats_;
  std::chrono::nanoseconds silence_{0};
  Deadline next_beat_ = Deadline::after(0);
  const bool may_spin_;

  mutable std::mutex mutex_;  // all below, and sending on the control lanes
  std::vector<Lane> lanes_;
  Ledger ledger_;                  // rank 0
  Post last_{};                    // this rank's newest
  uint64_t calls_ = 0;             // this rank's
  uint64_t rank0_left_after_ = 0;  // guest: posts of rank 0, when it has said goodbye
  Error failure_;
  bool stop_ = false;

  Fd bell_;    // wakes the watcher
  Fd failed_;  // readable once there is a failure
  std::thread watcher_;
};

}  // namespace strata::control_channel
