#include "core/gradients/gradients.h"

#include <algorithm>
#include <numeric>

namespace strata {

Gradients::Gradients(const Registry& registry, const Layout& layout, const ZeroSettings& settings, GradientPlan plan,
                     const Device& device, const Collective& collective, CommQueue& queue, const StatePlaces& places,
                     const Weights& weights, Counters& counters, Trace& trace, const strata_lender* lender,
                     const Device& host_device, const std::vector<int>& cpus)
    : registry_(registry),
      layout_(layout),
      settings_(settings),
      device_(device),
      queue_(queue),
      weights_(weights),
      counters_(counters),
      trace_(trace),
      slots_(layout.units.size()),
      memory_(layout, settings, plan, device, collective, queue, places, trace, lender),
      host_sums_(layout, device, host_device, trace, cpus),
      contributions_(registry.params.size()),
      last_fold_(registry.params.size()),
      unit_closed_(registry.units.size()),
      used_(registry.units.size()),
      launched_(layout.units.size()) {
  // Backward usually runs against the registration order; the resident unit is complete last.
  for (uint32_t u = static_cast<uint32_t>(slots_.size()); u-- > 0;) {
    if (trainable(u) && static_cast<int>(u) != layout.resident) order_.push_back(u);
  }
  if (layout.resident >= 0 && trainable(static_cast<uint32_t>(layout.resident))) {
    order_.push_back(static_cast<uint32_t>(layout.resident));
  }
  uint64_t all = 0;
  for (const Unit& unit : layout.units) all += unit.trainable_elements;
  asks_ = may_overflow_ = layout.world > 1 && all > memory_.waiting_limit();
}

Gradients::~Gradients() { (void)settle_writers(); }

void Gradients::add_to(Plan* plan, bool pins) const {
  memory_.add_to(plan, pins);
  HostSums::add_to(plan, memory_.bytes_to_host_sums());
}

Status Gradients::allocate() {
  STRATA_RETURN_IF_ERROR(completing_.create(device_, 0, trace_.add_stream("completing", trace_.host)));
  STRATA_RETURN_IF_ERROR(memory_.allocate());
  return host_sums_.allocate(memory_.bytes_to_host_sums());
}

Status Gradients::borrow(const strata_stream* stream) {
  if (!memory_.is_lent()) return Ok();
  bool lent = false;
  STRATA_RETURN_IF_ERROR(memory_.borrow(stream, &lent));
  return lent ? memory_.before(completing_.c()) : Ok();
}

// ---- a gradient arrives ------------------------------------------------------------------------------------------

Status Gradients::check(uint32_t param, const strata_tensor& grad) const {
  const Param& p = registry_.params[param];
  const Param& owner = registry_.owner_of(param);
  const std::string who = "gradient of param \"" + p.name + "\"";
  if (owner.frozen) return {STRATA_FAILED_PRECONDITION, who + ": the param is frozen"};
  if (!is_weight_dtype(grad.dtype)) {
    return {STRATA_INVALID_ARGUMENT, who + ": dtype must be fp32, bf16 or fp16, not " + dtype_name(grad.dtype)};
  }
  bool same = grad.ndim == static_cast<int32_t>(p.shape.size());
  for (int32_t i = 0; same && i < grad.ndim; ++i) same = grad.shape && grad.shape[i] == p.shape[static_cast<size_t>(i)];
  if (!same) {
    return {STRATA_INVALID_ARGUMENT, who + ": its shape " + shape_text(grad.shape, grad.ndim) + " is not the param's " +
                                         shape_text(p.shape.data(), static_cast<int32_t>(p.shape.size()))};
  }
  if (grad.device_type != device_.type()) {
    return {STRATA_INVALID_ARGUMENT, who + ": device_type of the tensor is " + std::to_string(grad.device_type) +
                                         ", the engine's device is of type " + std::to_string(device_.type())};
  }
  if (!grad.data && p.numel > 0) return {STRATA_INVALID_ARGUMENT, who + ": data is NULL"};
  if (micro_ == plan().micro_batches) {
    return {STRATA_FAILED_PRECONDITION, who + ": all " + std::to_string(micro_) +
                                            " micro-batches of gradient_accumulation_steps are in, call strata_step"};
  }
  if (slots_[owner.home].state == State::kReady || launched_[owner.home] || unit_closed_[p.unit]) {
    return {STRATA_FAILED_PRECONDITION,
            who + ": its unit was declared done (strata_grads_done) in this micro-batch, its reduction may have begun"};
  }
  return Ok();
}

// Everything that can be refused is, before anything is added: what is refused counts as not given. An error later on
// is this rank's end.
Status Gradients::add(const uint32_t* params, const std::vector<strata_tensor>& grads, const strata_stream* stream) {
  for (size_t i = 0; i < grads.size(); ++i) STRATA_RETURN_IF_ERROR(check(params[i], grads[i]));
  std::vector<Pending> given;
  for (size_t i = 0; i < grads.size(); ++i)
    given.push_back({registry_.params[params[i]].owner, grads[i].data, grads[i].dtype});
  const Status room = find_room(given, stream);
  if (room.code() == STRATA_RESOURCE_EXHAUSTED) return room;
  STRATA_RETURN_IF_ERROR(queue_.or_fail(room));
  return queue_.or_fail(take_in(given, stream));
}

Status Gradients::find_room(const std::vector<Pending>& given, const strata_stream* stream) {
  STRATA_RETURN_IF_ERROR(borrow(stream));
  return settings_.contiguous_gradients ? make_room(given) : Ok();
}

Status Gradients::take_in(const std::vector<Pending>& given, const strata_stream* stream) {
  for (const Pending& g : given) STRATA_RETURN_IF_ERROR(take_turn(slot_of(g), stream));
  if (settings_.contiguous_gradients) STRATA_RETURN_IF_ERROR(fold(given, stream));
  for (const Pending& g : given) {
    const Param& owner = registry_.params[g.param];
    Slot& slot = slot_of(g);
    if (!settings_.contiguous_gradients) slot.pending.push_back(g);
    filling_ = true;
    used_[owner.unit] = 1;
    strata::add(counters_.grad_bytes, owner.numel * dtype_size(g.dtype));
    if (slot.state == State::kIdle) slot.state = State::kFilling;
  }
  return Ok();
}

// A unit's gradients may come on several streams: each goes behind the one before.
Status Gradients::take_turn(Slot& slot, const strata_stream* stream) {
  if (!stream) return Ok();
  if (slot.writer && slot.writer->native != stream->native) {
    Marker end;
    STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, &*slot.writer, &end));
    STRATA_RETURN_IF_ERROR(end.before(stream));
  }
  slot.writer = *stream;
  return Ok();
}

