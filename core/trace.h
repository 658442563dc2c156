// trace.h - when each thread and each of our device streams did what, for a picture of a step in ui.perfetto.dev.
//
// A row is one thread's or one stream's: a ring of the newest spans, allocated at commit, written by its thread alone,
// without locks. `Span` is the scoped object at every place worth seeing; it feeds the parts of wall_clock_breakdown
// as well. On a device with streams a row of marks stands beside it: timed markers between pieces of enqueued work,
// whose times are taken in later, as far as the device got.
//
// Recording covers a range of steps. A thread learns from the step it works for (row.set_step; 0: not recorded)
// whether it is in the range, and has left it for good when it works for a later one. When the host thread and the
// update thread, the last that works for a step, have both left, nobody writes the rows any more, and a thread of
// its own writes the file; a range that has not ended is written at close. Nothing is decided by any of this.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/backends.h"
#include "core/manifest/settings.h"
#include "core/timings.h"
#include "core/trace_file.h"

namespace strata {

constexpr uint32_t kNoUnit = UINT32_MAX;

inline int64_t trace_clock() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

struct TraceRecord {
  const char* name;  // [static]
  int64_t begin, end;
  uint64_t step, bytes;
  uint32_t unit;   // of the layout, or kNoUnit
  char label[44];  // cut to fit, at a character's border
  void set_label(const char* text);
};

class TraceRow {
 public:
  explicit TraceRow(std::string name) : name_(std::move(name)) {}
  // Its thread only, as everything below it. 0: what follows is not recorded.
  void set_step(uint64_t step) { step_ = step; }
  uint64_t step() const { return step_; }
  void add(const TraceRecord& record) { ring_[count_++ % ring_.size()] = record; }

 private:
  friend class Trace;
  friend class Span;
  const std::string name_;
  std::vector<TraceRecord> ring_;
  uint64_t step_ = 0, count_ = 0;
  bool timed_ = false;  // wall_clock_breakdown
};

// The time of its scope, on the thread of `row`.
class Span {
 public:
  // `part` also gets the time; a span that is not `wanted` is nothing (a wait for what is there already).
  Span(TraceRow& row, const char* name, uint32_t unit = kNoUnit, std::atomic<uint64_t>* part = nullptr,
       bool wanted = true)
      : row_(row), part_(row.timed_ ? part : nullptr), step_(wanted ? row.step_ : 0) {
    if (step_ == 0 && !part_) return;
    record_ = {name, trace_clock(), 0, step_, 0, unit, {}};
  }
  ~Span() {
    if (step_ == 0 && !part_) return;
    record_.end = trace_clock();
    if (part_) part_->fetch_add(static_cast<uint64_t>(record_.end - record_.begin), std::memory_order_relaxed);
    if (step_ != 0) row_.add(record_);
  }
  Span(const Span&) = delete;
  void note(uint64_t bytes, const std::string& label = "") {
    if (step_ == 0) return;
    record_.bytes = bytes;
    record_.set_label(label.c_str());
  }

 private:
  TraceRow& row_;
  std::atomic<uint64_t>* const part_;
  const uint64_t step_;
  TraceRecord record_;
};

// What a device stream does, by marks between pieces of its work. Used by the thread that enqueues there.
class StreamTrace {
 public:
  StreamTrace(std::string name, const TraceRow& thread, const Device& device);
  ~StreamTrace();
  StreamTrace(const StreamTrace&) = delete;
  Status create_markers();
  // Behind everything on `stream` so far. What was enqueued since the mark before is a span of this name; NULL: it is
  // none. Errors end the row: the work itself will tell them.
  void mark(const strata_stream& stream, const char* name, uint32_t unit, uint64_t bytes, const std::string& label);

 private:
  friend class Trace;
  static constexpr uint64_t kMarks = 1024;  // that may be ahead of the device
  struct Mark {
    strata_marker* marker = nullptr;
    TraceRecord record;  // `begin`: when the mark was enqueued
  };
  void take_in();
  TraceRow row_;
  const TraceRow& thread_;
  const Device& device_;
  std::vector<Mark> marks_;
  uint64_t made_ = 0, taken_ = 0, lost_ = 0;
  int64_t reached_at_ = 0;  // when the last mark taken in was reached
  bool gap_ = false, broken_ = false;
};

class Trace {
 public:
  using LogFn = std::function<void(strata_log_level, const std::string&)>;
  // `file`: where it goes; NULL: nothing is recorded, the parts of wall_clock_breakdown are still fed.
  Trace(const Settings& settings, std::unique_ptr<TraceFile> file, int rank, const Device& device,
        std::vector<std::string> units, LogFn log);
  ~Trace();  // behind all threads and streams that have rows
  static constexpr uint64_t kMostRows = 13;
  uint64_t bytes() const;  // of all rings
  Status allocate();       // when all streams have their rows; refuses a path that cannot be written
  // A row for a stream that `thread` enqueues on; NULL where nothing is recorded, or the device keeps no times.
  StreamTrace* add_stream(const char* name, const TraceRow& thread);

  Timings timings;
  TraceRow host{"host"}, collective{"collective"}, sums{"gradient sums"}, update{"update"}, streaming{"streaming"};
  TraceRow reading{"shard reads"};

  // Host thread. What follows belongs to `step`; whether it is the last of the range; what the host is doing, by its
  // calls (NULL: nothing known).
  void begin_step(uint64_t step);
  bool ends_with(uint64_t step) const { return step == last_ && host.step() != 0; }
  void phase(const char* name) {
    if (phase_.name != name && host.step() != 0) switch_phase(name);
  }
  const char* phase() const { return phase_.name; }
  // The calling thread has left the range: host and update thread, once each.
  void leave();

 private:
  bool is_on() const { return file_ != nullptr; }
  void switch_phase(const char* name);
  void finish_streams();
  void write();
  void write_all(FILE* file, uint64_t* spans, uint64_t* dropped) const;
  void write_row(FILE* file, int number, const TraceRow& row, uint64_t lost, uint64_t* spans, uint64_t* dropped) const;

  TraceRow* const threads_[6] = {&host, &collective, &sums, &update, &streaming, &reading};
  const std::unique_ptr<TraceFile> file_;
  const int rank_;
  const Device& device_;
  const std::vector<std::string> units_;
  const LogFn log_;
  const uint64_t records_, first_, steps_;
  uint64_t begun_ = 0, last_ = 0;  // the range, once it has begun
  bool left_ = false;
  TraceRecord phase_{};
  std::vector<std::unique_ptr<StreamTrace>> streams_;
  std::atomic<int> to_leave_{2};
  std::atomic<bool> closing_{false};
  std::thread writer_;
  bool written_ = false;
};

}  // namespace strata
