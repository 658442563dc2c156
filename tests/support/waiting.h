// waiting.h - waiting for what another thread does, and for calls that may not return: only so long.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <thread>

namespace strata::test {

// True once `condition` holds; false when the time is over.
template <class Condition>
bool eventually(Condition condition, std::chrono::seconds within) {
  const auto until = std::chrono::steady_clock::now() + within;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// False where it does not return in time: `release` lets it, and it is waited for.
inline bool returns(const std::function<void()>& call, std::chrono::seconds within,
                    const std::function<void()>& release) {
  const auto ended = std::async(std::launch::async, call);
  if (ended.wait_for(within) == std::future_status::ready) return true;
  release();
  ended.wait();
  return false;
}

}  // namespace strata::test
