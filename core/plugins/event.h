// event.h - a promise of completion that carries its error; the object behind strata_event.
//
// Set once, by whoever does the work; waited for by anyone. The first status wins. Reference counted, because a
// plugin may still hold it when the core has stopped waiting (a deadline passed).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

#include "core/status.h"
#include "strata/host.h"

struct strata_event {
 public:
  void retain() { refs_.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    if (refs_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

  // False when it was set before; the new status is then ignored.
  bool set(strata::Status status);
  bool is_set() const { return set_.load(std::memory_order_acquire); }
  // The event's own status, or DEADLINE_EXCEEDED. A negative timeout waits for ever.
  strata::Status wait(std::chrono::nanoseconds timeout);

 private:
  ~strata_event() = default;
  std::atomic<int> refs_{1};
  std::atomic<bool> set_{false};
  std::mutex mutex_;
  std::condition_variable done_;
  strata::Status status_;
};

namespace strata {

// Owns one reference.
class Event {
 public:
  Event() = default;
  static Event create() { return Event(new strata_event); }
  Event(const Event& other) : event_(other.event_) {
    if (event_) event_->retain();
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~Event() {
    if (event_) event_->release();
  }

  strata_event* operator->() const { return event_; }
  strata_event* get() const { return event_; }
  explicit operator bool() const { return event_ != nullptr; }

 private:
  explicit Event(strata_event* event) : event_(event) {}
  strata_event* event_ = nullptr;
};

}  // namespace strata
