// stream.h - a queue of work with a thread of its own, and points in it that others wait for.
//
// Work runs in the order it was pushed. Before each piece the thread sleeps for a pseudo-random time up to the longest
// delay, so that whoever reads a result without waiting for it reads the wrong one.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <thread>

namespace gpu_sim {

// A place in a stream's work, reached once.
class Point {
 public:
  void reach();
  void wait();
  // When it was, by the steady clock; nothing while it is not reached.
  std::optional<std::chrono::nanoseconds> reached_at();

 private:
  std::mutex mutex_;
  std::condition_variable reached_now_;
  bool reached_ = false;
  std::chrono::nanoseconds at_{0};
};

class Stream {
 public:
  Stream(std::chrono::microseconds longest_delay, uint64_t seed);
  ~Stream();  // does what is left first
  Stream(const Stream&) = delete;

  // `work` must not throw.
  void push(std::function<void()> work);
  // Returns when everything pushed so far is done. Not from the stream's own work.
  void drain();

 private:
  void run();
  void sleep();

  const int64_t longest_delay_us_;
  std::mt19937_64 random_;  // of the worker
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  bool closing_ = false;
  std::thread worker_;
};

}  // namespace gpu_sim
