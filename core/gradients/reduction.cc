// reduction.cc - a unit's gradients from its full buffer to this rank's slice: completed, reduced, added up, squared.
#include <algorithm>
#include <cmath>
#include <utility>

#include "core/gradients/gradients.h"

namespace strata {

// ---- reduction ---------------------------------------------------------------------------------------------------

// Brings the unit's flat buffer into the state that is reduced: pending gradients folded, sums rounded, zeros where
// nothing came.
Status Gradients::complete(uint32_t unit) {
  STRATA_RETURN_IF_ERROR(borrow(nullptr));
  Slot& slot = slots_[unit];
  const strata_stream* writer = slot.writer ? &*slot.writer : nullptr;
  if (!slot.pending.empty()) {
    STRATA_RETURN_IF_ERROR(make_room(slot.pending));
    STRATA_RETURN_IF_ERROR(fold(slot.pending, writer));
    STRATA_RETURN_IF_ERROR(note_written(slot));
  }
  slot.pending.clear();
  if (plan().local && micro_ + 1 < plan().micro_batches) return Ok();
  if (is_absent(unit)) return Ok();
  STRATA_RETURN_IF_ERROR(open_buffer(unit));
  STRATA_RETURN_IF_ERROR(buffers().before(completing_.c()));
  STRATA_RETURN_IF_ERROR(slot.written.before(completing_.c()));
  for (uint32_t i = 0; i < layout_.units[unit].segments.size(); ++i) {
    if (layout_.units[unit].segments[i].trainable) STRATA_RETURN_IF_ERROR(complete_segment(unit, i));
  }
  return sums_.empty() ? Ok() : Marker::at_end_of(device_, completing_.c(), &sums_read_);
}

Status Gradients::complete_segment(uint32_t unit, uint32_t segment) {
  const Segment& s = layout_.units[unit].segments[segment];
  const strata_dtype wire = plan().wire(s);
  const strata_stream* stream = completing_.c();
  char* sum = plan().local ? memory_.accumulator(unit, segment) : memory_.wire(unit, segment);
  const uint64_t size = plan().local ? sizeof(float) : dtype_size(wire);
  for (uint32_t id : s.params) {
    const Param& p = registry_.params[id];
    if (contributions_[id] == 0) STRATA_RETURN_IF_ERROR(device_.zero(sum + p.offset * size, p.numel * size, stream));
    if (!plan().local && contributions_[id] > 1 && wire != STRATA_F32) {
      STRATA_RETURN_IF_ERROR(
          device_.cast(sum + p.offset * size, wire, sums_[id].at(0), STRATA_F32, p.numel, STRATA_ROUND_EVEN, stream));
    }
  }
  for (const Range& gap : s.gaps) {
    STRATA_RETURN_IF_ERROR(device_.zero(sum + gap.begin * size, gap.size() * size, stream));
  }
  if (!plan().local || wire == STRATA_F32) return Ok();
  return device_.cast(memory_.wire(unit, segment), wire, sum, STRATA_F32, s.elements, STRATA_ROUND_EVEN, stream);
}

// Sends the bucket. With local accumulation only the last micro-batch has something to send.
Status Gradients::launch() {
  if (bucket_.empty()) return Ok();
  std::vector<uint32_t> units = std::move(bucket_);
  bucket_.clear();
  bucket_elements_ = 0;
  for (uint32_t u : units) {
    const Span span(trace_.host, "complete", u, &trace_.timings.fold);
    completing_.mark(nullptr);
    STRATA_RETURN_IF_ERROR(complete(u).during("reduction of unit \"" + layout_.units[u].name + "\""));
    completing_.mark("complete", u);
    waiting_elements_ -= layout_.units[u].trainable_elements;
  }
  if (plan().local && micro_ + 1 < plan().micro_batches) return Ok();

  if (asks_) ask(false);
  CommOp op;
  op.dropped = asks_ ? &dropped_ : nullptr;
  op.kind = layout_.stage == 0 ? CommOp::Kind::kAllReduce : CommOp::Kind::kReduceScatter;
  op.tag = (2ull << 32) | units.front();
  op.unit = units.front();
  op.label = "reduction of unit \"" + layout_.units[units.front()].name + "\"" +
             (units.size() > 1 ? " and " + std::to_string(units.size() - 1) + " more" : "");
  Marker completed;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, completing_.c(), &completed));
  op.after.push_back(Work::ending_at(completed));
  std::vector<Landing> landings;
  char* scratch = memory_.scratch();
  for (uint32_t u : units) {
    // The slice may still feed the update of the last step.
    if (micro_ == 0 || plan().local) {
      if (Work updated = weights_.updated(u)) op.after.push_back(std::move(updated));
    }
    for (uint32_t i = 0; i < layout_.units[u].segments.size(); ++i) {
      const Segment& s = layout_.units[u].segments[i];
      if (!s.trainable) continue;
      const Landing& landing = landings.emplace_back(land(u, i, &scratch));
      op.items.push_back(coll_item(sent(u, i), plan().wire(s), landing.out, landing.dtype, layout_.owned(s).size()));
    }
  }
  op.then = [this, landings = std::move(landings), micro = micro_](const strata_stream* stream) {
    for (const Landing& landing : landings) STRATA_RETURN_IF_ERROR(arrive(landing, micro, stream));
    return Ok();
  };
  reduced_ = queue_.submit(std::move(op));
  buffers().hand_over(units, reduced_);
  if (settings_.overlap_comm) return Ok();
  const Span wait(trace_.host, "wait for reduction", units.front());
  return reduced_.before(nullptr, queue_.patience());
}

