// report.h - what a training run prints, on rank 0: progress, loss, speed, memory, bytes moved.
#pragma once

#include <chrono>
#include <cstdint>

#include "sharded.h"

namespace gpt {

class Report {
 public:
  Report(strata_engine* engine, const ShardedModel& model, uint64_t total_steps, double tokens_per_step, bool gather);

  // After every step; prints every steps_per_print steps and after the last one (0: never).
  void step(uint64_t done, double loss, double learning_rate);
  void held_out(uint64_t done, double loss, uint64_t samples);
  void say(const char* format, ...) __attribute__((format(printf, 2, 3)));
  void restart_clock();  // what happened since the last report is not the next steps' work

 private:
  void speed(uint64_t done, double loss, double learning_rate);
  void memory();
  void traffic();
  strata_counters counters() const;
  void progress_bar(uint64_t done, double loss);

  strata_engine* engine_;
  const ShardedModel& model_;
  uint64_t total_steps_;
  double tokens_per_step_;
  bool gather_, prints_, terminal_;
  uint64_t every_;
  std::chrono::steady_clock::time_point timed_from_;
  strata_counters counted_from_;
  uint64_t timed_steps_ = 0;
};

}  // namespace gpt
