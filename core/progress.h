// progress.h - the line of a step in the log of rank 0, every steps_per_print steps.
//
// The host thread counts steps, their time and their tokens; the update thread, which waits for the norm anyway, writes
// the line, so that strata_step does not. Time in calls between steps (checkpoints, reading and writing params) is not
// the steps' time, nor what tiers move in them. Bytes are those between the agreements of the line's step and of the
// one before, as in STRATA_COUNT_LAST_STEP.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/agreement.h"
#include "core/plan.h"
#include "core/tier.h"

namespace strata {

class Progress {
 public:
  using LogFn = std::function<void(const std::string&)>;
  struct Run {
    uint64_t every;  // steps; 0: no lines
    uint64_t params;
    int world;
  };
  // `tiers` stay, as the rest does.
  Progress(const Run& run, const Device& device, std::vector<const Tier*> tiers, const Plan& plan,
           const strata_counters& now, LogFn log);

  // Host thread. What the line will say of a step, when it is due.
  struct Line {
    uint64_t step, steps, tokens;
    double loss, lr, seconds;  // since the line before
    std::string note;
    std::optional<double> busy[3];  // share of that time, of a tier that keeps it
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
      progress_->since_ = progress_->read();
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
  struct Time {
    Clock::time_point at{};
    uint64_t busy_ns[3] = {};  // by tier
  };
  struct Spent {
    Clock::duration time{0};
    uint64_t busy_ns[3] = {};
  };
  Time read() const;
  void take_time();
  std::string speed(const Line& line) const;
  std::string memory();
  std::string traffic(const strata_counters& bytes, const Line& line) const;

  const Run run_;
  const Device& device_;
  const std::vector<const Tier*> tiers_;
  const uint64_t planned_on_device_, pinned_;
  const LogFn log_;
  Time since_;
  Spent spent_;
  uint64_t steps_ = 0, tokens_ = 0;
  bool all_gave_tokens_ = true, stepped_ = false;
  strata_counters counted_;      // at the line before; update thread
  uint64_t most_on_device_ = 0;  // update thread
};

}  // namespace strata
