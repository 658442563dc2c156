#include "core/update/host_lane.h"

#include <algorithm>
#include <utility>

namespace strata {

uint64_t HostLane::largest_part(uint64_t elements) const {
  uint64_t largest = 0;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) {
    for (uint32_t i = 0; i < layout_.units[u].segments.size(); ++i) {
      const Segment& s = layout_.units[u].segments[i];
      const States::Piece piece{u, i, 0, std::min(elements, layout_.owned(s).size())};
      if (s.trainable && states_.on_host(piece)) largest = std::max(largest, states_.buffer_bytes(piece));
    }
  }
  return largest;
}

uint64_t HostLane::buffer_count(uint64_t largest) {
  return std::clamp<uint64_t>(kBufferBytes / std::max<uint64_t>(largest, 1), kLeast, kMost);
}

uint64_t HostLane::buffer_bytes(uint64_t elements) const {
  const uint64_t largest = largest_part(elements);
  return largest * buffer_count(largest);
}

Status HostLane::allocate(uint64_t elements) {
  STRATA_RETURN_IF_ERROR(stream_.create(device_, 0, trace_.add_stream("weights", trace_.update)));
  const uint64_t largest = largest_part(elements);
  buffers_.resize(buffer_count(largest));
  for (Buffer& buffer : buffers_) {
    STRATA_RETURN_IF_ERROR(states_.memory_for_updates(true, largest, &buffer.memory).during("update buffers"));
  }
  return Ok();
}

Status HostLane::run(const std::vector<UpdatePart>& parts, const UnitDoneFn& done) {
  const auto step = [&](size_t i) -> Status {
    const UpdatePart& part = parts[i];
    Buffer& buffer = buffers_[i % buffers_.size()];
    if (i == 0) STRATA_RETURN_IF_ERROR(read(part, buffer));
    if (i + 1 < parts.size()) STRATA_RETURN_IF_ERROR(read(parts[i + 1], buffers_[(i + 1) % buffers_.size()]));
    stream_.mark(nullptr);
    if (part.first) STRATA_RETURN_IF_ERROR(wait_for_readers(part));
    STRATA_RETURN_IF_ERROR(wait(buffer.reads));
    STRATA_RETURN_IF_ERROR(update(part, buffer));
    STRATA_RETURN_IF_ERROR(write(part, buffer));
    return part.last ? end_unit(part, done) : Ok();
  };
  for (size_t i = 0; i < parts.size(); ++i) {
    const Status status = step(i).during("unit \"" + layout_.units[parts[i].piece.unit].name + "\"");
    if (!status.ok()) return drain(status);
  }
  return drain(Ok());
}

// Weights in a tier that is not addressable are new when they are written.
Status HostLane::end_unit(const UpdatePart& part, const UnitDoneFn& done) {
  for (Buffer& buffer : buffers_) {
    if (!weights_.addressable(part.piece.unit)) STRATA_RETURN_IF_ERROR(wait(buffer.writes));
  }
  Marker end;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream_.c(), &end));
  return done(part.position, end);
}

// Weights of the host's memory, or of a tier, are written by this thread; those of a device by work on the stream.
Status HostLane::wait_for_readers(const UpdatePart& part) const {
  const strata_stream* writer = weights_.on_device(part.piece.unit) ? stream_.c() : nullptr;
  return update_.wait_for_readers(part.position, writer, deadline_, trace_.update);
}

Status HostLane::wait(std::vector<Work>& transfers) const {
  const Span span(trace_.update, "wait for transfers", kNoUnit, nullptr, !transfers.empty());
  for (const Work& work : transfers) STRATA_RETURN_IF_ERROR(work.before(nullptr, deadline_));
  transfers.clear();
  return Ok();
}

// Buffers must not be reused or freed while a transfer is under way.
Status HostLane::drain(Status status) {
  for (Buffer& buffer : buffers_) {
    for (auto* transfers : {&buffer.reads, &buffer.writes}) {
      const Status s = wait(*transfers);
      if (status.ok()) status = s;
    }
  }
  return status;
}

Status HostLane::read(const UpdatePart& part, Buffer& buffer) {
  const Span span(trace_.update, "read", part.piece.unit, nullptr, !states_.in_place(part.piece));
  STRATA_RETURN_IF_ERROR(wait(buffer.writes));
  stream_.mark(nullptr);
  STRATA_RETURN_IF_ERROR(
      states_.load(part.piece, buffer.memory.at(0), !update_.updates_all(part.piece), stream_.c(), &buffer.reads));
  if (!buffer.reads.empty()) stream_.mark("from tier", part.piece.unit);
  return Ok();
}

Status HostLane::update(const UpdatePart& part, Buffer& buffer) {
  const States::Piece& piece = part.piece;
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  Span span(trace_.update, "update", piece.unit);
  span.note(states_.bytes(piece), s.name);
  STRATA_RETURN_IF_ERROR(update_.run(piece, buffer.memory.at(0), update_.gradient(piece), nullptr));
  if (states_.places().on_device(piece.unit) || !weights_.on_device(piece.unit)) return Ok();
  // New weights leave the tier; old ones come to it where they are half of the master, or where some of them stay.
  const uint64_t bytes = piece.count * dtype_size(s.dtype);
  add(counters_.tier_read[kCpuTier], bytes);
  const bool is_state = (states_.layout_of(s).flags & STRATA_OPTIM_WEIGHT_IS_STATE) != 0;
  if (is_state || !update_.updates_all(piece)) add(counters_.tier_write[kCpuTier], bytes);
  return Ok();
}

Status HostLane::write(const UpdatePart& part, Buffer& buffer) {
  const Span span(trace_.update, "write back", part.piece.unit, nullptr, !states_.in_place(part.piece));
  stream_.mark(nullptr);
  STRATA_RETURN_IF_ERROR(states_.store(part.piece, buffer.memory.at(0), stream_.c(), &buffer.writes));
  if (!buffer.writes.empty()) stream_.mark("to tier", part.piece.unit);
  return Ok();
}

}  // namespace strata
