// report.cc - see report.h.
#include "report.h"

#include <cstdarg>
#include <cstdio>
#include <numbers>
#include <string>

namespace gpt {

Report::Report(strata_engine* engine, const ShardedModel& model, uint64_t total_steps, bool gather)
    : engine_(engine),
      model_(model),
      total_steps_(total_steps),
      prints_(strata_rank(engine) == 0),
      gather_(gather && prints_),
      terminal_(shows_bar()),
      every_(uint64_t(int_setting(engine, "steps_per_print"))) {}

void Report::restart_count() {
  if (gather_) counted_from_ = gathered_bytes();
  counted_steps_ = 0;
}

void Report::step(uint64_t done, double loss) {
  ++counted_steps_;
  if (gather_ && every_ != 0 && (done % every_ == 0 || done == total_steps_)) {
    gathered();
    restart_count();
  }
  if (prints_ && terminal_ && done < total_steps_) progress_bar(done, loss);
}

// In all, once the last step's update, which runs on after strata_step, is done: so that steps are counted whole.
uint64_t Report::gathered_bytes() const {
  strata_counters c;
  STRATA_INIT(&c);
  check(strata_wait(engine_), "waiting for the update");
  check(strata_get_counters(engine_, STRATA_COUNT_TOTAL, &c), "reading the counters");
  return c.gather_bytes;
}

void Report::gathered() {
  const double counted = double(gathered_bytes() - counted_from_) / double(counted_steps_);
  // Stage 3 gathers for forward and for backward of each micro-batch; stages 1 and 2 once after an update.
  const int64_t stage = int_setting(engine_, "zero_optimization.stage");
  const int64_t passes = stage == 3 ? 2 * int_setting(engine_, "gradient_accumulation_steps") : stage == 0 ? 0 : 1;
  const int64_t threshold = int_setting(engine_, "zero_optimization.param_persistence_threshold");
  const int64_t room = int_setting(engine_, "zero_optimization.model_persistence_threshold");
  const double bytes = passes == 0 ? 0 : model_.gather_bytes(passes, threshold, room);
  const int world = strata_world(engine_);
  say("  gathered bytes per step: counted %.0f; formula %lld x weight bytes x (%d - 1) / %d = %.0f", counted,
      (long long)passes, world, world, bytes);
}

void Report::held_out(uint64_t done, double loss, uint64_t samples) {
  say("step %llu  held-out loss %.6f  (%.3f bits per byte, %llu samples)", (unsigned long long)done, loss,
      loss / std::numbers::ln2, (unsigned long long)samples);
}

void Report::say(const char* format, ...) {
  if (!prints_) return;
  if (terminal_) std::fputs("\r\033[K", stdout);  // over the progress bar
  va_list args;
  va_start(args, format);
  std::vprintf(format, args);
  va_end(args);
  std::fputc('\n', stdout);
  std::fflush(stdout);
}

void Report::progress_bar(uint64_t done, double loss) {
  constexpr int kWidth = 40;
  const std::string filled(done * kWidth / total_steps_, '#');
  std::printf("\r\033[K[%-*s] %llu/%llu  loss %.3f", kWidth, filled.c_str(), (unsigned long long)done,
              (unsigned long long)total_steps_, loss);
  std::fflush(stdout);
}

}  // namespace gpt
