// flights.h - the collectives that are on the device: which are done, which take too long, and their `done` events.
//
// A collective's deadline runs from when its stream has come to it: what is in front of it may be compute of any
// length. A rank that does not come at all is the channel's matter.
#pragma once

#include <atomic>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "gpu.h"
#include "plugin_kit/deadline.h"
#include "plugin_kit/error.h"
#include "strata/host.h"

namespace comm_nccl {

using strata::plugin_kit::Deadline;
using strata::plugin_kit::Error;

// How the instance ended, for those that outlive it: callbacks of streams. A kernel that an abort stops ends like one
// that succeeded, so the failure is put here just before the abort: what ended earlier was good, what ends later is
// not.
class Fate {
 public:
  void seal(const Error& failure);
  Error failure() const;

 private:
  mutable std::mutex mutex_;
  Error failure_;
};

class Flights {
 public:
  Flights(std::shared_ptr<Gpu> gpu, const strata_sync_api* sync) : gpu_(std::move(gpu)), sync_(sync) {}
  ~Flights();

  // Held while a collective is posted and enqueued, until it is added.
  class Launch {
   public:
    explicit Launch(Flights& flights) : flights_(flights) { ++flights_.launching_; }
    ~Launch() { --flights_.launching_; }
    Launch(const Launch&) = delete;

   private:
    Flights& flights_;
  };
  // The collective between `begin` and this point of `stream`; `done` may be NULL. Takes `begin` over. Returns the
  // flight's number.
  uint64_t add(const std::string& what, cudaEvent_t begin, cudaStream_t stream, int64_t deadline_ns,
               strata_event* done);
  // Forgets what is done. DEADLINE_EXCEEDED; INTERNAL: the device failed.
  Error look();
  bool empty() const;
  // Waits until this one is done, or the fate is sealed and the device has been stopped (`stop`).
  Error wait(uint64_t number);
  // After a failure, before the device is stopped: lets what is complete on other ranks be complete here.
  void settle();
  // When nothing more is added: whether all has come to its end, within a moment.
  bool drain();
  // The device has been stopped, or will not stop: sets every event that is left.
  void stop(const Error& failure);
  const std::shared_ptr<Fate>& fate() const { return fate_; }

 private:
  struct Done;
  struct Flight {
    uint64_t number;
    std::string what;
    cudaEvent_t begin;
    cudaEvent_t end;
    int64_t deadline_ns;
    std::optional<Deadline> deadline;  // since it began
    std::shared_ptr<Done> done;
  };
  struct Arrival;
  Error look_locked();

  const std::shared_ptr<Gpu> gpu_;
  const strata_sync_api* const sync_;
  const std::shared_ptr<Fate> fate_ = std::make_shared<Fate>();
  mutable std::mutex mutex_;
  std::condition_variable stopped_changed_;
  std::list<Flight> flights_;
  std::set<uint64_t> cut_off_;  // ended after the fate was sealed, as an abort ends them
  uint64_t last_ = 0;
  std::atomic<int> launching_{0};
  bool stopped_ = false;
};

}  // namespace comm_nccl
