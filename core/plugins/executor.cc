#include "core/plugins/executor.h"

#include "core/plugins/cores.h"

namespace strata {

Executor::Executor(unsigned threads, const std::vector<int>& cpus) {
  for (unsigned i = 1; i < threads; ++i) workers_.emplace_back([this, cpus] { work(cpus); });
}

Executor::~Executor() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Executor::drain(Fn fn, void* arg, uint64_t n) {
  for (uint64_t i = next_.fetch_add(1); i < n; i = next_.fetch_add(1)) fn(arg, i);
}

void Executor::parallel_for(uint64_t n, Fn fn, void* arg) {
  std::unique_lock turn(turn_, std::defer_lock);
  if (workers_.empty() || n <= 1 || !turn.try_lock()) {
    for (uint64_t i = 0; i < n; ++i) fn(arg, i);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    fn_ = fn;
    arg_ = arg;
    n_ = n;
    next_.store(0);
    open_ = true;
    ++round_;
  }
  start_.notify_all();
  drain(fn, arg, n);
  std::unique_lock lock(mutex_);
  open_ = false;
  done_.wait(lock, [this] { return joined_ == 0; });
}

void Executor::work(const std::vector<int>& cpus) {
  bind_this_thread(cpus);
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    start_.wait(lock, [&] { return stop_ || (open_ && round_ != seen); });
    if (stop_) return;
    seen = round_;
    Fn fn = fn_;
    void* arg = arg_;
    uint64_t n = n_;
    ++joined_;
    lock.unlock();
    drain(fn, arg, n);
    lock.lock();
    if (--joined_ == 0) done_.notify_all();
  }
}

}  // namespace strata
