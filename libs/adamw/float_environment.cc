// float_environment.cc - see float_environment.h.
#include "adamw/float_environment.h"

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace strata::adamw {

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(saved_); }
#else
// Elsewhere a rounding mode is all that portable C++ can set.
FloatEnvironment::FloatEnvironment() : saved_(static_cast<uint32_t>(std::fegetround())) {
  std::fesetround(FE_TONEAREST);
}
FloatEnvironment::~FloatEnvironment() { std::fesetround(static_cast<int>(saved_)); }
#endif

}  // namespace strata::adamw
