#include "rank_env/rank_env.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "plugin_kit/error.h"

namespace strata::rank_env {
namespace {

// One launcher's contract. Optional names may be absent; `job` lists where the job's name comes from, all that are set
// joined by '.', because torchrun calls every static run "none" and Slurm numbers steps within a job.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world;
  const char* local_rank;
  const char* local_world;  // NULL: the launcher has none, see `nodes`
  const char* nodes;        // a count of machines; not set: one
  bool local_required;
  bool world_marks;  // the world size alone already says that this launcher is at work
  std::vector<const char*> job;
  bool job_all;  // every job variable is required, not just one
};

const std::vector<Launcher>& launchers() {
  static const std::vector<Launcher> all = {
      {"STRATA",
       "STRATA_RANK",
       "STRATA_WORLD_SIZE",
       "STRATA_LOCAL_RANK",
       "STRATA_LOCAL_WORLD_SIZE",
       nullptr,
       false,
       true,
       {"STRATA_JOB"},
       true},
      {"torchrun",
       "RANK",
       "WORLD_SIZE",
       "LOCAL_RANK",
       "LOCAL_WORLD_SIZE",
       nullptr,
       true,
       true,
       {"TORCHELASTIC_RUN_ID", "MASTER_PORT"},
       false},
      {"Open MPI",
       "OMPI_COMM_WORLD_RANK",
       "OMPI_COMM_WORLD_SIZE",
       "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE",
       nullptr,
       true,
       true,
       {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"},
       false},
      // An salloc shell has SLURM_NTASKS without being a task, so only SLURM_PROCID marks one.
      {"Slurm",
       "SLURM_PROCID",
       "SLURM_NTASKS",
       "SLURM_LOCALID",
       nullptr,
       "SLURM_STEP_NUM_NODES",
       true,
       false,
       {"SLURM_JOB_ID", "SLURM_STEP_ID"},
       true},
  };
  return all;
}

const char* value_of(const char* name) {
  const char* value = name ? std::getenv(name) : nullptr;
  return value && *value ? value : nullptr;
}

bool parse(const char* text, int* out) {
  int64_t value = 0;
  for (const char* p = text; *p; ++p) {
    if (*p < '0' || *p > '9' || p - text > 8) return false;
    value = value * 10 + (*p - '0');
  }
  *out = static_cast<int>(value);
  return true;
}

// Reads one number; a missing required one goes to `missing`.
Error read_number(const Launcher& from, const char* name, bool required, int* out, std::string* missing) {
  const char* text = value_of(name);
  if (!text) {
    if (required) *missing += std::string(missing->empty() ? "" : ", ") + name;
    return {};
  }
  if (parse(text, out)) return {};
  return {STRATA_INVALID_ARGUMENT, std::string("environment of ") + from.name + ": " + name + "=\"" + text +
                                       "\" is not a number from 0 to 999999999"};
}

Error read_job(const Launcher& from, Identity* out, std::string* missing) {
  std::string job;
  for (const char* name : from.job) {
    if (const char* text = value_of(name)) {
      job += (job.empty() ? "" : ".") + std::string(text);
    } else if (from.job_all) {
      *missing += std::string(missing->empty() ? "" : ", ") + name;
    }
  }
  if (job.empty() && !from.job_all) {
    *missing += std::string(missing->empty() ? "" : ", ") + from.job[0] + " or " + from.job[1];
  }
  out->job = job;
  return {};
}

// Slurm lists tasks by machine: "4", "2(x3),1". -1 where that says nothing about this machine.
int slurm_tasks_here() {
  const char* list = value_of("SLURM_STEP_TASKS_PER_NODE");
  const char* node = value_of("SLURM_NODEID");
  long index = node ? std::strtol(node, nullptr, 10) : -1;
  while (list && *list && index >= 0) {
    char* end = nullptr;
    const long tasks = std::strtol(list, &end, 10);
    long machines = 1;
    if (end[0] == '(' && end[1] == 'x') machines = std::strtol(end + 2, &end, 10);
    if (index < machines) return static_cast<int>(tasks);
    index -= machines;
    const char* comma = std::strchr(end, ',');
    list = comma ? comma + 1 : nullptr;
  }
  return -1;
}

Error read_launcher(const Launcher& from, bool need_job, Identity* out) {
  std::string missing;
  int nodes = 1;
  out->local_rank = -1;
  out->local_world = -1;
  Error e = read_number(from, from.rank, true, &out->rank, &missing);
  if (e.ok()) e = read_number(from, from.world, true, &out->world, &missing);
  if (e.ok()) e = read_number(from, from.local_rank, from.local_required, &out->local_rank, &missing);
  if (e.ok() && from.local_world) {
    e = read_number(from, from.local_world, from.local_required, &out->local_world, &missing);
  }
  if (e.ok() && from.nodes) e = read_number(from, from.nodes, false, &nodes, &missing);
  if (e.ok() && need_job) e = read_job(from, out, &missing);
  if (!e.ok()) return e;
  if (!missing.empty()) {
    return {STRATA_INVALID_ARGUMENT, std::string("environment of ") + from.name + " is incomplete: " + missing +
                                         " not set; set them all, or none for a single rank"};
  }
  if (nodes != 1) {
    out->machines = std::string(from.nodes) + "=" + std::to_string(nodes);
    if (out->local_world < 0) out->local_world = slurm_tasks_here();
  }
  if (out->local_rank < 0) out->local_rank = out->rank;
  if (out->local_world < 0) out->local_world = out->world;
  return {};
}

bool marked(const Launcher& launcher) {
  if (value_of(launcher.rank)) return true;
  if (!launcher.world_marks) return false;
  return value_of(launcher.world) || value_of(launcher.local_rank) || value_of(launcher.local_world);
}

Error check(const Identity& id) {
  if (id.world < 1 || id.rank < 0 || id.rank >= id.world) {
    return wrong_identity(id, "the rank must be from 0 to world - 1");
  }
  if (id.local_rank < 0 || id.local_rank >= id.local_world) {
    return wrong_identity(id, "the local rank must be below the local world");
  }
  if (id.local_world > id.world) return wrong_identity(id, "the local world must be at most the world");
  if (id.world > 1 && id.job.empty()) {
    return wrong_identity(id, "ranks meet by the name of their job, and none is given");
  }
  return {};
}

}  // namespace

Error wrong_identity(const Identity& id, const std::string& why) {
  return {STRATA_INVALID_ARGUMENT, plugin_kit::join("rank ", id.rank, " of world ", id.world, " (local ", id.local_rank,
                                                    " of ", id.local_world, "): ", why)};
}

Error identify(const strata_open_args& args, Identity* out) {
  *out = Identity();
  out->threads = args.threads == 1;
  const bool named = args.job && *args.job;
  if (args.rank >= 0) {
    out->rank = args.rank;
    out->world = args.world;
    out->local_rank = args.local_rank;
    out->local_world = args.local_world;
  } else if (out->threads) {
    return {STRATA_INVALID_ARGUMENT,
            "ranks that are threads need their rank in the open arguments: an environment is "
            "shared by the whole process"};
  } else {
    for (const Launcher& launcher : launchers()) {
      if (!marked(launcher)) continue;
      Error e = read_launcher(launcher, !named, out);
      if (!e.ok()) return e;
      break;
    }
  }
  if (named) {
    out->job = args.job;
  } else if (out->job.empty() && !out->threads) {
    // A rank from the arguments without a job: any launcher's name will do.
    for (const Launcher& launcher : launchers()) {
      std::string ignored;
      if (out->job.empty()) (void)read_job(launcher, out, &ignored);
    }
  }
  if (out->job.empty() && out->world == 1) out->job = "local." + std::to_string(::getpid());
  return check(*out);
}

}  // namespace strata::rank_env
