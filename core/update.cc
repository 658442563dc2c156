#include "core/update.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/fpu.h"
#include "core/plugins/cores.h"

namespace strata {

Updater::Updater(const Registry& registry, const Layout& layout, uint64_t sub_group_size, const Device& device,
                 const Optimizer& optimizer, const Gradients& gradients, const Weights& weights, States& states,
                 std::chrono::nanoseconds deadline, Counters& counters, Trace& trace, const std::vector<int>& cpus,
                 FailFn on_failure, LogFn log)
    : unit_steps(registry.units.size()),
      layout_(layout),
      sub_group_(std::max(kShardElements, sub_group_size / kShardElements * kShardElements)),
      device_(device),
      optimizer_(optimizer),
      gradients_(gradients),
      weights_(weights),
      states_(states),
      deadline_(deadline),
      counters_(counters),
      trace_(trace),
      on_failure_(std::move(on_failure)),
      log_(std::move(log)),
      thread_([this, cpus] {
        bind_this_thread(cpus);
        work();
      }) {}

Updater::~Updater() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  (void)stream_.wait();  // what was enqueued uses memory that goes next
}

uint64_t Updater::buffer_bytes() const {
  uint64_t largest = 0;
  for (uint32_t u = 0; u < layout_.units.size(); ++u) {
    for (uint32_t i = 0; i < layout_.units[u].segments.size(); ++i) {
      const Segment& s = layout_.units[u].segments[i];
      if (!s.trainable || states_.in_place(u)) continue;
      largest = std::max(largest, states_.buffer_bytes(s, std::min(sub_group_, layout_.owned(s).size())));
    }
  }
  return largest * kBuffers;
}

Status Updater::allocate() {
  STRATA_RETURN_IF_ERROR(stream_.create(device_, 0, trace_.add_stream("updates", trace_.update)));
  STRATA_RETURN_IF_ERROR(Memory::shared_with_host(device_, 2 * sizeof(Factors), &factors_).during("update factors"));
  const uint64_t each = buffer_bytes() / kBuffers;
  for (Memory& buffer : buffers_) {
    STRATA_RETURN_IF_ERROR(states_.memory_for_updates(each, &buffer).during("update buffers"));
  }
  return Ok();
}

void Updater::submit(UpdateJob job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
}

Status Updater::join() {
  std::unique_lock lock(mutex_);
  const Span wait(trace_.host, "wait for update", kNoUnit, nullptr, running_ || !jobs_.empty());
  idle_.wait(lock, [this] { return jobs_.empty() && !running_; });
  return failure_.ok() ? stream_.wait().during("update") : failure_;
}

void Updater::work() {
  use_default_rounding();
  std::unique_lock lock(mutex_);
  for (;;) {
    // Jobs that were submitted are finished even when the engine is closing.
    wake_.wait(lock, [this] { return stop_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    UpdateJob job = std::move(jobs_.front());
    jobs_.pop_front();
    running_ = true;
    Status status = failure_;
    lock.unlock();
    trace_.update.set_step(job.traced);
    if (status.ok()) {
      status = run(job).during("update of step " + std::to_string(job.step));
      if (!status.ok()) on_failure_(status);
    }
    for (Work& updated : job.updated) {
      if (!status.ok() && !updated.is_set()) updated.failed(status);
    }
    trace_.update.set_step(0);
    if (job.ends_trace) trace_.leave();
    lock.lock();
    if (failure_.ok()) failure_ = status;
    running_ = false;
    if (jobs_.empty()) idle_.notify_all();
  }
}

Status Updater::run(UpdateJob& job) {
  {
    const Span wait(trace_.update, "wait for agreement", kNoUnit, nullptr, !job.outcome->known.is_set());
    STRATA_RETURN_IF_ERROR(job.outcome->known.wait_enqueued(std::chrono::nanoseconds(-1)));
  }
  if (job.on_known) job.on_known(*job.outcome);
  STRATA_RETURN_IF_ERROR(job.outcome->apply ? apply(job) : skip(job));
  // Units that were left as they are, those of a skipped step included, are as new as everything enqueued so far.
  Marker end;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream_.c(), &end));
  for (Work& updated : job.updated) {
    if (!updated.is_set()) updated.enqueued(end);
  }
  return Ok();
}

