// report.cc - see report.h.
#include "report.h"

#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <numbers>
#include <string>
#include <vector>

namespace gpt {
namespace {

double mib(double bytes) { return bytes / (1 << 20); }

double resident_bytes() {  // VmRSS of this process; shared memory counts in every process that maps it
  double kib = 0;
  char line[256];
  FILE* file = std::fopen("/proc/self/status", "r");
  while (file && std::fgets(line, sizeof line, file) && std::sscanf(line, "VmRSS: %lf kB", &kib) != 1) {
  }
  if (file) std::fclose(file);
  return kib * 1024;
}

}  // namespace

Report::Report(strata_engine* engine, const ShardedModel& model, uint64_t total_steps, double tokens_per_step,
               bool gather)
    : engine_(engine),
      model_(model),
      total_steps_(total_steps),
      tokens_per_step_(tokens_per_step),
      gather_(gather),
      prints_(strata_rank(engine) == 0),
      terminal_(isatty(STDOUT_FILENO)),
      every_(uint64_t(int_setting(engine, "steps_per_print"))) {
  restart_clock();
}

void Report::restart_clock() {
  if (prints_) counted_from_ = counters();
  timed_from_ = std::chrono::steady_clock::now();
  timed_steps_ = 0;
}

void Report::step(uint64_t done, double loss, double learning_rate) {
  ++timed_steps_;
  if (!prints_) return;
  if (every_ != 0 && (done % every_ == 0 || done == total_steps_)) {
    speed(done, loss, learning_rate);
    memory();
    traffic();
    restart_clock();
  }
  if (terminal_ && done < total_steps_) progress_bar(done, loss);
}

void Report::speed(uint64_t done, double loss, double learning_rate) {
  strata_step_info info;
  STRATA_INIT(&info);
  check(strata_get_step_info(engine_, &info), "reading the gradient norm");  // waits for the norm, not the update
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - timed_from_;
  const double seconds = time.count() / double(timed_steps_);
  say("step %llu/%llu  loss %.6f  grad norm %.4f%s  lr %.3g  %.0f tokens/s  %.3f s/step", (unsigned long long)done,
      (unsigned long long)total_steps_, loss, info.grad_norm, info.was_applied ? "" : " (skipped: not finite)",
      learning_rate, tokens_per_step_ / seconds, seconds);
}

void Report::memory() {
  uint64_t count = 0;
  check(strata_get_plan(engine_, nullptr, 0, &count), "reading the plan");
  std::vector<strata_plan_item> plan(count);
  for (strata_plan_item& item : plan) STRATA_INIT(&item);
  check(strata_get_plan(engine_, plan.data(), count, &count), "reading the plan");
  double tier[3] = {};
  for (const strata_plan_item& item : plan) tier[item.tier] += double(item.bytes);
  say("  memory: planned on the device %.1f, in host RAM %.1f, on nvme %.1f MiB; this process %.1f MiB", mib(tier[0]),
      mib(tier[1]), mib(tier[2]), mib(resident_bytes()));
}

// Totals once the last step's update, which runs on after strata_step, is done: so that steps are counted whole.
strata_counters Report::counters() const {
  strata_counters c;
  STRATA_INIT(&c);
  check(strata_wait(engine_), "waiting for the update");
  check(strata_get_counters(engine_, STRATA_COUNT_TOTAL, &c), "reading the counters");
  return c;
}

void Report::traffic() {
  const strata_counters c = counters(), from = counted_from_;
  const auto per_step = [this](uint64_t now, uint64_t before) { return double(now - before) / double(timed_steps_); };
  const double gathered = per_step(c.gather_bytes, from.gather_bytes);
  double read = 0, written = 0;
  for (int tier = 0; tier < 3; ++tier) {
    read += per_step(c.tier_read[tier], from.tier_read[tier]);
    written += per_step(c.tier_write[tier], from.tier_write[tier]);
  }
  say("  per step: gathered %.2f, reduced %.2f, tiers read %.2f, written %.2f MiB", mib(gathered),
      mib(per_step(c.reduce_bytes, from.reduce_bytes)), mib(read), mib(written));
  if (!gather_) return;
  // Stage 3 gathers for forward and for backward of each micro-batch; stages 1 and 2 once after an update.
  const int64_t stage = int_setting(engine_, "zero_optimization.stage");
  const int64_t passes = stage == 3 ? 2 * int_setting(engine_, "gradient_accumulation_steps") : stage == 0 ? 0 : 1;
  const int64_t threshold = int_setting(engine_, "zero_optimization.param_persistence_threshold");
  const double bytes = passes == 0 ? 0 : model_.gather_bytes(passes, threshold);
  const int world = strata_world(engine_);
  say("  gathered bytes per step: counted %.0f; formula %lld x weight bytes x (%d - 1) / %d = %.0f", gathered,
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
