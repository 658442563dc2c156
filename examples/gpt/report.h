// report.h - what a training run prints on rank 0 beside the engine's own line per step: progress, held-out loss, and
// the bytes gathered beside the formula for them.
#pragma once

#include <cstdint>

#include "sharded.h"

namespace gpt {

class Report {
 public:
  Report(strata_engine* engine, const ShardedModel& model, uint64_t total_steps, bool gather);

  // After every step: the progress bar, and with `gather` the bytes gathered, every steps_per_print steps.
  void step(uint64_t done, double loss);
  void held_out(uint64_t done, double loss, uint64_t samples);
  void say(const char* format, ...) __attribute__((format(printf, 2, 3)));
  void restart_count();  // what was gathered since the last report is not the next steps' work

 private:
  void gathered();
  uint64_t gathered_bytes() const;
  void progress_bar(uint64_t done, double loss);

  strata_engine* engine_;
  const ShardedModel& model_;
  uint64_t total_steps_;
  bool prints_, gather_, terminal_;
  uint64_t every_;
  uint64_t counted_from_ = 0, counted_steps_ = 0;
};

}  // namespace gpt
