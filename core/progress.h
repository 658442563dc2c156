// progress.h - the line of a step in the log of rank 0, every steps_per_print steps.
//
// The host thread counts steps, their time and their tokens; the update thread, which waits for the norm anyway, writes
// the line, so that strata_step does not. Time in calls between steps (checkpoints, reading and writing params) is not
// the steps' time. Bytes are those between the agreements of the line's step and of the one before, as in
// STRATA_COUNT_LAST_STEP.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include "core/agreement.h"
#include "core/plan.h"

namespace strata {

class Progress {
 public:
  using LogFn = std::function<void(const std::string&)>;
  struct Run {
    uint64_t every;  // steps; 0: no lines
    uint64_t params;
    int world;
  };
  Progress(const Run& run, const Device& device, const Plan& plan, const strata_counters& now, LogFn log);

  // Host thread. What the line will say of a step, when it is due.
  struct Line {
    uint64_t step, steps, tokens;
    double loss, lr, seconds;  // since the line before
    std::string note;
  };
  std::optional<Line> step(uint64_t step, double lr, const strata_step_args* args);
  // Not part of any step.
  class Pause {
   public:
    explicit Pause(Progress* progress) : progress_(progress) {
      if (progress_) progress_->take_time();
    }
    ~Pause() {
      if (!progress_) return;
      progress_->since_ = Clock::now();
      if (!progress_->stepped_) progress_->spent_ = {};  // what leads up to the first step
    }
    Pause(const Pause&) = delete;

   private:
    Progress* const progress_;
  };

  // Update thread, when the step's norm is known.
  void print(const Line& line, const StepOutcome& outcome);

 private:
  using Clock = std::chrono::steady_clock;
  void take_time();
  std::string speed(const Line& line) const;
  std::string memory();
  std::string traffic(const strata_counters& bytes, uint64_t steps) const;

  const Run run_;
  const Device& device_;
  const uint64_t planned_on_device_, pinned_;
  const LogFn log_;
  Clock::time_point since_ = Clock::now();
  Clock::duration spent_{0};
  uint64_t steps_ = 0, tokens_ = 0;
  bool all_gave_tokens_ = true, stepped_ = false;
  strata_counters counted_;      // at the line before; update thread
  uint64_t most_on_device_ = 0;  // update thread
};

}  // namespace strata