// All of it is found before anything is folded: room for one unit may move another's.
Status Gradients::make_room(const std::vector<Pending>& given) {
  if (plan().local) return Ok();
  ++fold_launch_;
  for (const Pending& g : given) {
    const Param& owner = registry_.params[g.param];
    STRATA_RETURN_IF_ERROR(open_buffer(owner.home));
    const bool is_first = contributions_[g.param] == 0 && last_fold_[g.param] != fold_launch_;
    last_fold_[g.param] = fold_launch_;
    if (is_first || plan().wire(segment_of(owner)) == STRATA_F32 || sums_[g.param].bytes() > 0) continue;
    STRATA_RETURN_IF_ERROR(
        Memory::on_device(device_, owner.numel * sizeof(float), &sums_[g.param]).during("sum of " + owner.name));
  }
  ++fold_launch_;
  return Ok();
}

uint64_t Gradients::fp32_sum_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [owner, sum] : sums_) bytes += sum.bytes();
  return bytes;
}

// What make_room found room for.
Status Gradients::fold(const std::vector<Pending>& given, const strata_stream* stream) {
  if (!plan().local) STRATA_RETURN_IF_ERROR(buffers().before(stream));
  for (const Pending& g : given) STRATA_RETURN_IF_ERROR(fold_one(g, stream));
  return launch_folds(stream);
}

// Where gradients of a param are added up from the first one on.
char* Gradients::sum_of(const Param& owner, strata_dtype* dtype) const {
  *dtype = plan().local ? STRATA_F32 : plan().wire(segment_of(owner));
  char* begin = plan().local ? memory_.accumulator(owner.home, owner.segment) : memory_.wire(owner.home, owner.segment);
  return begin + owner.offset * dtype_size(*dtype);
}

