// kernels_scalar.cc - the kernels one number at a time: the reference for the others, and the path of any machine.
#include "kernels_body.h"

namespace strata::device_host {

const Kernels* scalar_kernels() { return kernel_table<Scalar>("scalar"); }

}  // namespace strata::device_host