// What this rank brings to the reduction of a segment.
char* Gradients::sent(uint32_t unit, uint32_t segment) {
  if (is_absent(unit)) return buffers().zeros();
  const bool rounds = plan().needs_wire_buffer(layout_.units[unit].segments[segment]);
  return rounds ? memory_.wire(unit, segment) : memory_.accumulator(unit, segment);
}

// Where this micro-batch's reduction of a segment goes, and where the slice's sum is on the device.
Gradients::Landing Gradients::land(uint32_t unit, uint32_t segment, char** scratch) {
  const Segment& s = layout_.units[unit].segments[segment];
  Landing landing{unit, segment, nullptr, memory_.arriving(unit, segment), plan().owned(s)};
  if (!landing.sum && !leaves_device(unit)) landing.sum = memory_.owned(unit, segment);
  if (landing.sum && !(plan().adds_up() && micro_ > 0)) {
    landing.out = landing.sum;
  } else if (memory_.takes_as_sent(s)) {
    landing.out = sent(unit, segment);
    landing.dtype = plan().wire(s);
  } else {
    landing.out = std::exchange(*scratch, *scratch + layout_.owned(s).size() * sizeof(float));
  }
  if (!landing.sum) landing.sum = landing.out;
  return landing;
}

// A segment's reduction is done: added to the sum of the micro-batches, and after the last one squared for the norm and
// sent to the tier, where it is not there already. Collective thread.
Status Gradients::arrive(const Landing& landing, int micro, const strata_stream* stream) {
  const Segment& s = segment_of(landing);
  const uint64_t count = layout_.owned(s).size(), bytes = count * dtype_size(plan().owned(s));
  const bool last = micro + 1 == plan().micro_batches, leaves = leaves_device(landing.unit);
  if (memory_.sums_on_host(landing.unit)) return arrive_on_host(landing, micro, stream);
  if (landing.out != landing.sum) {
    auto* sum = reinterpret_cast<float*>(landing.sum);
    STRATA_RETURN_IF_ERROR(device_.accumulate(sum, landing.out, landing.dtype, count, stream));
  }
  if (last) STRATA_RETURN_IF_ERROR(square(landing, stream));
  if (!memory_.places().on_device(landing.unit) && (last || !leaves)) {
    strata::add(counters_.tier_write[kCpuTier], bytes);
  }
  if (!last || !leaves) return Ok();
  return device_.copy(memory_.owned(landing.unit, landing.segment), landing.sum, bytes, stream);
}