Status Updater::apply(UpdateJob& job) {
  const Span span(trace_.update, "updates", kNoUnit, &trace_.timings.update);
  scalar_sets_.clear();
  scalars_.clear();
  reinterpret_cast<Factors*>(factors_.at(0))[job.step % 2] = {job.outcome->grad_scale, job.outcome->apply};
  std::vector<Part> parts;
  STRATA_RETURN_IF_ERROR(cut(job, &parts));
  STRATA_RETURN_IF_ERROR(pipeline(job, parts));
  for (size_t u = 0; u < unit_steps.size(); ++u) unit_steps[u] += job.outcome->used[u] ? 1 : 0;
  return Ok();
}

// The gradient is not finite, or there is none: nothing changes, and the ranks that hold the cause say what it is.
Status Updater::skip(UpdateJob& job) {
  if (!job.outcome->any_used_anywhere && layout_.places.world.rank == 0) {
    log_(STRATA_LOG_WARN, "step " + std::to_string(job.step) + " changes nothing: no rank handed over a gradient");
  }
  if (!job.outcome->own_part_finite) {
    std::string param = "?";
    STRATA_RETURN_IF_ERROR(gradients_.find_nonfinite(&param));
    log_(STRATA_LOG_WARN, "step " + std::to_string(job.step) + " is skipped: the reduced gradient of param \"" + param +
                              "\" is not finite on rank " + std::to_string(layout_.places.world.rank) +
                              "; weights and moments are unchanged");
  }
  return Ok();
}

bool Updater::is_used(const UpdateJob& job, uint32_t unit) const {
  // The resident unit holds params of all units.
  return static_cast<int>(unit) == layout_.resident ? job.outcome->any_used : job.outcome->used[unit] != 0;
}

// Sub-groups of every used unit in forward order; units nobody used are done at once.
Status Updater::cut(UpdateJob& job, std::vector<Part>* parts) const {
  Marker now;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream_.c(), &now));
  for (size_t k = 0; k < job.units.size(); ++k) {
    const uint32_t u = job.units[k];
    const size_t before = parts->size();
    for (uint32_t i = 0; is_used(job, u) && i < layout_.units[u].segments.size(); ++i) {
      const Segment& s = layout_.units[u].segments[i];
      const uint64_t owned = s.trainable ? layout_.owned(s).size() : 0;
      for (uint64_t at = 0; at < owned; at += sub_group_) {
        parts->push_back({{u, i, at, std::min(sub_group_, owned - at)}, k, false});
      }
    }
    if (parts->size() == before) {
      job.updated[k].enqueued(now);
    } else {
      parts->back().last = true;
    }
  }
  return Ok();
}

// Whether the host itself writes the unit's weights: into memory, or into a tier. Otherwise work on the stream does.
bool Updater::writes_from_host(uint32_t unit) const { return states_.on_host() && !weights_.on_device(unit); }

Status Updater::pipeline(UpdateJob& job, const std::vector<Part>& parts) {
  std::vector<Work> reads[kBuffers], writes[kBuffers];
  auto wait = [this](std::vector<Work>& all) {
    const Span span(trace_.update, "wait for transfers", kNoUnit, nullptr, !all.empty());
    for (const Work& work : all) STRATA_RETURN_IF_ERROR(work.before(nullptr, deadline_));
    all.clear();
    return Ok();
  };
  auto begin_read = [&](size_t i) {
    const size_t b = i % kBuffers;
    const uint32_t unit = parts[i].piece.unit;
    const Span span(trace_.update, "read", unit, nullptr, !states_.in_place(unit));
    STRATA_RETURN_IF_ERROR(wait(writes[b]));
    stream_.mark(nullptr);
    STRATA_RETURN_IF_ERROR(states_.load(parts[i].piece, buffers_[b].at(0), false, stream_.c(), &reads[b]));
    if (!reads[b].empty()) stream_.mark("from tier", unit);
    return Ok();
  };
  auto drain = [&](Status status) {
    // Buffers must not be reused or freed while a transfer is under way.
    for (size_t b = 0; b < kBuffers; ++b) {
      for (auto* transfers : {&reads[b], &writes[b]}) {
        Status s = wait(*transfers);
        if (status.ok()) status = s;
      }
    }
    return status;
  };
  if (!parts.empty()) STRATA_RETURN_IF_ERROR(begin_read(0));
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t b = i % kBuffers;
    const Part& part = parts[i];
    Status status = i + 1 < parts.size() ? begin_read(i + 1) : Ok();
    stream_.mark(nullptr);
    for (const Work& reader : std::exchange(job.after[part.position], {})) {
      const Span span(trace_.update, "wait for readers", part.piece.unit, nullptr, !reader.is_set());
      if (status.ok()) status = reader.before(writes_from_host(part.piece.unit) ? nullptr : stream_.c(), deadline_);
    }
    if (status.ok()) status = wait(reads[b]);
    if (status.ok()) status = update(job, part.piece, buffers_[b].at(0));
    if (status.ok()) status = store(part.piece, buffers_[b].at(0), &writes[b]);
    // Weights in a tier that is not addressable are new when they are written.
    if (status.ok() && part.last && !weights_.addressable(part.piece.unit)) {
      for (auto& transfers : writes) {
        if (status.ok()) status = wait(transfers);
      }
    }
    if (!status.ok()) {
      return drain(status.during("unit \"" + layout_.units[part.piece.unit].name + "\""));
    }
    if (!part.last) continue;
    Marker end;
    STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream_.c(), &end));
    job.updated[part.position].enqueued(end);
  }
  return drain(Ok());
}

