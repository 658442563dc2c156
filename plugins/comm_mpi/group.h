// group.h - who this rank is, and the communicators of one instance.
//
// Rank and world are those of MPI_COMM_WORLD, which mpirun (or any launcher Open MPI understands) has set up; a process
// started without one is a world of 1. An instance has two communicators of its own, so that its messages never meet
// the host's or another instance's: `data` and `control`. They are never freed: that is a collective call, and an
// instance closes without waiting for others.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "collective_kit/slots.h"
#include "process.h"
#include "strata/host.h"

namespace comm_mpi {

namespace collective_kit = strata::collective_kit;

struct Group {
  MPI_Comm data = MPI_COMM_NULL;
  MPI_Comm control = MPI_COMM_NULL;
  int rank = 0;
  int world = 1;
  int local_rank = 0;
  int local_world = 1;
  std::string job;
  std::string node;          // this machine's name, for errors of the others
  std::vector<int> numbers;  // of a part: the ranks' numbers in what was opened, for errors

  int number(int r) const { return numbers.empty() ? r : numbers[static_cast<size_t>(r)]; }
};

// Refuses ranks that are threads before MPI is touched.
Error check_args(const strata_open_args& args);
// Every rank of the job calls this in its open. MPI runs already.
Error join(const strata_open_args& args, const Deadline& deadline, Group* out);
// Every rank of `whole` calls this in a split of it.
Error join_part(const Group& whole, const collective_kit::Part& part, const Deadline& deadline, Group* out);

}  // namespace comm_mpi
