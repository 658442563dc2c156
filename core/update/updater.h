// updater.h - the optimizer step, behind strata_step: one thread per rank, unit by unit in forward order.
//
// A job waits for the norm and is cut into parts: those whose update runs on the device are enqueued there
// (device_lane.h), then the host's are done (host_lane.h), both in forward order. A unit's event is set as soon as its
// weights are new, so that the next forward waits per unit. With no fetch at all every job still finishes.
// A failure is final: it goes to the engine, and all work of the job ends with it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "core/plan.h"
#include "core/spread.h"
#include "core/update/device_lane.h"
#include "core/update/host_lane.h"
#include "core/update/share.h"

namespace strata {

class Updater {
 public:
  using FailFn = std::function<void(const Status&)>;
  using LogFn = std::function<void(strata_log_level, const std::string&)>;
  Updater(const Registry& registry, const Layout& layout, const Settings& settings, const Device& device,
          const Gradients& gradients, const Weights& weights, States& states, std::chrono::nanoseconds deadline,
          Counters& counters, Trace& trace, const std::vector<int>& cpus, FailFn on_failure, LogFn log);
  ~Updater();

  void add_to(Plan* plan) const;
  Status allocate();

  void submit(UpdateJob job);
  // Waits until no job is left; the first failure of any. Host thread.
  Status join();

  // After join, or on the update thread.
  std::vector<uint64_t> unit_steps;  // by registered unit: updates applied to it

 private:
  // The parts of a step, by where they run; whether a unit has any there, by its position in the job.
  struct Side {
    std::vector<UpdatePart> parts;
    std::vector<bool> has;
    uint64_t streamable = 0;  // elements of state in host memory
    bool streams = false;
  };
  void work();
  Status run(UpdateJob& job);
  Status apply(UpdateJob& job);
  Status skip(UpdateJob& job);
  void cut(const UpdateJob& job, Side* host, Side* device) const;
  void cut_segment(uint32_t unit, uint32_t segment, size_t position, Spread* spread, Side* host, Side* device) const;
  Status run_lanes(UpdateJob& job, const Side& host, const Side& device);
  Status run_both(const Side& host, const Side& device, const Marker& start, const UnitDoneFn& done);
  Status everything_so_far(Marker* out) const;
  void log_share();
  bool is_used(const UpdateJob& job, uint32_t unit) const;

  const Layout& layout_;
  const bool splits_;
  const HostLane::Buffers buffers_;
  const Device& device_;
  const Gradients& gradients_;
  States& states_;
  Trace& trace_;
  const FailFn on_failure_;
  const LogFn log_;
  PartUpdate part_update_;
  HostLane host_lane_;
  DeviceLane device_lane_;
  Stream joined_;  // where units that both lanes have a part in come together
  std::mutex joining_;
  const std::vector<int> cpus_;
  UpdateShare share_;
  UpdateShare::Side last_host_, last_device_;
  double logged_share_ = -1;

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<UpdateJob> jobs_;
  bool running_ = false, stop_ = false;
  Status failure_;
  std::thread thread_;
};

}  // namespace strata
