// mpi_ranks.h - which rank of mpirun's this process is.
#pragma once

#include "ranks.h"

namespace strata::test {
int mpi_rank();
int mpi_world();
}  // namespace strata::test
