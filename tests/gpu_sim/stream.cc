// stream.cc - the worker of a stream.
#include "stream.h"

#include <cfenv>
#include <memory>

namespace gpu_sim {

void Point::reach() {
  std::lock_guard lock(mutex_);
  reached_ = true;
  at_ = std::chrono::steady_clock::now().time_since_epoch();
  reached_now_.notify_all();
}

void Point::wait() {
  std::unique_lock lock(mutex_);
  reached_now_.wait(lock, [&] { return reached_; });
}

std::optional<std::chrono::nanoseconds> Point::reached_at() {
  std::lock_guard lock(mutex_);
  return reached_ ? std::optional(at_) : std::nullopt;
}

Stream::Stream(std::chrono::microseconds longest_delay, uint64_t seed)
    : longest_delay_us_(longest_delay.count()), random_(seed), worker_([this] { run(); }) {}

Stream::~Stream() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

void Stream::push(std::function<void()> work) {
  {
    std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

void Stream::drain() {
  const auto end = std::make_shared<Point>();
  push([end] { end->reach(); });
  end->wait();
}

void Stream::run() {
  std::fesetenv(FE_DFL_ENV);  // threads inherit the host program's, which may flush to zero
  for (;;) {
    std::function<void()> work;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || !work_.empty(); });
      if (work_.empty()) return;
      work = std::move(work_.front());
      work_.pop_front();
    }
    sleep();
    work();
  }
}

void Stream::sleep() {
  if (longest_delay_us_ == 0) return;
  std::this_thread::sleep_for(
      std::chrono::microseconds(std::uniform_int_distribution<int64_t>(0, longest_delay_us_)(random_)));
}

}  // namespace gpu_sim
