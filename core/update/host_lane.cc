#include "core/update/host_lane.h"

#include <algorithm>
#include <utility>

namespace strata {

uint64_t HostLane::buffer_count(uint64_t largest) const {
  if (shape_.count > 0) return shape_.count;
  return std::clamp<uint64_t>(kBufferBytes / std::max<uint64_t>(largest, 1), kLeast, kMost);
}

uint64_t HostLane::buffer_bytes() const {
  const uint64_t largest = states_.largest_buffer(shape_.part, true).bytes;
  return largest * buffer_count(largest);
}

std::string HostLane::buffer_note() const {
  if (shape_.asked == 0) return "";
  const uint64_t elements = states_.largest_buffer(shape_.part, true).elements;
  return buffers_note(shape_.count, elements, shape_.asked, shape_.is_given,
                      elements < shape_.part ? "no part of a unit is larger" : shape_.why);
}

Status HostLane::allocate() {
  STRATA_RETURN_IF_ERROR(stream_.create(device_, 0, trace_.add_stream("weights", trace_.update)));
  const uint64_t largest = states_.largest_buffer(shape_.part, true).bytes;
  buffers_.resize(buffer_count(largest));
  for (Buffer& buffer : buffers_) {
    STRATA_RETURN_IF_ERROR(states_.memory_for_updates(true, largest, &buffer.memory).during("update buffers"));
    STRATA_RETURN_IF_ERROR(states_.register_buffer(buffer.memory, &buffer.registered).during("update buffers"));
  }
  return Ok();
}

Status HostLane::run(const std::vector<UpdatePart>& parts, const UnitDoneFn& done) {
  Passing passing;
  for (const UpdatePart& part : parts) {
    if (passes(part)) passing.parts.push_back(&part);
  }
  size_t turn = 0;  // of the next part that passes through a buffer
  const auto step = [&](const UpdatePart& part) -> Status {
    const bool through = passes(part);
    STRATA_RETURN_IF_ERROR(read_ahead(passing, turn));
    stream_.mark(nullptr);
    if (part.first) STRATA_RETURN_IF_ERROR(wait_for_readers(part));
    if (through) STRATA_RETURN_IF_ERROR(wait(buffer(turn).reads, &buffer(turn)));
    STRATA_RETURN_IF_ERROR(update(part, through ? buffer(turn).memory.at(0) : nullptr));
    if (through) STRATA_RETURN_IF_ERROR(write(part, buffer(turn)));
    if (through && !shape_.writes_behind) STRATA_RETURN_IF_ERROR(wait(buffer(turn).writes, &buffer(turn)));
    turn += through ? 1 : 0;
    if (part.last) STRATA_RETURN_IF_ERROR(end_unit(part, done));
    return finish(done, false);
  };
  for (const UpdatePart& part : parts) {
    const Status status = step(part).during("unit \"" + layout_.units[part.piece.unit].name + "\"");
    if (!status.ok()) return drain(status);
  }
  return drain(finish(done, true));
}

// Begins the reads of the part whose turn it is, and of those that are to be read before theirs.
Status HostLane::read_ahead(Passing& passing, size_t turn) {
  const size_t end = std::min<size_t>(passing.parts.size(), turn + 1 + shape_.ahead);
  for (; passing.next < end; ++passing.next) {
    STRATA_RETURN_IF_ERROR(read(*passing.parts[passing.next], buffer(passing.next)));
  }
  return Ok();
}

// Weights in a tier that is not addressable are new when they are written; parts behind them need not wait for that.
Status HostLane::end_unit(const UpdatePart& part, const UnitDoneFn& done) {
  if (!weights_.addressable(part.piece.unit)) {
    endings_.push_back({part.position, std::exchange(weight_writes_, {})});
    return Ok();
  }
  Marker end;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream_.c(), &end));
  return done(part.position, end);
}

// Units whose weights are written; `to_the_end`: all of them, which it waits for.
Status HostLane::finish(const UnitDoneFn& done, bool to_the_end) {
  while (!endings_.empty()) {
    Ending& ending = endings_.front();
    const auto written = [](const Work& work) { return work.is_set(); };
    if (!to_the_end && !std::all_of(ending.writes.begin(), ending.writes.end(), written)) break;
    STRATA_RETURN_IF_ERROR(wait(ending.writes, nullptr));
    STRATA_RETURN_IF_ERROR(done(ending.position, Marker()));
    endings_.pop_front();
  }
  return Ok();
}

// Weights of the host's memory, or of a tier, are written by this thread; those of a device by work on the stream.
Status HostLane::wait_for_readers(const UpdatePart& part) const {
  const strata_stream* writer = weights_.on_device(part.piece.unit) ? stream_.c() : nullptr;
  return update_.wait_for_readers(part.position, writer, deadline_, trace_.update);
}

Status HostLane::wait(std::vector<Work>& transfers, TransferBuffer* buffer) const {
  const Span span(trace_.update, "wait for transfers", kNoUnit, nullptr, !transfers.empty());
  bool late = false;
  const Status status = wait_for_all(&transfers, deadline_, &late);
  if (late && buffer) buffer->leave_behind();
  return status;
}

// Buffers must not be reused or freed while a transfer is under way.
Status HostLane::drain(Status status) {
  weight_writes_.clear();
  endings_.clear();
  for (Buffer& buffer : buffers_) {
    for (auto* transfers : {&buffer.reads, &buffer.writes}) {
      const Status s = wait(*transfers, &buffer);
      if (status.ok()) status = s;
    }
  }
  return status;
}

Status HostLane::read(const UpdatePart& part, Buffer& buffer) {
  const Span span(trace_.update, "read", part.piece.unit);
  STRATA_RETURN_IF_ERROR(wait(buffer.writes, &buffer));
  stream_.mark(nullptr);
  STRATA_RETURN_IF_ERROR(
      states_.load(part.piece, buffer.memory.at(0), !update_.updates_all(part.piece), stream_.c(), &buffer.reads));
  if (!buffer.reads.empty()) stream_.mark("from tier", part.piece.unit);
  return Ok();
}

Status HostLane::update(const UpdatePart& part, char* buffer) {
  const States::Piece& piece = part.piece;
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  Span span(trace_.update, "update", piece.unit);
  span.note(states_.bytes(piece), s.name);
  STRATA_RETURN_IF_ERROR(update_.run(piece, buffer, update_.gradient(piece), nullptr));
  if (states_.places().on_device(piece.unit) || !weights_.on_device(piece.unit)) return Ok();
  // New weights leave the tier; old ones come to it where they are half of the master, or where some of them stay.
  const uint64_t bytes = piece.count * dtype_size(s.dtype);
  add(counters_.tier_read[kCpuTier], bytes);
  const bool is_state = (states_.layout_of(s).flags & STRATA_OPTIM_WEIGHT_IS_STATE) != 0;
  if (is_state || !update_.updates_all(piece)) add(counters_.tier_write[kCpuTier], bytes);
  return Ok();
}

Status HostLane::write(const UpdatePart& part, Buffer& buffer) {
  const Span span(trace_.update, "write back", part.piece.unit);
  stream_.mark(nullptr);
  STRATA_RETURN_IF_ERROR(states_.store(part.piece, buffer.memory.at(0), stream_.c(), &buffer.writes));
  if (!weights_.addressable(part.piece.unit)) weight_writes_.push_back(buffer.writes.back());
  if (!buffer.writes.empty()) stream_.mark("to tier", part.piece.unit);
  return Ok();
}

}  // namespace strata
