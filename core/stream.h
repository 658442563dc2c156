// stream.h - work on a device that runs beside the host: queues of it, points in them, and who waits for what.
//
// On a device of the CPU domain all of this is nothing: its work is done when the call that asked for it returns.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "core/backends.h"
#include "core/trace.h"

namespace strata {

// A queue of device work, owned.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();
  // A lower priority number is more urgent; 0 is the usual. `trace`: its row, or NULL.
  Status create(const Device& device, int32_t priority, StreamTrace* trace = nullptr);
  // NULL on a device of the CPU domain.
  const strata_stream* c() const { return device_ ? &stream_ : nullptr; }
  // Blocks until its work is done.
  Status wait() const;
  // The same for a while; then DEADLINE_EXCEEDED.
  Status wait_for(std::chrono::nanoseconds timeout) const;
  // See StreamTrace::mark.
  void mark(const char* name, uint32_t unit = kNoUnit, uint64_t bytes = 0, const std::string& label = "") const {
    if (trace_) trace_->mark(stream_, name, unit, bytes, label);
  }

 private:
  const Device* device_ = nullptr;
  StreamTrace* trace_ = nullptr;
  strata_stream stream_{};
};

// A point in a stream's work. Copies stand at the same point.
class Marker {
 public:
  Marker() = default;
  // Behind everything enqueued on `stream` so far; nothing to wait for when there is no stream.
  static Status at_end_of(const Device& device, const strata_stream* stream, Marker* out);
  // `stream` goes on when the point is reached; without a stream the calling thread does.
  Status before(const strata_stream* stream) const;

 private:
  struct Point;
  std::shared_ptr<Point> point_;
};

// Something submitted to another thread that ends in device work. Its event is set when the device part is enqueued
// (or the host part failed), and the device part ends at the marker.
class Work {
 public:
  static Work create();
  // Work that was enqueued already.
  static Work ending_at(const Marker& end);
  explicit operator bool() const { return static_cast<bool>(state_); }

  // For a call that sets an event when the host part is done; there is no device part then.
  strata_event* event() const { return state_->event.get(); }
  // For who does it: once.
  void enqueued(const Marker& end);
  void failed(const Status& status);
  bool is_set() const;

  // For who needs it. `patience` bounds the wait for the host part.
  Status wait_enqueued(std::chrono::nanoseconds patience) const;
  // `stream` goes on when the work is done; without a stream the calling thread does.
  Status before(const strata_stream* stream, std::chrono::nanoseconds patience) const;

 private:
  struct State {
    Event event = Event::create();
    Marker end;  // written before the event is set
  };
  std::shared_ptr<State> state_;
};

// Waits for all of them, also behind one that failed: what they use must not go while one of them is under way. Takes
// them out; the first failure. `late`: set where one did not end in time, so that its memory must be left behind.
Status wait_for_all(std::vector<Work>* work, std::chrono::nanoseconds patience, bool* late);

}  // namespace strata
