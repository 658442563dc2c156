#include "core/progress.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>

#include "core/manifest/toml_doc.h"

namespace strata {

namespace {
constexpr size_t kMostOfNote = 1000;  // bytes

std::string text_of(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

// A number that may be anything: hundreds of digits are none to read.
std::string number_text(const char* usual, double value) {
  return text_of(std::fabs(value) < 1e15 ? usual : "%.6g", value);
}
}  // namespace

Progress::Progress(const Run& run, const Device& device, std::vector<const Tier*> tiers, const Plan& plan,
                   const strata_counters& now, LogFn log)
    : run_(run),
      device_(device),
      tiers_(std::move(tiers)),
      planned_on_device_(plan.in(kDeviceTier)),
      pinned_(plan.pinned()),
      log_(std::move(log)),
      counted_(now) {
  since_ = read();
}

// A tier that cannot say it now stands still until it can.
Progress::Time Progress::read() const {
  Time now = since_;
  now.at = Clock::now();
  for (const Tier* tier : tiers_) {
    uint64_t& busy = now.busy_ns[tier->kind()];
    busy = std::max(busy, tier->busy_ns());
  }
  return now;
}

void Progress::take_time() {
  const Time now = read();
  spent_.time += now.at - since_.at;
  for (int t = 0; t < 3; ++t) spent_.busy_ns[t] += now.busy_ns[t] - since_.busy_ns[t];
  since_ = now;
}

std::optional<Progress::Line> Progress::step(uint64_t step, double lr, const strata_step_args* args) {
  if (run_.every == 0) return std::nullopt;
  take_time();
  stepped_ = true;
  ++steps_;
  const uint64_t tokens = args ? args->tokens : 0;
  tokens_ = tokens > UINT64_MAX - tokens_ ? UINT64_MAX : tokens_ + tokens;
  all_gave_tokens_ = all_gave_tokens_ && tokens > 0;
  if (step % run_.every != 0) return std::nullopt;
  Line line{step, steps_, all_gave_tokens_ ? tokens_ : 0, args ? args->loss : 0, lr, 0, "", {}};
  line.seconds = std::chrono::duration<double>(spent_.time).count();
  for (int t = 0; t < 3 && line.seconds > 0; ++t) {
    if (since_.busy_ns[t] > 0) line.busy[t] = static_cast<double>(spent_.busy_ns[t]) / 1e9 / line.seconds;
  }
  if (args && args->note) line.note = printable(args->note, kMostOfNote);
  spent_ = {};
  steps_ = tokens_ = 0;
  all_gave_tokens_ = true;
  return line;
}

void Progress::print(const Line& line, const StepOutcome& outcome) {
  std::string text = "step " + std::to_string(line.step) + ": ";
  if (line.loss != 0) text += "loss " + number_text("%.6f", line.loss) + (run_.world > 1 ? " (rank 0), " : ", ");
  text += "grad norm " + number_text("%.4f", outcome.norm) + (outcome.apply ? "" : " (step skipped)");
  text += ", lr " + text_of("%.3g", line.lr) + ", " + speed(line) + "; " + memory();
  text += "; per step: " + traffic(minus(outcome.counted, counted_), line);
  counted_ = outcome.counted;
  log_(text + (line.note.empty() ? "" : "; " + line.note));
}

// Forward and backward of each param take 6 operations per token (PaLM, appendix B, without the attention term).
std::string Progress::speed(const Line& line) const {
  const double tokens = static_cast<double>(line.tokens);
  std::string text = text_of("%.1f ms", 1e3 * line.seconds / static_cast<double>(line.steps));
  if (line.tokens == 0 || line.seconds <= 0) return text;
  text += text_of(", %.0f tokens/s", tokens / line.seconds);
  text += text_of(" and %.3g TFLOP/s", 6e-12 * static_cast<double>(run_.params) * tokens / line.seconds);
  return text + (run_.world > 1 ? " per rank" : "");
}

// A device of the CPU domain has the host's memory.
std::string Progress::memory() {
  std::string text = "memory: device " + size_text(planned_on_device_) + " planned";
  strata_device_caps caps;
  if (device_.is_asynchronous() && read_caps(device_.api(), device_.self(), &caps).ok()) {
    most_on_device_ = std::max(most_on_device_, caps.total_bytes - caps.free_bytes);
    text += ", " + size_text(most_on_device_) + " in use at the most (all programs, at lines)";
  }
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  text += ", host " + size_text(static_cast<uint64_t>(use.ru_maxrss) * 1024) + " resident at the most";
  return text + (pinned_ > 0 ? ", " + size_text(pinned_) + " pinned" : "");
}

std::string Progress::traffic(const strata_counters& bytes, const Line& line) const {
  const uint64_t steps = line.steps;
  std::string text =
      "gathered " + size_text(bytes.gather_bytes / steps) + ", reduced " + size_text(bytes.reduce_bytes / steps);
  for (TierKind tier : {kDeviceTier, kCpuTier, kNvmeTier}) {
    if (bytes.tier_read[tier] + bytes.tier_write[tier] == 0) continue;
    text += std::string(", ") + tier_name(tier) + " read " + size_text(bytes.tier_read[tier] / steps) + " written " +
            size_text(bytes.tier_write[tier] / steps);
    if (line.busy[tier]) text += text_of(", busy %.0f %%", 100 * std::min(*line.busy[tier], 1.0));
  }
  return text;
}

}  // namespace strata
