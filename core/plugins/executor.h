// executor.h - the worker threads of one rank: parallel_for and nothing else.
//
// Workers sleep between calls. One caller at a time has them; another thread of the rank that calls meanwhile does its
// work alone instead of waiting, so that a long update never holds up a gather. Results never depend on the number of
// threads: callers cut work at fixed places.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace strata {

class Executor {
 public:
  // `threads` counts the calling thread; 0 is taken as 1. The others are bound to `cpus`, if there are any.
  Executor(unsigned threads, const std::vector<int>& cpus);
  ~Executor();
  Executor(const Executor&) = delete;

  using Fn = void (*)(void* arg, uint64_t i);
  void parallel_for(uint64_t n, Fn fn, void* arg);
  unsigned threads() const { return static_cast<unsigned>(workers_.size()) + 1; }

 private:
  void work(const std::vector<int>& cpus);
  void drain(Fn fn, void* arg, uint64_t n);

  std::mutex turn_;  // who holds it has the workers
  std::mutex mutex_;
  std::condition_variable start_, done_;
  uint64_t round_ = 0;
  bool open_ = false;    // workers may still join this round
  unsigned joined_ = 0;  // those that have, and are not done
  bool stop_ = false;
  Fn fn_ = nullptr;
  void* arg_ = nullptr;
  uint64_t n_ = 0;
  std::atomic<uint64_t> next_{0};
  std::vector<std::thread> workers_;
};

}  // namespace strata
