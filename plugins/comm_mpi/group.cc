#include "group.h"

#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "process.h"

namespace comm_mpi {
namespace {

const char* env(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

// A launcher that MPI does not know starts every rank as a world of 1. Each of them would train alone and say nothing,
// so the launchers' own variables are looked at.
Error check_launcher(int world) {
  struct Mark {
    const char* world;
    const char* rank;  // must be set too: an salloc shell has SLURM_NTASKS without being a task
  };
  for (const Mark& mark :
       {Mark{"STRATA_WORLD_SIZE", "STRATA_RANK"}, Mark{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
        Mark{"PMI_SIZE", "PMI_RANK"}, Mark{"WORLD_SIZE", "RANK"}, Mark{"SLURM_NTASKS", "SLURM_PROCID"}}) {
    const char* size = env(mark.world);
    if (!size || !env(mark.rank) || std::to_string(world) == size) continue;
    return {STRATA_FAILED_PRECONDITION, std::string("MPI_COMM_WORLD has ") + std::to_string(world) + " ranks, but " +
                                            mark.world + "=" + size +
                                            ": the launcher of this job is not one that Open MPI understands; start "
                                            "the ranks with mpirun, or unset " +
                                            mark.world};
  }
  return {};
}

Error check_rank(const strata_open_args& args, int rank, int world) {
  if (args.rank < 0 || (args.rank == rank && args.world == world)) return {};
  return {STRATA_INVALID_ARGUMENT, "open as rank " + std::to_string(args.rank) + " of " + std::to_string(args.world) +
                                       ", but MPI has this process as rank " + std::to_string(rank) + " of " +
                                       std::to_string(world)};
}

std::string job_name(const strata_open_args& args, int world) {
  if (args.job && *args.job) return args.job;
  for (const char* name : {"STRATA_JOB", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (const char* value = env(name)) return value;
  }
  return world == 1 ? "mpi." + std::to_string(::getpid()) : "mpi";
}

// The calls that block, on the keeper.
Error make_communicators(MPI_Comm base, Group* group) {
  for (MPI_Comm* comm : {&group->data, &group->control}) {
    if (Error e = check_mpi(MPI_Comm_dup(base, comm), "MPI_Comm_dup"); !e.ok()) return e;
    if (Error e = check_mpi(MPI_Comm_set_errhandler(*comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler"); !e.ok())
      return e;
  }
  MPI_Comm local = MPI_COMM_NULL;
  Error e = check_mpi(MPI_Comm_split_type(group->data, MPI_COMM_TYPE_SHARED, group->rank, MPI_INFO_NULL, &local),
                      "MPI_Comm_split_type");
  if (!e.ok()) return e;
  MPI_Comm_rank(local, &group->local_rank);
  MPI_Comm_size(local, &group->local_world);
  MPI_Comm_free(&local);
  return {};
}

}  // namespace

Error check_args(const strata_open_args& args) {
  if (args.threads != 1 || (args.world == 1 && args.rank == 0)) return {};
  return {STRATA_INVALID_ARGUMENT, "open as rank " + std::to_string(args.rank) + " of " + std::to_string(args.world) +
                                       " with ranks that are threads: MPI has one rank per process; comm_local serves "
                                       "ranks that are threads"};
}

Error join(const strata_open_args& args, const Deadline& deadline, Group* out) {
  const auto group = std::make_shared<Group>();  // shared: the keeper may still write to it after a deadline
  const MPI_Comm base = args.threads == 1 ? MPI_COMM_SELF : MPI_COMM_WORLD;
  MPI_Comm_rank(base, &group->rank);
  MPI_Comm_size(base, &group->world);
  if (base == MPI_COMM_WORLD) {
    if (Error e = check_launcher(group->world); !e.ok()) return e;
    if (Error e = check_rank(args, group->rank, group->world); !e.ok()) return e;
  }
  group->job = job_name(args, group->world);
  char node[MPI_MAX_PROCESSOR_NAME] = "";
  int length = 0;
  MPI_Get_processor_name(node, &length);
  group->node.assign(node, static_cast<size_t>(length));
  const std::string what = "opening job \"" + group->job + "\" (rank " + std::to_string(group->rank) + " of " +
                           std::to_string(group->world) + ")";
  Error e = Process::get().run(
      what, [base, group] { return make_communicators(base, group.get()); }, deadline);
  if (e.ok()) *out = *group;
  return e;
}

Error join_part(const Group& whole, const collective_kit::Part& part, const Deadline& deadline, Group* out) {
  const auto group = std::make_shared<Group>(whole);
  group->rank = part.rank;
  group->world = part.world();
  group->job += part.name;
  group->numbers.clear();
  for (int member : part.members) group->numbers.push_back(whole.number(member));
  const auto work = [base = whole.data, colour = part.members[0], group] {
    MPI_Comm mine = MPI_COMM_NULL;
    Error e = check_mpi(MPI_Comm_split(base, colour, group->rank, &mine), "MPI_Comm_split");
    return e.ok() ? make_communicators(mine, group.get()) : e;
  };
  Error e = Process::get().run("splitting job \"" + whole.job + "\"", work, deadline);
  if (e.ok()) *out = *group;
  return e;
}

}  // namespace comm_mpi