Status Updater::store(const States::Piece& piece, char* buffer, std::vector<Work>* done) {
  const Span span(trace_.update, "write back", piece.unit, nullptr, !states_.in_place(piece.unit));
  stream_.mark(nullptr);
  STRATA_RETURN_IF_ERROR(states_.store(piece, buffer, stream_.c(), done));
  if (!done->empty()) stream_.mark("to tier", piece.unit);
  return Ok();
}

Status Updater::update(const UpdateJob& job, const States::Piece& piece, char* buffer) {
  const Segment& s = layout_.units[piece.unit].segments[piece.segment];
  const Range owned = layout_.owned(s);
  const Range here = {owned.begin + piece.begin, owned.begin + piece.begin + piece.count};
  std::vector<strata_optim_span> spans;
  uint64_t elements = 0;
  for (const Run& run : s.runs) {
    const Range part = intersect(run.range, here);
    if (part.size() == 0 || !job.outcome->used[run.unit]) continue;
    uint32_t set = 0;
    STRATA_RETURN_IF_ERROR(scalars(job, run.group, run.unit, &set));
    spans.push_back({part.begin - here.begin, part.size(), set, 0});
    elements += part.size();
  }
  const uint64_t bytes = states_.buffer_bytes(s, piece.count);
  Span span(trace_.update, "update", piece.unit);
  span.note(bytes, s.name);
  if (!states_.on_host()) stream_.mark("wait for readers", piece.unit);
  std::vector<void*> arrays;
  strata_optim_args args{};
  args.struct_size = sizeof(args);
  states_.point(piece, buffer, &arrays, &args.weight);
  const strata_dtype grad_dtype = gradients_.owned_dtype(s);
  args.spans = spans.data();
  args.span_count = spans.size();
  args.span_stride = sizeof(strata_optim_span);
  args.scalars = scalars_.data();
  args.scalar_sets = scalars_.size() / STRATA_OPTIM_SCALARS;
  args.grad = gradients_.owned(piece.unit, piece.segment) + piece.begin * dtype_size(grad_dtype);
  args.grad_dtype = grad_dtype;
  args.weight_dtype = s.dtype;
  args.state = arrays.data();
  const Factors& factors = reinterpret_cast<const Factors*>(factors_.at(0))[job.step % 2];
  args.grad_scale = &factors.grad_scale;
  args.apply = &factors.apply;
  args.stream = states_.on_host() ? nullptr : stream_.c();
  STRATA_RETURN_IF_ERROR(optimizer_.step(args));
  if (!states_.on_host()) stream_.mark("update", piece.unit, bytes, s.name);
  add(counters_.updated_elements, elements);
  if (states_.tier().kind() != kDeviceTier && weights_.tier().kind() == kDeviceTier) {
    add(counters_.tier_read[kCpuTier], piece.count * dtype_size(s.dtype));  // new weights leave the CPU tier
  }
  return Ok();
}

// The scalar set of a group for a unit's next update, computed once per step.
Status Updater::scalars(const UpdateJob& job, uint32_t group, uint32_t unit, uint32_t* set) {
  const auto [it, is_new] = scalar_sets_.try_emplace({group, unit}, static_cast<uint32_t>(scalar_sets_.size()));
  *set = it->second;
  if (!is_new) return Ok();
  scalars_.resize(scalars_.size() + STRATA_OPTIM_SCALARS);
  return optimizer_.scalars(job.groups[group], unit_steps[unit] + 1, &scalars_[*set * STRATA_OPTIM_SCALARS]);
}

}  // namespace strata