// The same where the sum is in host memory: this rank's own slice, as at every stage above 1.
Status Gradients::arrive_on_host(const Landing& landing, int micro, const strata_stream* stream) {
  const uint64_t count = layout_.owned(segment_of(landing)).size();
  const bool last = micro + 1 == plan().micro_batches;
  strata::add(counters_.tier_write[kCpuTier], count * dtype_size(landing.dtype));
  return host_sums_.add({landing.unit, landing.out, landing.dtype, count,
                         reinterpret_cast<float*>(memory_.owned(landing.unit, landing.segment)), micro == 0,
                         last ? memory_.norm(landing.unit, landing.segment) : nullptr},
                        stream, queue_.patience());
}

Status Gradients::wait_for_reductions() const {
  STRATA_RETURN_IF_ERROR(queue_.wait_for_reductions());
  return host_sums_.wait(trace_.collective, queue_.patience());
}

Status Gradients::flush() const {
  STRATA_RETURN_IF_ERROR(queue_.flush());
  return host_sums_.wait(trace_.host, queue_.patience());
}

// ---- norm --------------------------------------------------------------------------------------------------------

// Always over this rank's own slice, so that every stage adds the same numbers in the same order.
Status Gradients::square(const Landing& landing, const strata_stream* stream) {
  const Segment& s = segment_of(landing);
  const strata_dtype dtype = plan().owned(s);
  const uint64_t first = s.slice(layout_.rank).begin - layout_.owned(s).begin;
  return device_.square_sums(landing.sum + first * dtype_size(dtype), dtype, s.shard,
                             memory_.norm(landing.unit, landing.segment), stream);
}

namespace {
// Eight sums side by side, then together: an order of its own, but always the same one, and not bound by the latency of
// an addition.
double total_of(const double* sums, uint64_t blocks) {
  constexpr uint64_t kLanes = 8;
  double lanes[kLanes] = {};
  for (uint64_t b = 0; b < blocks; ++b) lanes[b % kLanes] += sums[b];
  for (uint64_t half = kLanes / 2; half > 0; half /= 2) {
    for (uint64_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}
}  // namespace

// A copy that is not finite, where what another rank counts is, ends the step all the same.
double Gradients::norm_partial() const {
  const double counted = total_of(memory_.norms(true), memory_.norm_blocks(true));
  const double copies = total_of(memory_.norms(false), memory_.norm_blocks(false));
  return std::isfinite(copies) ? counted : counted + copies;
}

Status Gradients::find_nonfinite(std::string* param) const {
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    for (uint32_t i = 0; i < layout_.units[u].segments.size(); ++i) {
      const Segment& s = layout_.units[u].segments[i];
      if (!s.trainable) continue;
      int64_t index = -1;
      STRATA_RETURN_IF_ERROR(find_nonfinite_in(u, i, &index));
      if (index < 0) continue;
      *param = param_at(registry_, s, layout_.owned(s).begin + static_cast<uint64_t>(index));
      return Ok();
    }
  }
  return Ok();
}

// A slice that left the device is looked at in pieces, back on it.
Status Gradients::find_nonfinite_in(uint32_t unit, uint32_t segment, int64_t* index) const {
  constexpr uint64_t kPiece = 1 << 18;
  const Segment& s = layout_.units[unit].segments[segment];
  const char* slice = owned(unit, segment);
  const strata_dtype dtype = plan().owned(s);
  const uint64_t count = layout_.owned(s).size();
  if (!leaves_device(unit)) return device_.find_nonfinite(slice, dtype, count, index);
  Memory piece;
  STRATA_RETURN_IF_ERROR(Memory::on_device(device_, kPiece * sizeof(float), &piece));
  for (uint64_t at = 0; at < count && *index < 0; at += kPiece) {
    const uint64_t n = std::min(kPiece, count - at);
    STRATA_RETURN_IF_ERROR(device_.copy(piece.at(0), slice + at * dtype_size(dtype), n * dtype_size(dtype)));
    STRATA_RETURN_IF_ERROR(device_.find_nonfinite(piece.at(0), dtype, n, index));
    if (*index >= 0) *index += static_cast<int64_t>(at);
  }
  return Ok();
}

std::vector<uint8_t> Gradients::take_used() {
  std::vector<uint8_t> used(used_.size());
  used.swap(used_);
  return used;
}

std::vector<uint32_t> Gradients::take_order() { return std::move(recorded_); }

}  // namespace strata
