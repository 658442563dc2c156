#include "core/trace.h"

#include <algorithm>
#include <cstring>

namespace strata {

// Room for the text but for its end, and no character cut in two.
void TraceRecord::set_label(const char* text) {
  size_t n = std::strlen(text);
  if (n >= sizeof(label)) n = sizeof(label) - 1;
  while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;
  std::memcpy(label, text, n);
  label[n] = 0;
}

// ---- a stream's row ----------------------------------------------------------------------------------------------

StreamTrace::StreamTrace(std::string name, const TraceRow& thread, const Device& device)
    : row_(std::move(name)), thread_(thread), device_(device) {}

StreamTrace::~StreamTrace() {
  for (Mark& mark : marks_) device_.api()->marker_destroy(device_.self(), mark.marker);
}

Status StreamTrace::create_markers() {
  for (marks_.reserve(kMarks); marks_.size() < kMarks;) {
    strata_marker* marker = nullptr;
    STRATA_RETURN_IF_ERROR(take_failure(device_.api()->marker_create_timed(device_.self(), &marker)));
    marks_.push_back({marker, {}});
  }
  return Ok();
}

void StreamTrace::mark(const strata_stream& stream, const char* name, uint32_t unit, uint64_t bytes,
                       const std::string& label) {
  if (thread_.step() == 0 || broken_) return;
  take_in();
  // The last mark taken in is still measured from.
  if (made_ - taken_ + 1 >= kMarks) {
    lost_ += name ? 1 : 0;
    gap_ = true;
    return;
  }
  if (std::exchange(gap_, false) && name) {
    ++lost_;
    name = nullptr;
  }
  Mark& mark = marks_[made_ % kMarks];
  mark.record = {name, trace_clock(), 0, thread_.step(), bytes, unit, {}};
  mark.record.set_label(label.c_str());
  broken_ = !take_failure(device_.api()->marker_record(device_.self(), mark.marker, &stream)).ok();
  made_ += broken_ ? 0 : 1;
}

// Device times become host times along the chain of marks: the first was enqueued on an idle stream, each other one is
// its distance from the one before. A mark is reached after it was enqueued and before now; that bounds what the two
// clocks drift apart.
void StreamTrace::take_in() {
  for (; taken_ < made_ && !broken_; ++taken_) {
    const Mark& mark = marks_[taken_ % kMarks];
    const Mark& before = taken_ > 0 ? marks_[(taken_ - 1) % kMarks] : mark;
    int64_t distance = 0;
    const strata_status code = device_.api()->marker_elapsed(device_.self(), before.marker, mark.marker, &distance);
    if (code == STRATA_AGAIN) break;
    broken_ = !take_failure(code).ok();
    const int64_t enqueued = mark.record.begin, begin = taken_ > 0 ? reached_at_ : enqueued;
    reached_at_ = std::clamp(begin + distance, enqueued, trace_clock());
    if (broken_ || !mark.record.name) continue;
    TraceRecord record = mark.record;
    record.begin = std::min(begin, reached_at_);
    record.end = reached_at_;
    row_.add(record);
  }
}

// ---- the range ---------------------------------------------------------------------------------------------------

Trace::Trace(const Settings& settings, std::unique_ptr<TraceFile> file, int rank, const Device& device,
             std::vector<std::string> units, LogFn log)
    : file_(std::move(file)),
      rank_(rank),
      device_(device),
      units_(std::move(units)),
      log_(std::move(log)),
      records_(static_cast<uint64_t>(settings.trace.records)),
      first_(static_cast<uint64_t>(settings.trace.first_step)),
      steps_(static_cast<uint64_t>(settings.trace.steps)) {
  for (TraceRow* row : threads_) row->timed_ = settings.wall_clock_breakdown;
}

Trace::~Trace() {
  closing_ = true;
  if (writer_.joinable()) writer_.join();
  const bool committed = is_on() && !file_->path().empty();
  if (committed && !written_) write();
}

uint64_t Trace::bytes() const {
  const uint64_t rows = device_.is_asynchronous() ? kMostRows : std::size(threads_);
  return is_on() ? rows * records_ * sizeof(TraceRecord) : 0;
}

Status Trace::allocate() {
  if (!is_on()) return Ok();
  STRATA_RETURN_IF_ERROR(file_->claim().during("trace.path"));
  if (!file_->has_first_name()) {
    log_(STRATA_LOG_INFO, "trace: another engine writes to the same folder; this one's file is " + file_->path());
  }
  for (TraceRow* row : threads_) row->ring_.resize(records_);
  for (auto& stream : streams_) stream->row_.ring_.resize(records_);
  return Ok();
}

StreamTrace* Trace::add_stream(const char* name, const TraceRow& thread) {
  if (!is_on() || !device_.is_asynchronous()) return nullptr;
  auto stream = std::make_unique<StreamTrace>(name, thread, device_);
  const Status created = stream->create_markers();
  if (created.ok()) return streams_.emplace_back(std::move(stream)).get();
  log_(STRATA_LOG_WARN, std::string("trace: there is no row for the stream of ") + name + ": " + created.text());
  return nullptr;
}

void Trace::begin_step(uint64_t step) {
  if (!is_on() || left_) return;
  if (begun_ == 0 && step >= first_) {
    begun_ = step;
    last_ = steps_ == 0 ? UINT64_MAX : step + steps_ - 1;
  }
  host.set_step(begun_ != 0 && step <= last_ ? step : 0);
  if (begun_ == 0 || step <= last_) return;
  left_ = true;
  leave();
}

void Trace::switch_phase(const char* name) {
  const int64_t now = trace_clock();
  if (phase_.name) {
    phase_.end = now;
    host.add(phase_);
  }
  phase_ = {name, now, 0, host.step(), 0, kNoUnit, {}};
}

void Trace::leave() {
  if (--to_leave_ > 0) return;
  try {
    writer_ = std::thread([this] { write(); });
  } catch (const std::system_error&) {
    // No thread to be had: it is written at close.
  }
}

// ---- the file ----------------------------------------------------------------------------------------------------

namespace {
void write_text(FILE* file, const char* text) {
  for (const char* c = text; *c; ++c) {
    const auto code = static_cast<unsigned char>(*c);
    if (code < 0x20) {
      std::fprintf(file, "\\u%04x", code);
    } else {
      if (*c == '"' || *c == '\\') std::fputc('\\', file);
      std::fputc(*c, file);
    }
  }
}

// Microseconds, without loss.
void write_time(FILE* file, const char* key, int64_t ns) {
  std::fprintf(file, ",\"%s\":%lld.%03lld", key, static_cast<long long>(ns / 1000), static_cast<long long>(ns % 1000));
}
}  // namespace

// The device is given a moment to reach what was enqueued in the range; what it has not then is left out.
void Trace::finish_streams() {
  for (int ms = 0; ms < 1000; ++ms) {
    bool all = true;
    for (auto& stream : streams_) {
      stream->take_in();
      all = all && (stream->taken_ == stream->made_ || stream->broken_);
    }
    if (all || closing_) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (auto& stream : streams_) stream->lost_ += stream->made_ - stream->taken_;
}

void Trace::write() {
  written_ = true;
  if (begun_ == 0) {
    log_(STRATA_LOG_WARN,
         "trace: no file was written, step " + std::to_string(first_) + " (trace.first_step) never began");
    return;
  }
  finish_streams();
  uint64_t spans = 0, dropped = 0;
  const Status status = file_->write([&](FILE* file) { write_all(file, &spans, &dropped); });
  if (!status.ok()) {
    log_(STRATA_LOG_WARN, "trace: " + status.text());
    return;
  }
  log_(STRATA_LOG_INFO,
       "trace: " + std::to_string(spans) + " spans from step " + std::to_string(begun_) +
           (steps_ == 0 ? std::string(" on") : " to " + std::to_string(last_)) + " in " + file_->path() +
           (dropped > 0 ? ", " + std::to_string(dropped) + " older ones dropped (trace.records)" : ""));
}

void Trace::write_all(FILE* file, uint64_t* spans, uint64_t* dropped) const {
  std::fprintf(file, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  std::fprintf(file, "{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}", rank_,
               rank_);
  int number = 0;
  for (const TraceRow* row : threads_) write_row(file, ++number, *row, 0, spans, dropped);
  for (const auto& stream : streams_) write_row(file, ++number, stream->row_, stream->lost_, spans, dropped);
  std::fprintf(file, "\n],\"otherData\":{\"rank\":%d,\"spans\":%llu,\"dropped\":%llu}}\n", rank_,
               static_cast<unsigned long long>(*spans), static_cast<unsigned long long>(*dropped));
}

void Trace::write_row(FILE* file, int number, const TraceRow& row, uint64_t lost, uint64_t* spans,
                      uint64_t* dropped) const {
  const uint64_t kept = std::min<uint64_t>(row.count_, row.ring_.size()), older = row.count_ - kept + lost;
  *spans += kept;
  *dropped += older;
  std::fprintf(file, ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}}",
               rank_, number, row.name_.c_str());
  std::fprintf(file,
               ",\n{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}}",
               rank_, number, number);
  for (uint64_t i = row.count_ - kept; i < row.count_; ++i) {
    const TraceRecord& r = row.ring_[i % row.ring_.size()];
    std::fprintf(file, ",\n{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d", r.name, rank_, number);
    write_time(file, "ts", r.begin);
    write_time(file, "dur", r.end - r.begin);
    std::fprintf(file, ",\"args\":{\"step\":%llu", static_cast<unsigned long long>(r.step));
    if (r.unit < units_.size()) {
      std::fputs(",\"unit\":\"", file);
      write_text(file, units_[r.unit].c_str());
      std::fputc('"', file);
    }
    if (r.bytes > 0) std::fprintf(file, ",\"bytes\":%llu", static_cast<unsigned long long>(r.bytes));
    if (r.label[0]) {
      std::fputs(",\"label\":\"", file);
      write_text(file, r.label);
      std::fputc('"', file);
    }
    std::fputs("}}", file);
  }
}

}  // namespace strata
