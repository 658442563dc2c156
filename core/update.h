// update.h - the optimizer step, behind strata_step: one thread per rank, unit by unit in forward order.
//
// A job waits for the norm, then walks the sub-groups of every used unit: read i+1 while updating i while writing i-1
// (nothing to read or write where the state is addressed in place). A unit's event is set as soon as its weights are
// new, so that the next forward waits per unit. With no fetch at all every job still finishes.
// A failure is final: it goes to the engine, and all work of the job ends with it.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "core/agreement.h"
#include "core/states.h"

namespace strata {

struct UpdateJob {
  uint64_t step = 0;
  uint64_t traced = 0;                               // the same in the trace, 0 where it is not recorded
  bool ends_trace = false;                           // the last one that is
  std::function<void(const StepOutcome&)> on_known;  // may be empty
  std::shared_ptr<StepOutcome> outcome;
  std::vector<uint32_t> units;             // layout units with trainable segments, in forward order
  std::vector<Work> updated;               // one per entry of `units`
  std::vector<std::vector<Work>> after;    // what still reads each one's weights
  std::vector<strata_optim_group> groups;  // with this step's learning rates
};

class Updater {
 public:
  using FailFn = std::function<void(const Status&)>;
  using LogFn = std::function<void(strata_log_level, const std::string&)>;
  Updater(const Registry& registry, const Layout& layout, uint64_t sub_group_size, const Device& device,
          const Optimizer& optimizer, const Gradients& gradients, const Weights& weights, States& states,
          std::chrono::nanoseconds deadline, Counters& counters, Trace& trace, const std::vector<int>& cpus,
          FailFn on_failure, LogFn log);
  ~Updater();

  uint64_t buffer_bytes() const;  // of the pipeline, device
  Status allocate();

  void submit(UpdateJob job);
  // Waits until no job is left; the first failure of any. Host thread.
  Status join();

  // After join, or on the update thread.
  std::vector<uint64_t> unit_steps;  // by registered unit: updates applied to it

 private:
  struct Part {
    States::Piece piece;
    size_t position;  // of the unit in job.units
    bool last;        // of that unit
  };
  void work();
  Status run(UpdateJob& job);
  Status apply(UpdateJob& job);
  Status skip(UpdateJob& job);
  Status cut(UpdateJob& job, std::vector<Part>* parts) const;
  bool writes_from_host(uint32_t unit) const;
  Status pipeline(UpdateJob& job, const std::vector<Part>& parts);
  Status update(const UpdateJob& job, const States::Piece& piece, char* buffer);
  Status store(const States::Piece& piece, char* buffer, std::vector<Work>* done);
  Status scalars(const UpdateJob& job, uint32_t group, uint32_t unit, uint32_t* set);
  bool is_used(const UpdateJob& job, uint32_t unit) const;

  const Layout& layout_;
  const uint64_t sub_group_;
  const Device& device_;
  const Optimizer& optimizer_;
  const Gradients& gradients_;
  const Weights& weights_;
  States& states_;
  const std::chrono::nanoseconds deadline_;
  Counters& counters_;
  Trace& trace_;
  const FailFn on_failure_;
  const LogFn log_;
  Stream stream_;

  static constexpr size_t kBuffers = 3;  // one being read, one updated, one written
  Memory buffers_[kBuffers];
  // What an update reads where it runs. Two sets: a step's norm is known only after the update two steps back is done.
  struct Factors {
    float grad_scale;
    uint32_t apply;
  };
  Memory factors_;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> scalar_sets_;  // (group, unit) -> index, of the running job
  std::vector<float> scalars_;

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<UpdateJob> jobs_;
  bool running_ = false, stop_ = false;
  Status failure_;
  std::thread thread_;
};

}  // namespace strata
