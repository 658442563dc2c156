// rank_env.h - which rank am I? From the open arguments, or else from the launcher's environment.
//
// A launcher is recognised by any of its marks; from then on its whole set has to be there and make sense. Half a set
// is an error that names the variables: a rank that fell back to world 1 would train alone and say nothing.
// Order: STRATA_*, torchrun, Open MPI, Slurm. What a plugin cannot serve (several machines, too many ranks) it refuses
// itself.
#pragma once

#include <string>

#include "plugin_kit/error.h"
#include "strata/host.h"

namespace strata::rank_env {

using plugin_kit::Error;

struct Identity {
  int rank = 0;
  int world = 1;
  int local_rank = 0;
  int local_world = 1;
  bool threads = false;
  std::string job;
  std::string machines;  // "SLURM_STEP_NUM_NODES=2" where the launcher says that there are several
};

Error identify(const strata_open_args& args, Identity* out);

// "rank 3 of world 2 (local 0 of 1): why"
Error wrong_identity(const Identity& id, const std::string& why);

}  // namespace strata::rank_env
