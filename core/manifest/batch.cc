#include "core/manifest/batch.h"

namespace strata {
namespace {

// total = micro * accumulation * world, or false when it does not fit into 64 bits.
bool product(int64_t a, int64_t b, int64_t c, int64_t* out) {
  return !__builtin_mul_overflow(a, b, out) && !__builtin_mul_overflow(*out, c, out);
}

std::string number_or_open(int64_t value) { return value ? std::to_string(value) : "not given"; }

std::string one(const Settings& s, const char* key, int64_t value) {
  return std::string(key) + " = " + number_or_open(value) + (value ? " (" + s.origin(key) + ")" : "");
}

std::string all_numbers(const Settings& s, int64_t world) {
  return one(s, "train_batch_size", s.train_batch_size) + ", " +
         one(s, "train_micro_batch_size_per_gpu", s.train_micro_batch_size_per_gpu) + ", " +
         one(s, "gradient_accumulation_steps", s.gradient_accumulation_steps) + ", world = " + std::to_string(world);
}

// The multiples of `step` around `total`: "252 or 266".
std::string nearest_totals(int64_t total, int64_t step) {
  const int64_t low = total / step * step;
  int64_t high = 0;
  const bool fits = !__builtin_add_overflow(low, step, &high);
  if (low == 0) return std::to_string(step);
  return std::to_string(low) + (fits ? " or " + std::to_string(high) : "");
}

}  // namespace

Status resolve_batch(int64_t world, Settings* settings) {
  Settings& s = *settings;
  int64_t total = s.train_batch_size, micro = s.train_micro_batch_size_per_gpu;
  int64_t steps = s.gradient_accumulation_steps;
  const auto fail = [&](const std::string& text) {
    return Status(STRATA_INVALID_ARGUMENT, "batch sizes: " + text + "; " + all_numbers(s, world));
  };
  if (world < 1 || total < 0 || micro < 0 || steps < 0) return fail("every number must be at least 1");
  if (total == 0 && micro == 0) return fail("give `train_micro_batch_size_per_gpu` or `train_batch_size`");

  // One or two of micro and steps are known; what a total must be a multiple of follows from them and the world.
  if (steps == 0 && (micro == 0 || total == 0)) steps = 1;
  int64_t step = 0;
  if (!product(micro ? micro : 1, steps ? steps : 1, world, &step)) return fail("the total does not fit into 64 bits");
  if (total == 0) {
    total = step;
  } else if (total % step != 0 || (micro && steps && total != step)) {
    const bool fixed = micro && steps;
    return fail("train_batch_size must be " + std::string(fixed ? "exactly" : "a multiple of") + " " +
                std::to_string(step) + (fixed ? "" : "; nearest: " + nearest_totals(total, step)));
  }
  if (micro == 0) micro = total / step;
  if (steps == 0) steps = total / step;
  s.train_batch_size = total;
  s.train_micro_batch_size_per_gpu = micro;
  s.gradient_accumulation_steps = steps;
  return Ok();
}

}  // namespace strata
