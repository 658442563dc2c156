// patience.h - says once that something takes long, while it does.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "core/plugins/cores.h"

namespace strata {

class Patience {
 public:
  // `say` is called on another thread, unless this has ended before. Where none can be had nothing is said.
  Patience(std::chrono::nanoseconds after, std::function<void()> say) {
    (void)begin_thread(
        "patience", {},
        [this, after, say = std::move(say)] {
          std::unique_lock lock(mutex_);
          if (!ended_.wait_for(lock, after, [this] { return is_over_; })) say();
        },
        &thread_);
  }
  ~Patience() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    ended_.notify_one();
    if (thread_.joinable()) thread_.join();
  }
  Patience(const Patience&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_over_ = false;
  std::thread thread_;
};

}  // namespace strata
