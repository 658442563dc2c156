// float_environment.h - arithmetic as the standard has it, whatever mode the host runs in.
#pragma once

#include <cstdint>

namespace strata::adamw {

// For a block: the default rounding, no flush to zero, no traps; the thread's own settings return at the end.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;

 private:
  uint32_t saved_;
};

}  // namespace strata::adamw