Status Gradients::fold_one(const Pending& given, const strata_stream* stream) {
  const Param& owner = registry_.params[given.param];
  // Nothing in a launch has an order: the second gradient of a param comes with the next.
  if (last_fold_[given.param] == fold_launch_) STRATA_RETURN_IF_ERROR(launch_folds(stream));
  strata_dtype dtype = STRATA_F32;
  char* place = sum_of(owner, &dtype);
  const uint32_t before = contributions_[given.param];
  if (before > 0 && dtype != STRATA_F32) {
    char* sum = sums_[given.param].at(0);
    if (before == 1) {
      STRATA_RETURN_IF_ERROR(sums_read_.before(stream));
      STRATA_RETURN_IF_ERROR(device_.cast(sum, STRATA_F32, place, dtype, owner.numel, STRATA_ROUND_EVEN, stream));
    }
    place = sum;
    dtype = STRATA_F32;
  }
  folds_.push_back({sizeof(strata_fold_item), STRATA_ABI_MINOR, place, given.data, owner.numel, dtype, given.dtype,
                    before > 0 ? 1u : 0u, 0, nullptr});
  ++contributions_[given.param];
  last_fold_[given.param] = fold_launch_;
  return Ok();
}

Status Gradients::launch_folds(const strata_stream* stream) {
  ++fold_launch_;
  const Status folded = device_.fold(folds_, stream);
  folds_.clear();
  return folded;
}

// Waits for everything that is being written into buffers.
Status Gradients::settle_writers() {
  for (Slot& slot : slots_) {
    STRATA_RETURN_IF_ERROR(note_written(slot));
    STRATA_RETURN_IF_ERROR(slot.written.before(nullptr));
  }
  return completing_.wait();
}

Status Gradients::note_written(Slot& slot) {
  return slot.writer ? Marker::at_end_of(device_, &*slot.writer, &slot.written) : Ok();
}

Status Gradients::open_buffer(uint32_t unit) {
  if (memory_.buffer_bytes(unit) == 0 || buffers().is_open(unit)) return Ok();
  Status status = buffers().open(unit, [this] { return settle_writers(); });
  if (status.ok()) return Ok();
  return {status.code(), "gradients of unit \"" + layout_.units[unit].name + "\": " + status.text() +
                             ": raise zero_optimization.reduce_bucket_size, or tell with strata_grads_done when a "
                             "unit is complete"};
}

// ---- a unit is done ----------------------------------------------------------------------------------------------

Status Gradients::unit_done(uint32_t unit) {
  if (micro_ == plan().micro_batches) {
    return {STRATA_FAILED_PRECONDITION, "strata_grads_done: all micro-batches of this step are in, call strata_step"};
  }
  if (unit_closed_[unit]) {
    return {STRATA_FAILED_PRECONDITION, "unit \"" + layout_.units[unit].name + "\" was declared done already"};
  }
  return queue_.or_fail(close_unit(unit));
}

Status Gradients::close_unit(uint32_t unit) {
  filling_ = true;
  unit_closed_[unit] = 1;
  for (uint32_t fed : layout_.units[unit].feeds) {
    const auto& feeders = layout_.units[fed].feeders;
    const bool done = std::all_of(feeders.begin(), feeders.end(), [&](uint32_t f) { return unit_closed_[f]; });
    if (done && trainable(fed)) STRATA_RETURN_IF_ERROR(mark_ready(fed));
  }
  STRATA_RETURN_IF_ERROR(advance());
  return bound_waiting();
}

// Units that wait for a turn that does not come are sent after all, the longest waiting first. That depends on which
// units hosts declare done, in which order, and on sizes: not on which of them got gradients.
Status Gradients::bound_waiting() {
  if (waiting_elements_ > memory_.waiting_limit()) STRATA_RETURN_IF_ERROR(launch());
  for (size_t i = 0; i < ready_order_.size() && waiting_elements_ > memory_.waiting_limit(); ++i) {
    if (launched_[ready_order_[i]]) continue;
    STRATA_RETURN_IF_ERROR(append(ready_order_[i]));
    STRATA_RETURN_IF_ERROR(launch());
  }
  return Ok();
}

Status Gradients::mark_ready(uint32_t unit) {
  STRATA_RETURN_IF_ERROR(note_written(slots_[unit]));
  slots_[unit].state = State::kReady;
  ready_order_.push_back(unit);
  waiting_elements_ += layout_.units[unit].trainable_elements;
  return Ok();
}

