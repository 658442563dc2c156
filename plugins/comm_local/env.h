// env.h - which rank am I? From the open arguments, or else from the launcher's environment.
//
// A launcher is recognised by any of its marks; from then on its whole set has to be there and make sense. Half a set
// is an error that names the variables: a rank that fell back to world 1 would train alone and say nothing.
// Order: STRATA_*, torchrun, Open MPI, Slurm. One machine only: local world and world are the same.
#pragma once

#include <string>

#include "plugin_kit/error.h"
#include "strata/host.h"

namespace comm_local {

using strata::plugin_kit::Error;

struct Identity {
  int rank = 0;
  int world = 1;
  int local_rank = 0;
  int local_world = 1;
  bool threads = false;
  std::string job;
};

Error identify(const strata_open_args& args, Identity* out);

}  // namespace comm_local
