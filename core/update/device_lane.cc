#include "core/update/device_lane.h"

#include <algorithm>

namespace strata {

DeviceLane::~DeviceLane() {
  for (const Stream* stream : {&in_, &updates_, &out_}) (void)stream->wait();  // its work uses memory that goes next
  for (strata_marker* marker : {began_, finished_}) {
    if (marker) device_.api()->marker_destroy(device_.self(), marker);
  }
}

// A buffer holds a part's state and weight, and its gradient behind them.
uint64_t DeviceLane::buffer_bytes(bool streams) const {
  uint64_t largest = 0;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) {
    const bool streamed = streams && states_.places().on_host(u);
    for (uint32_t i = 0; i < layout_.units[u].segments.size(); ++i) {
      const Segment& s = layout_.units[u].segments[i];
      const States::Piece piece{u, i, 0, std::min(kStreamed, layout_.owned(s).size()), streamed};
      if (!s.trainable || states_.on_host(piece) || states_.in_place(piece)) continue;
      largest = std::max(largest, states_.buffer_bytes(piece) + update_.gradient_bytes(piece));
    }
  }
  return largest * kBuffers;
}

Status DeviceLane::allocate(bool streams) {
  STRATA_RETURN_IF_ERROR(updates_.create(device_, 0, trace_.add_stream("updates", trace_.streaming)));
  const uint64_t each = buffer_bytes(streams) / kBuffers;
  if (each == 0) return Ok();
  STRATA_RETURN_IF_ERROR(in_.create(device_, 0, trace_.add_stream("state in", trace_.streaming)));
  STRATA_RETURN_IF_ERROR(out_.create(device_, 0, trace_.add_stream("state out", trace_.streaming)));
  for (Buffer& buffer : buffers_) {
    STRATA_RETURN_IF_ERROR(Memory::on_device(device_, each, &buffer.memory).during("buffers of streamed state"));
  }
  for (strata_marker** marker : {&began_, &finished_}) {
    STRATA_RETURN_IF_ERROR(take_failure(device_.api()->marker_create_timed(device_.self(), marker))
                               .during("a marker that keeps the time of streamed state"));
  }
  return Ok();
}

Status DeviceLane::run(const std::vector<UpdatePart>& parts, const Marker& start, const UnitDoneFn& done) {
  timed_ = false;
  if (parts.empty()) return Ok();
  for (const Stream* stream : {&in_, &updates_, &out_}) {
    if (stream->c()) STRATA_RETURN_IF_ERROR(start.before(stream->c()));
  }
  if (began_) STRATA_RETURN_IF_ERROR(take_failure(device_.api()->marker_record(device_.self(), began_, in_.c())));
  for (const UpdatePart& part : parts) {
    const uint32_t unit = part.piece.unit;
    const Segment& s = layout_.units[unit].segments[part.piece.segment];
    const Span span(trace_.streaming, "enqueue update", unit);
    const auto enqueue = [&]() -> Status {
      if (part.first) {
        STRATA_RETURN_IF_ERROR(update_.wait_for_readers(part.position, writer(unit).c(), deadline_, trace_.streaming));
      }
      Buffer* buffer = states_.in_place(part.piece) ? nullptr : &buffers_[next_++ % kBuffers];
      const char* grad = update_.gradient(part.piece);
      if (buffer) STRATA_RETURN_IF_ERROR(bring(part, *buffer, &grad));
      updates_.mark("wait", unit);
      STRATA_RETURN_IF_ERROR(update_.run(part.piece, buffer ? buffer->memory.at(0) : nullptr, grad, updates_.c()));
      updates_.mark("update", unit, states_.bytes(part.piece), s.name);
      if (buffer) STRATA_RETURN_IF_ERROR(take_back(part, *buffer));
      Marker end;
      if (part.last) STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, writer(unit).c(), &end));
      return part.last ? done(part.position, end) : Ok();
    };
    STRATA_RETURN_IF_ERROR(enqueue().during("unit \"" + layout_.units[unit].name + "\""));
    timed_ = timed_ || part.piece.streamed;
  }
  if (finished_) {
    STRATA_RETURN_IF_ERROR(take_failure(device_.api()->marker_record(device_.self(), finished_, out_.c())));
  }
  Marker updated;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, updates_.c(), &updated));
  if (out_.c()) STRATA_RETURN_IF_ERROR(updated.before(out_.c()));
  return Marker::at_end_of(device_, out_.c() ? out_.c() : updates_.c(), &done_);
}

// What is not in place comes into the buffer; the update waits for it.
Status DeviceLane::bring(const UpdatePart& part, Buffer& buffer, const char** grad) {
  const States::Piece& piece = part.piece;
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  {
    const Span wait(trace_.streaming, "wait for copies", piece.unit);
    STRATA_RETURN_IF_ERROR(brought_.before(nullptr));
  }
  STRATA_RETURN_IF_ERROR(buffer.free.before(in_.c()));
  in_.mark("wait", piece.unit);
  STRATA_RETURN_IF_ERROR(states_.load(piece, buffer.memory.at(0), !update_.updates_all(piece), in_.c(), nullptr));
  if (piece.streamed) {
    char* here = buffer.memory.at(states_.buffer_bytes(piece));
    STRATA_RETURN_IF_ERROR(device_.copy(here, *grad, update_.gradient_bytes(piece), in_.c()));
    states_.places().tier(piece.unit).count(false, update_.gradient_bytes(piece));
    *grad = here;
  }
  in_.mark("state in", piece.unit, states_.buffer_bytes(piece), s.name);
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, in_.c(), &brought_));
  return brought_.before(updates_.c());
}

Status DeviceLane::take_back(const UpdatePart& part, Buffer& buffer) {
  const States::Piece& piece = part.piece;
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  Marker updated;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, updates_.c(), &updated));
  STRATA_RETURN_IF_ERROR(updated.before(out_.c()));
  out_.mark("wait", piece.unit);
  STRATA_RETURN_IF_ERROR(states_.store(piece, buffer.memory.at(0), out_.c(), nullptr));
  out_.mark("state out", piece.unit, states_.buffer_bytes(piece), s.name);
  return Marker::at_end_of(device_, out_.c(), &buffer.free);
}

Status DeviceLane::before(const strata_stream* stream) const { return done_.before(stream); }

Status DeviceLane::seconds(double* out) const {
  *out = 0;
  if (!timed_) return Ok();
  int64_t ns = 0;
  STRATA_RETURN_IF_ERROR(take_failure(device_.api()->marker_elapsed(device_.self(), began_, finished_, &ns)));
  *out = 1e-9 * static_cast<double>(ns);
  return Ok();
}

}  // namespace strata