Status Gradients::advance() {
  while (next_ < order_.size()) {
    const uint32_t unit = order_[next_];
    if (!launched_[unit]) {
      if (slots_[unit].state != State::kReady) break;
      STRATA_RETURN_IF_ERROR(append(unit));
    }
    ++next_;
  }
  return Ok();
}

Status Gradients::append(uint32_t unit) {
  const uint64_t elements = layout_.units[unit].trainable_elements;
  const auto limit = static_cast<uint64_t>(settings_.reduce_bucket_size);
  if (!bucket_.empty() && bucket_elements_ + elements > limit) STRATA_RETURN_IF_ERROR(launch());
  bucket_.push_back(unit);
  bucket_elements_ += elements;
  launched_[unit] = 1;
  return bucket_elements_ >= limit ? launch() : Ok();
}

Status Gradients::end_backward() {
  if (micro_ == plan().micro_batches) {
    return {STRATA_FAILED_PRECONDITION, "strata_end_backward: all " + std::to_string(micro_) +
                                            " micro-batches of gradient_accumulation_steps are in, call strata_step"};
  }
  return queue_.or_fail(end_micro_batch());
}

Status Gradients::end_micro_batch() {
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    if (!trainable(u) || slots_[u].state == State::kReady || launched_[u]) continue;
    STRATA_RETURN_IF_ERROR(mark_ready(u));
  }
  STRATA_RETURN_IF_ERROR(advance());
  STRATA_RETURN_IF_ERROR(launch());
  if (!order_.empty()) memory_.end_micro_batch(order_.front(), reduced_);
  ++micro_;
  begin_micro_batch();
  return Ok();
}

void Gradients::begin_micro_batch() {
  recorded_ = std::move(ready_order_);
  ready_order_.clear();
  waiting_elements_ = 0;
  next_ = 0;
  filling_ = false;
  std::fill(launched_.begin(), launched_.end(), 0);
  std::fill(unit_closed_.begin(), unit_closed_.end(), 0);
  for (Slot& slot : slots_) {
    slot.state = State::kIdle;
    if (plan().local && micro_ < plan().micro_batches) continue;  // its accumulators are written and read on
    slot.writer.reset();
    slot.written = {};
  }
  if (!plan().local || micro_ == plan().micro_batches) std::fill(contributions_.begin(), contributions_.end(), 0);
}

// Ranks may have come to different places. Where all send units in the order of the last step, the reductions of the
// whole step are what they can do alike. Else they ask each other before every reduction, and none is done any more, as
// none is by a rank alone.
Status Gradients::drop() {
  for (Slot& slot : slots_) slot.pending.clear();  // the host's tensors may be gone
  if (asks_ || layout_.world == 1) {
    if (asks_) ask(true);
    STRATA_RETURN_IF_ERROR(queue_.flush());
    STRATA_RETURN_IF_ERROR(queue_.or_fail(settle_writers()));
    bucket_.clear();
    bucket_elements_ = 0;
    std::vector<uint32_t> all(slots_.size());
    std::iota(all.begin(), all.end(), 0);
    buffers().hand_over(all, Work::ending_at({}));
    micro_ = plan().micro_batches;
    begin_micro_batch();
    dropped_ = false;
    queue_.forget_hash();
  }
  while (micro_ < plan().micro_batches) STRATA_RETURN_IF_ERROR(end_backward());
  micro_ = 0;
  std::fill(used_.begin(), used_.end(), 0);
  return Ok();
}

// Nobody knows which unit another rank sends next while their order is not that of the last step, but this comes first.
void Gradients::ask(bool drops) {
  const auto world = static_cast<size_t>(layout_.world);
  const auto said = std::make_shared<std::vector<uint64_t>>(world + 1, drops ? 1 : 0);
  CommOp op;
  op.kind = CommOp::Kind::kAgree;
  op.tag = 8ull << 32;
  op.label = drops ? "dropping of gradients" : "turn of a reduction";
  op.exchange = {&(*said)[world], said->data(), sizeof(uint64_t)};
  op.dropped = &dropped_;
  op.then = [this, said, world](const strata_stream*) {
    dropped_ = std::count(said->begin(), said->begin() + static_cast<std::ptrdiff_t>(world), 1u) > 0;
    return Ok();
  };
  (void)queue_.submit(std::move(op));
}

}  // namespace strata
