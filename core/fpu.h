// fpu.h - threads of the core compute with the default floating-point environment.
//
// A new thread inherits its creator's control word; a host that set flush-to-zero would otherwise change our numbers.
#pragma once

#include <cfenv>

namespace strata {

inline void use_default_rounding() { std::fesetenv(FE_DFL_ENV); }

}  // namespace strata
