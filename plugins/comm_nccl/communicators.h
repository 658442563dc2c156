// communicators.h - the two communicators of a rank: one for gathers, one for reductions, so that a gather and a
// reduction run at once on streams of their own.
//
// What NCCL does not bound is done on a thread of its own and left there when it does not return in time: making,
// destroying and aborting. `calls` is held around every use; an abort waits for it a moment and then goes on, since a
// call that hangs inside NCCL ends only by the abort.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "gpu.h"
#include "library.h"
#include "plugin_kit/deadline.h"
#include "plugin_kit/error.h"

namespace comm_nccl {

using strata::plugin_kit::Deadline;
using strata::plugin_kit::Error;

class Communicators : public std::enable_shared_from_this<Communicators> {
 public:
  Communicators(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Gpu> gpu)
      : nccl_(std::move(nccl)), gpu_(std::move(gpu)) {}

  // Gives up early when `stop` says so: a rank is gone.
  Error open(int rank, int world, const ncclUniqueId& id, const Deadline& deadline, const std::function<bool()>& stop);

  const Nccl& nccl() const { return *nccl_; }
  ncclComm_t gathers() const { return comms_[0]; }
  ncclComm_t reductions() const { return comms_[1]; }
  std::mutex& calls() { return calls_; }
  // INTERNAL with NCCL's words, unless all is well.
  Error check(ncclResult_t result, const std::string& what) const;
  // What NCCL found by itself on its own threads.
  Error asynchronous_error();

  // Both end the communicators, in bounded time; "" or what did not return.
  std::string abort();
  std::string destroy();
  bool usable() const { return usable_.load(); }
  // Something of NCCL still runs and may touch memory: nothing may be given back.
  bool leaked() const { return leaked_.load(); }

 private:
  Error make(int rank, int world, ncclUniqueId id);
  std::string end(const char* what, decltype(&ncclCommAbort) function);

  const std::shared_ptr<const Nccl> nccl_;
  const std::shared_ptr<Gpu> gpu_;
  std::mutex calls_;
  ncclComm_t comms_[2] = {};
  std::atomic<bool> usable_{false};
  std::atomic<bool> leaked_{false};
};

// Runs `body` on a thread of its own; false when it was not done in time, or before `stop` said so, and was left to
// itself. What `body` captures must live on.
bool run_bounded(const Deadline& deadline, std::function<void()> body, const std::function<bool()>& stop = {});

}  // namespace comm_nccl
