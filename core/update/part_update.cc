#include "core/update/part_update.h"

namespace strata {

Status PartUpdate::allocate() { return Memory::shared_with_host(device_, bytes(), &factors_).during("update factors"); }

// The scalars of every group for a unit's next update are computed once per step.
Status PartUpdate::begin(const UpdateJob& job, const std::vector<uint64_t>& steps) {
  job_ = &job;
  scalar_sets_.clear();
  scalars_.clear();
  reinterpret_cast<Factors*>(factors_.at(0))[job.step % 2] = {job.outcome->grad_scale, job.outcome->apply};
  for (const Unit& unit : layout_.units) {
    for (const Segment& segment : unit.segments) {
      for (const Run& run : segment.runs) {
        const auto set = static_cast<uint32_t>(scalar_sets_.size());
        if (!job.outcome->used[run.unit] || !scalar_sets_.try_emplace({run.group, run.unit}, set).second) continue;
        scalars_.resize(scalars_.size() + STRATA_OPTIM_SCALARS);
        STRATA_RETURN_IF_ERROR(states_.optimizer().scalars(job.groups[run.group], steps[run.unit] + 1,
                                                           &scalars_[set * STRATA_OPTIM_SCALARS]));
      }
    }
  }
  return Ok();
}

const char* PartUpdate::gradient(const States::Piece& piece) const {
  return gradients_.owned(piece.unit, piece.segment) + piece.begin * dtype_size(dtype(piece));
}

Status PartUpdate::wait_for_readers(size_t position, const strata_stream* writer, std::chrono::nanoseconds deadline,
                                    TraceRow& row) const {
  for (const Work& reader : job_->after[position]) {
    const Span span(row, "wait for readers", job_->units[position], nullptr, !reader.is_set());
    STRATA_RETURN_IF_ERROR(reader.before(writer, deadline));
  }
  return Ok();
}

bool PartUpdate::updates_all(const States::Piece& piece) const {
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  const uint64_t first = layout_.owned(s).begin + piece.begin;
  for (const Run& run : s.runs) {
    if (intersect(run.range, {first, first + piece.count}).size() > 0 && !job_->outcome->used[run.unit]) return false;
  }
  return true;
}

Status PartUpdate::run(const States::Piece& piece, char* buffer, const char* grad, const strata_stream* stream) const {
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  const Optimizer& optimizer = states_.optimizer(piece);
  const Range owned = layout_.owned(s);
  const Range here = {owned.begin + piece.begin, owned.begin + piece.begin + piece.count};
  std::vector<strata_optim_span> spans;
  uint64_t elements = 0;
  for (const Run& run : s.runs) {
    const Range part = intersect(run.range, here);
    if (part.size() == 0 || !job_->outcome->used[run.unit]) continue;
    spans.push_back({part.begin - here.begin, part.size(), scalar_sets_.at({run.group, run.unit}), 0});
    elements += part.size();
  }
  std::vector<void*> arrays;
  strata_optim_args args{};
  args.struct_size = sizeof(args);
  states_.point(piece, buffer, &arrays, &args.weight);
  args.spans = spans.data();
  args.span_count = spans.size();
  args.span_stride = sizeof(strata_optim_span);
  args.scalars = scalars_.data();
  args.scalar_sets = scalars_.size() / STRATA_OPTIM_SCALARS;
  args.grad = grad;
  args.grad_dtype = dtype(piece);
  args.weight_dtype = s.dtype;
  args.state = arrays.data();
  const Factors& factors = reinterpret_cast<const Factors*>(factors_.at(0))[job_->step % 2];
  args.grad_scale = &factors.grad_scale;
  args.apply = &factors.apply;
  args.stream = stream;
  STRATA_RETURN_IF_ERROR(optimizer.step(args));
  add(counters_.updated_elements, elements);
  return Ok();
}

}  // namespace strata
