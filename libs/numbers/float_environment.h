// float_environment.h - arithmetic as the standard has it, whatever mode the host runs in.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif
#include <cstdint>

namespace strata::numbers {

// For a block: the default rounding, no flush to zero, no traps; the thread's own settings return at the end.
class FloatEnvironment {
 public:
#if defined(__x86_64__)
  FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatEnvironment() { _mm_setcsr(saved_); }
#else
  // Elsewhere a rounding mode is all that portable C++ can set.
  FloatEnvironment() : saved_(static_cast<uint32_t>(std::fegetround())) { std::fesetround(FE_TONEAREST); }
  ~FloatEnvironment() { std::fesetround(static_cast<int>(saved_)); }
#endif
  FloatEnvironment(const FloatEnvironment&) = delete;

 private:
  uint32_t saved_;
};

}  // namespace strata::numbers
