// env.h - which rank am I, and can it be served here: one machine, at most kMaxRanks ranks.
#pragma once

#include "rank_env/rank_env.h"

namespace comm_local {

using strata::rank_env::Error;
using strata::rank_env::Identity;

Error identify_here(const strata_open_args& args, Identity* out);

}  // namespace comm_local
