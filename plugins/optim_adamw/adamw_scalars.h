// adamw_scalars.h - the fp32 scalars of one step, from the settings the host gave in fp64.
#pragma once

#include <string>

#include "strata/iface/optimizer.h"

namespace strata::adamw {

// Fills out[STRATA_OPTIM_SCALARS] by the layout of ScalarIndex: fp64 arithmetic, every scalar rounded once. The result
// depends on the arguments only. False, with `error` naming the setting and its value, when they are out of range.
bool compute_scalars(const strata_optim_group& group, uint64_t step, bool decoupled, float* out, std::string* error);

}  // namespace strata::adamw
