#include "communicators.h"

#include <condition_variable>
#include <thread>

#include "plugin_kit/plugin_kit.h"

namespace comm_nccl {
namespace {

using strata::plugin_kit::join;

constexpr std::chrono::milliseconds kSlice{20};
constexpr std::chrono::milliseconds kForRunningCall{500};
constexpr std::chrono::seconds kForEnding{5};
constexpr const char* kNames[] = {"gathers", "reductions"};

}  // namespace

bool run_bounded(const Deadline& deadline, std::function<void()> body, const std::function<bool()>& stop) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const auto state = std::make_shared<State>();
  std::thread([state, body = std::move(body)]() mutable {
    body();
    body = nullptr;  // what it holds is gone when the wait ends
    std::lock_guard lock(state->mutex);
    state->done = true;
    state->changed.notify_all();
  }).detach();
  std::unique_lock lock(state->mutex);
  while (!state->changed.wait_for(lock, kSlice, [&] { return state->done; })) {
    if (deadline.passed() || (stop && stop())) return false;
  }
  return true;
}

Error Communicators::check(ncclResult_t result, const std::string& what) const {
  if (result == ncclSuccess) return {};
  const char* more = nccl_->last_error(nullptr);
  return {STRATA_INTERNAL, join(what, ": NCCL: ", nccl_->error_string(result), more && *more ? ": " : "",
                                more ? more : "", " (NCCL_DEBUG=INFO says more)")};
}

Error Communicators::make(int rank, int world, ncclUniqueId id) {
  const auto current = gpu_->enter();
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 1;
  ncclComm_t comms[2] = {};
  const std::string what = join("making the communicators of rank ", rank, " of ", world, " on GPU ", gpu_->ordinal());
  if (Error e = check(nccl_->init_rank(&comms[0], world, id, rank, &config), what); !e.ok()) return e;
  // A duplicate with channels and buffers of its own, which is what lets the two run at once.
  if (Error e = check(nccl_->split(comms[0], 0, rank, &comms[1], &config), what); !e.ok()) return e;
  comms_[0] = comms[0];
  comms_[1] = comms[1];
  return {};
}

Error Communicators::open(int rank, int world, const ncclUniqueId& id, const Deadline& deadline,
                          const std::function<bool()>& stop) {
  const auto made = std::make_shared<Error>();
  const auto self = shared_from_this();
  const bool returned = run_bounded(
      deadline,
      [self, made, rank, world, id] {
        *made = strata::plugin_kit::attempt([&] { return self->make(rank, world, id); });
      },
      stop);
  if (!returned) {
    leaked_ = true;
    return {STRATA_DEADLINE_EXCEEDED, join("NCCL did not finish making the communicators of rank ", rank, " of ", world,
                                           " in ", deadline.text(), "; the attempt is left behind")};
  }
  if (made->ok()) usable_ = true;
  return *made;
}

Error Communicators::asynchronous_error() {
  std::unique_lock lock(calls_, std::try_to_lock);
  if (!lock || !usable_) return {};
  for (int k = 0; k < 2; ++k) {
    ncclResult_t state = ncclSuccess;
    if (Error e = check(nccl_->async_error(comms_[k], &state), "asking NCCL how it is"); !e.ok()) return e;
    if (state == ncclInProgress) continue;
    if (Error e = check(state, join("the communicator of ", kNames[k])); !e.ok()) return e;
  }
  return {};
}

std::string Communicators::abort() { return end("ncclCommAbort", nccl_->abort); }
std::string Communicators::destroy() { return end("ncclCommDestroy", nccl_->destroy); }

// A thread for each, because the end of one may wait for work that only the end of the other lets go.
std::string Communicators::end(const char* what, decltype(&ncclCommAbort) function) {
  if (!usable_.exchange(false)) return "";
  std::unique_lock lock(calls_, std::try_to_lock);
  for (const Deadline patience(kForRunningCall); !lock && !patience.passed();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    (void)lock.try_lock();
  }
  const Deadline deadline(kForEnding);
  const auto self = shared_from_this();
  std::string stuck;
  std::thread other;
  bool returned[2] = {};
  auto end_one = [&, self](int k) {
    ncclComm_t comm = comms_[k];
    returned[k] = run_bounded(deadline, [self, function, comm] {
      const auto current = self->gpu_->enter();
      (void)function(comm);
    });
  };
  other = std::thread(end_one, 1);
  end_one(0);
  other.join();
  for (int k = 0; k < 2; ++k) {
    if (!returned[k]) stuck += join(stuck.empty() ? "" : " and ", kNames[k]);
  }
  if (stuck.empty()) return "";
  leaked_ = true;
  return join(what, " of the communicator of ", stuck, " did not return in ", deadline.text(),
              ": it is left to the end of the process, with the memory it uses");
}

}  // namespace comm_nccl
