// comm_queue.h - the one thread per rank that launches all collectives, in the order the host submitted them.
//
// The order depends on host calls, sizes and settings only. An operation may wait for work of this rank (an update
// that writes what it will send) and may carry work to do on its result; both happen on this thread, so they never
// change the order. On a device with streams, gathers and reductions are enqueued on a stream each, and an operation's
// Work ends at its point there; elsewhere it is done when its event is set. A running hash of everything submitted goes
// with the norm (agreement.h): a step in which ranks differed is not applied.
//
// The first failure is final: it is told to the other ranks through the collective, and every later operation ends
// with it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/backends.h"
#include "core/counters.h"
#include "core/places.h"
#include "core/stream.h"

namespace strata {

struct CommOp {
  enum class Kind { kGather, kAgree, kReduceScatter, kAllReduce, kBroadcast, kLocal };
  Kind kind = Kind::kLocal;
  uint64_t tag = 0;         // what it is about; equal on all ranks
  uint32_t unit = kNoUnit;  // the first it is about, in the trace
  std::string label;        // the same in words
  int root = 0;             // broadcast
  bool everyone = false;    // kAgree: among all ranks of the world, not of the data-parallel group
  std::vector<strata_coll_item> items;
  struct {
    const void* in = nullptr;
    void* out = nullptr;
    uint64_t bytes = 0;
  } exchange;                     // kAgree: host memory
  std::vector<Work> after;        // of this rank; must have ended well before the operation starts
  const bool* dropped = nullptr;  // true when its turn comes: no rank does it. Collective thread
  // Right before and right after; device work goes to the stream.
  std::function<Status(const strata_stream*)> prepare, then;
  uint64_t step = 0;  // in the trace; set when it is submitted
};

inline strata_coll_item coll_item(const void* in, strata_dtype in_dtype, void* out, strata_dtype out_dtype,
                                  uint64_t count) {
  return {sizeof(strata_coll_item), STRATA_ABI_MINOR, in, out, count, in_dtype, out_dtype};
}

// The instances of one rank: of its data-parallel group, and of the whole world, from which the group may be split.
// They share one fate, so what ends the one ends the other on every rank.
struct Comms {
  const Collective& group;
  const Collective& world;
  const Places& places;
};

class CommQueue {
 public:
  using FailFn = std::function<void(const Status&)>;
  CommQueue(const Device& device, Comms comms, std::chrono::nanoseconds deadline, Counters& counters, Trace& trace,
            const std::vector<int>& cpus, FailFn on_failure);
  // Before the first submit.
  Status create_streams();
  // Settles; else the other ranks are told that we leave.
  ~CommQueue();

  // Its work ends when the operation and its `then` are done.
  Work submit(CommOp op);
  // Submits and waits.
  Status run(CommOp op);
  // Every operation from now on ends with `status`; the engine and the other ranks hear of it. Any thread.
  void fail(const Status& status);
  // What was submitted, by the other ranks too, gets a few seconds to end. False: it did not.
  bool settle();
  // For work that ranks do alike: an error of this rank's part is the end for all of them. Any thread.
  Status or_fail(const Status& status) {
    if (!status.ok()) fail(status);
    return status;
  }
  // Waits until the device is done with all reductions so far. Collective thread.
  Status wait_for_reductions() const;
  // Before the engine goes: device work that waits for ranks which do not come is given a few seconds, then ended.
  void release_device();
  // Waits until everything submitted so far is done.
  Status flush();
  // Of all operations submitted so far. Host thread.
  uint64_t hash() const { return hash_; }
  // Ranks had submitted different ones, of which they did the same.
  void forget_hash() { hash_ = 0; }
  // For waits on what the queue does. Longer than a collective's own deadline, which began later than such a wait or at
  // the same time: the collective must give up first, since its error names the rank that is missing.
  std::chrono::nanoseconds patience() const { return 3 * deadline_; }

 private:
  struct Entry {
    CommOp op;
    Work work;
  };
  void work();
  Status execute(CommOp& op, Marker* end);
  Status wait_before(const CommOp& op, const strata_stream* stream) const;
  Status launch(const CommOp& op, const strata_stream* stream);
  Status call(const CommOp& op, const strata_coll_args& args) const;
  void abort(const Status& why) const;
  Status alone(const CommOp& op, const strata_stream* stream);
  const Stream& stream_of(const CommOp& op) const;
  uint64_t ranks_of(const CommOp& op) const {
    return static_cast<uint64_t>(op.everyone ? comms_.places.world.size : comms_.places.data.size);
  }
  // The counters an operation adds to, and how much.
  struct Traffic {
    std::atomic<uint64_t>*bytes = nullptr, *calls = nullptr;
    uint64_t amount = 0;
  };
  Traffic traffic_of(const CommOp& op) const;
  std::atomic<uint64_t>& time_of(const CommOp& op);

  const Device& device_;
  const Comms comms_;
  Stream gathers_, reductions_;
  const std::chrono::nanoseconds deadline_;
  Counters& counters_;
  Trace& trace_;
  const FailFn on_failure_;
  uint64_t hash_ = 0;

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Entry> queue_;
  Status failure_;
  bool stop_ = false, executing_ = false;
  std::thread thread_;
};

}  // namespace strata
