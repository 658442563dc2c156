#include "process.h"

#include <mpi.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

namespace comm_mpi {

Error check_mpi(int code, const std::string& what) {
  if (code == MPI_SUCCESS) return {};
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  return {STRATA_UNAVAILABLE, what + ": " + std::string(text, static_cast<size_t>(length))};
}

Process& Process::get() {
  static Process* const process = new Process;
  return *process;
}

Error Process::run(const std::string& what, std::function<Error()> work, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  if (!stuck_.empty()) {
    return {STRATA_FAILED_PRECONDITION,
            what + ": MPI of this process has been blocked since an earlier open (" + stuck_ + "); end the process"};
  }
  if (unfinished_.load()) {
    return {STRATA_FAILED_PRECONDITION,
            what + ": a collective that failed earlier left a transfer under way in this process; end the process"};
  }
  if (!keeper_runs_) {
    std::thread([this] { this->work(); }).detach();
    keeper_runs_ = true;
    pid_ = ::getpid();
  }
  if (pid_ != ::getpid()) return {STRATA_FAILED_PRECONDITION, what + ": MPI cannot be used in a forked child"};
  auto task = std::make_shared<Task>();
  task->work = std::move(work);
  tasks_.push_back(task);
  changed_.notify_all();
  if (changed_.wait_until(lock, deadline.point(), [&] { return task->done; })) return task->result;
  stuck_ = what;
  gave_up_.store(true);
  return {STRATA_DEADLINE_EXCEEDED, what + ": waited " + deadline.text() +
                                        " for the ranks of this MPI job; MPI does not say which of them are missing"};
}

// The keeper. Signals are for the host's threads.
void Process::work() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    const std::shared_ptr<Task> task = tasks_.front();
    tasks_.pop_front();
    lock.unlock();
    Error result;
    try {
      result = task->work();
    } catch (const std::exception& e) {
      result = {STRATA_INTERNAL, e.what()};
    }
    lock.lock();
    task->result = std::move(result);
    task->done = true;
    changed_.notify_all();
  }
}

Error Process::start(const Deadline& deadline) {
  return run(
      "starting MPI", [this] { return initialise(); }, deadline);
}

Error Process::initialise() {
  if (started_) return {};
  int finalised = 0, initialised = 0, level = MPI_THREAD_SINGLE;
  MPI_Finalized(&finalised);
  if (finalised) return {STRATA_FAILED_PRECONDITION, "MPI_Finalize was called in this process; it cannot start again"};
  MPI_Initialized(&initialised);
  if (initialised) {
    MPI_Query_thread(&level);
  } else {
    if (Error e = check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread"); !e.ok())
      return e;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    std::atexit(&Process::at_exit);
  }
  if (level != MPI_THREAD_MULTIPLE) {
    return {STRATA_FAILED_PRECONDITION, std::string("MPI was initialised ") + (initialised ? "by the host " : "") +
                                            "with thread level " + std::to_string(level) +
                                            "; collectives run beside the host's threads and need "
                                            "MPI_THREAD_MULTIPLE (" +
                                            std::to_string(MPI_THREAD_MULTIPLE) + ")"};
  }
  started_ = true;
  return {};
}

void Process::keep(std::shared_ptr<void> memory) {
  std::lock_guard lock(mutex_);
  kept_.push_back(std::move(memory));
}

void Process::at_exit() { get().finalise(); }

// On the thread that called MPI_Init, as the standard asks. Without a failure it waits for the other ranks' exit, as
// every MPI program does: a rank that went ahead would be taken for a crash by mpirun, which then ends the job.
void Process::finalise() {
  std::unique_lock lock(mutex_);
  if (gave_up_.load() || pid_ != ::getpid()) return;
  auto task = std::make_shared<Task>();
  task->work = [] {
    int finalised = 0;
    MPI_Finalized(&finalised);
    return finalised ? Error() : check_mpi(MPI_Finalize(), "MPI_Finalize");
  };
  tasks_.push_back(task);
  changed_.notify_all();
  changed_.wait(lock, [&] { return task->done; });
}

}  // namespace comm_mpi
