#include "core/plugins/event.h"

bool strata_event::set(strata::Status status) {
  {
    std::lock_guard lock(mutex_);
    if (set_.load(std::memory_order_relaxed)) return false;
    status_ = std::move(status);
    set_.store(true, std::memory_order_release);
  }
  done_.notify_all();
  return true;
}

strata::Status strata_event::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock lock(mutex_);
  auto is_done = [this] { return set_.load(std::memory_order_relaxed); };
  if (timeout.count() < 0) {
    done_.wait(lock, is_done);
  } else if (!done_.wait_for(lock, timeout, is_done)) {
    return {STRATA_DEADLINE_EXCEEDED, "not done within " + std::to_string(timeout.count() / 1000000) + " ms"};
  }
  return status_;
}
