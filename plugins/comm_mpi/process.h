// process.h - MPI as this process has it: started once, stopped once, never waited for without a limit.
//
// MPI is a thing of the process: it can be initialised and finalised only once, and the calls that involve all ranks
// (MPI_Init, MPI_Comm_dup, ...) block with no time limit. So one thread of the process, the keeper, makes all calls
// that block, and the thread that wants one waits for the keeper as long as its own deadline lets it. A keeper that is
// still blocked after that is left where it is; every later request is then refused at once.
//
// Where the host has initialised MPI we only use it. Where we did, MPI_Finalize runs when the process exits, not when
// an instance closes: closing must not wait for other ranks, and a process may open again. After a failure of any
// instance it does not run at all, because it would wait for ranks that may never come.
//
// This is the plugin's only mutable global, as the MPI library behind it is one. It is never destroyed.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "plugin_kit/deadline.h"
#include "plugin_kit/error.h"

namespace comm_mpi {

using strata::plugin_kit::Deadline;
using strata::plugin_kit::Error;

// An error when an MPI function did not return MPI_SUCCESS; `what` names the function and what it was for.
Error check_mpi(int code, const std::string& what);

class Process {
 public:
  static Process& get();

  // MPI runs with MPI_THREAD_MULTIPLE, initialised by the host or now.
  Error start(const Deadline& deadline);
  // Runs `work` on the keeper and waits for it. Work owns what it writes to: it may outlive this call.
  Error run(const std::string& what, std::function<Error()> work, const Deadline& deadline);

  // An instance has failed: MPI_Finalize is left out. [any thread]
  void give_up() { gave_up_.store(true); }
  // A transfer was left under way: MPI would go on writing to its memory as soon as anybody made progress, so nothing
  // is opened here any more. [any thread]
  void leave_unfinished() { unfinished_.store(true); }
  // Memory that MPI may still use when its owner is gone.
  void keep(std::shared_ptr<void> memory);

 private:
  struct Task {
    std::function<Error()> work;
    bool done = false;
    Error result;
  };

  Error initialise();
  void work();
  static void at_exit();
  void finalise();

  std::mutex mutex_;
  std::condition_variable changed_;  // a task was added, or is done
  std::deque<std::shared_ptr<Task>> tasks_;
  std::vector<std::shared_ptr<void>> kept_;
  std::string stuck_;  // what the keeper was still blocked in when somebody's deadline passed
  bool started_ = false;
  bool keeper_runs_ = false;
  pid_t pid_ = 0;
  std::atomic<bool> gave_up_{false};
  std::atomic<bool> unfinished_{false};
};

}  // namespace comm_mpi
