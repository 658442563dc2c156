// adamw_scalar.cc - the kernels for any CPU: the reference arithmetic, one element at a time.
#include "adamw_loop.h"

namespace strata::adamw {

const Kernels* scalar_kernels() {
  static constexpr Kernels table = make_kernels<One>();
  return &table;
}

}  // namespace strata::adamw
