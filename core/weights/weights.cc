#include "core/weights/weights.h"

#include <algorithm>

#include "core/manifest/manifest_keys.h"
#include "core/spread.h"

namespace strata {

namespace {
constexpr uint64_t kNever = UINT64_MAX;
constexpr uint64_t kReadElements = uint64_t{8} << 20;  // of a buffer whose size is not given
alignas(kParamAlign) constexpr char kNothing[1] = {};  // where an empty param lies: a fetched one has an address
std::string count_text(uint64_t n) { return std::to_string(n); }
}  // namespace

Weights::Weights(const Layout& layout, const Settings& settings, const Device& device, const Collective& collective,
                 CommQueue& queue, const Tiers& tiers, std::chrono::nanoseconds deadline, Counters& counters,
                 Trace& trace)
    : layout_(layout),
      manifest_(settings),
      settings_(settings.zero_optimization),
      device_(device),
      collective_(collective),
      queue_(queue),
      tiers_(tiers),
      deadline_(deadline),
      counters_(counters),
      trace_(trace),
      slots_(layout.units.size()),
      kept_(layout.units.size()),
      check_writes_(settings.check_weights),
      guard_(device),
      host_refs_(layout.units.size()) {
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    uint64_t full = 0, shard = 0;
    for (const Segment& s : layout_.units[u].segments) {
      slots_[u].full.push_back(full);
      slots_[u].shard.push_back(shard);
      full += s.full_bytes();
      shard += s.shard_bytes();
    }
    slots_[u].full_bytes = full;
  }
  if (tiers_.memory) choose_kept();
}

void Weights::choose_kept() {
  const auto shard = [this](uint32_t unit) {
    return sharded(unit) ? layout_.units[unit].elements / static_cast<uint64_t>(layout_.world) : 0;
  };
  uint64_t all = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) all += shard(u);
  auto left = static_cast<uint64_t>(settings_.offload_param.max_in_cpu);
  Spread spread(all > 0 ? std::min(1.0, static_cast<double>(left) / static_cast<double>(all)) : 0);
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    const uint64_t elements = shard(u);
    if (elements == 0 || elements > left || !spread.next(elements)) continue;
    kept_[u] = true;
    left -= elements;
  }
}

// ---- sizes and allocation ----------------------------------------------------------------------------------------

uint64_t Weights::whole_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) bytes += sharded(u) ? 0 : layout_.units[u].full_bytes;
  return bytes;
}

uint64_t Weights::shard_bytes(TierKind kind) const {
  uint64_t bytes = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    if (sharded(u) && tier(u).kind() == kind) bytes += layout_.units[u].shard_bytes;
  }
  return bytes;
}

Weights::Reads Weights::reads() const {
  uint64_t largest = 0, widest = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    if (addressable(u)) continue;
    largest = std::max(largest, layout_.units[u].shard_bytes);
    for (const Segment& s : layout_.units[u].segments) widest = std::max(widest, dtype_size(s.dtype));
  }
  if (largest == 0) return {};
  const OffloadParamSettings& given = settings_.offload_param;
  const uint64_t elements = given.buffer_size > 0 ? static_cast<uint64_t>(given.buffer_size) : kReadElements;
  const uint64_t whole = elements / kShardElements * kShardElements, bytes = std::min(whole * widest, largest);
  const auto count = static_cast<uint64_t>(given.buffer_count);
  const std::string why =
      bytes < whole * widest ? "no shard is larger" : "in steps of " + std::to_string(kShardElements);
  return {count, bytes, buffers_note(count, bytes / widest, elements, given.buffer_size > 0, why)};
}

// "zero_optimization.max_live_parameters = 1000000000, the default"
std::string Weights::in_words(const std::string& key) const {
  const std::string path = "zero_optimization." + key;
  return path + " = " + value_in_words(manifest_, path);
}

std::string Weights::idle_note() const {
  const OffloadParamSettings& param = settings_.offload_param;
  if (param.device == OffloadDevice::kNone) return "";
  const bool nvme = param.device == OffloadDevice::kNvme;
  const uint64_t on_disk = shard_bytes(kNvmeTier), in_memory = shard_bytes(kCpuTier);
  const std::string none = "no weight shards " + std::string(nvme ? "on disk: " : "in host memory: ");
  const std::string kept = in_words("offload_param.max_in_cpu");
  if (on_disk + in_memory == 0) {
    return none + "no param has more elements than " + in_words("param_persistence_threshold") +
           ": all of them stay whole on every rank";
  }
  if (nvme && on_disk == 0) return none + "all there is stays in memory (" + kept + ")";
  const bool keeps_too_little = nvme && in_memory == 0 && param.max_in_cpu > 0;
  return keeps_too_little ? kept + " keeps no weight shards: it is less than the least part" : "";
}

void Weights::add_to(Plan* plan, bool pins) const {
  const bool streams = device_.is_asynchronous();
  const Reads buffers = reads();
  const std::string limit = "max_in_cpu = " + value_in_words(manifest_, "zero_optimization.offload_param.max_in_cpu");
  plan->add("whole weights", kDeviceTier, whole_bytes());
  for (TierKind kind : {kDeviceTier, kCpuTier, kNvmeTier}) {
    const uint64_t bytes = shard_bytes(kind);
    const bool kept = kind == kCpuTier && tiers_.offload.kind() == kNvmeTier && bytes > 0;
    plan->add("weight shards", kind, bytes, pins && kind == kCpuTier,
              kept ? kept_note(bytes, bytes + shard_bytes(kNvmeTier), limit) : "");
  }
  plan->add("weight slabs", kDeviceTier, slab_bytes());
  plan->add("weight shard staging", kDeviceTier, staging_bytes());
  plan->add("weight shard buffers", streams ? kCpuTier : kDeviceTier, buffers.count * buffers.bytes, streams,
            buffers.note);
  plan->add("copies of check_weights", kCpuTier, copy_bytes());
}

// Every sharded unit at once, or max_live_parameters of them plus the largest: room for first fit to place a unit
// although what is free lies in pieces.
uint64_t Weights::slab_bytes() const {
  uint64_t all = 0, largest = 0, widest = 2;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    if (!sharded(u)) continue;
    all += layout_.units[u].full_bytes;
    largest = std::max(largest, layout_.units[u].full_bytes);
    for (const Segment& s : layout_.units[u].segments) widest = std::max(widest, dtype_size(s.dtype));
  }
  const uint64_t live = static_cast<uint64_t>(settings_.max_live_parameters);
  return live >= all / widest ? all : std::min(all, live * widest + largest);
}

uint64_t Weights::staging_bytes() const {
  uint64_t largest = 0;
  if (offloaded() && layout_.world > 1) {
    for (uint32_t u = 0; u < slots_.size(); ++u) {
      if (sharded(u)) largest = std::max(largest, layout_.units[u].shard_bytes);
    }
  }
  return largest;
}

uint64_t Weights::copy_bytes() const { return check_writes_ ? slab_bytes() + whole_bytes() : 0; }

// Copies lie as the slabs do, and those of whole units behind them.
uint64_t Weights::copy_place(uint32_t unit) const {
  if (sharded(unit)) return slots_[unit].slab;
  uint64_t place = slab_bytes();
  for (uint32_t u = 0; u < unit; ++u) place += sharded(u) ? 0 : slots_[u].full_bytes;
  return place;
}

Status Weights::check_limits() const {
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    uint64_t together = sharded(u) ? layout_.units[u].elements : 0;
    for (uint32_t n : layout_.units[u].needs) together += sharded(n) ? layout_.units[n].elements : 0;
    if (together > static_cast<uint64_t>(settings_.max_live_parameters)) {
      return {STRATA_RESOURCE_EXHAUSTED, "unit \"" + layout_.units[u].name + "\" needs " + count_text(together) +
                                             " elements live at once, " + in_words("max_live_parameters") +
                                             ": raise it or register smaller units"};
    }
  }
  return Ok();
}

Status Weights::allocate(const std::vector<int>& cpus) {
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    const Unit& unit = layout_.units[u];
    Slot& slot = slots_[u];
    const uint64_t bytes = sharded(u) ? unit.shard_bytes : unit.full_bytes;
    const std::string label = "weights of " + unit.name;
    if (sharded(u) && offloaded()) {
      STRATA_RETURN_IF_ERROR(tier(u).alloc(bytes, label, &slot.region));
    } else {
      STRATA_RETURN_IF_ERROR(Memory::for_collectives(collective_, bytes, &slot.memory).during(label));
    }
  }
  STRATA_RETURN_IF_ERROR(Memory::for_collectives(collective_, slab_bytes(), &slabs_).during("slabs"));
  STRATA_RETURN_IF_ERROR(Memory::for_collectives(collective_, staging_bytes(), &staging_).during("shard staging"));
  if (check_writes_) STRATA_RETURN_IF_ERROR(guard_.allocate(copy_bytes()));
  if (const auto [count, bytes, note] = reads(); count > 0) {
    reader_ = std::make_unique<ShardReader>(device_, tiers_.offload, deadline_, trace_);
    STRATA_RETURN_IF_ERROR(reader_->allocate(count, bytes, cpus));
  }
  arena_ = Arena(slab_bytes());
  uint64_t all = 0;
  std::vector<uint64_t> places;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    places.push_back(all);
    all += sharded(u) ? layout_.units[u].full_bytes : 0;
  }
  if (all <= slab_bytes()) own_slab_ = std::move(places);
  return Ok();
}

std::optional<uint64_t> Weights::take_slab(uint32_t unit) {
  return own_slab_.empty() ? arena_.take(layout_.units[unit].full_bytes) : own_slab_[unit];
}

// ---- fetch and release -------------------------------------------------------------------------------------------

Status Weights::fetch(uint32_t unit, const strata_stream* stream) {
  add(counters_.fetches, 1);
  std::vector<uint32_t> set = layout_.units[unit].needs;
  set.push_back(unit);
  for (size_t i = 0; i < set.size(); ++i) {
    Status status = acquire(set[i]);
    if (!status.ok()) {
      while (i-- > 0) --slots_[set[i]].refs;  // not dropped: their gathers may be under way
      return status;
    }
  }
  order_.fetched(unit);
  prefetch();
  for (uint32_t u : set) {
    const Status status = queue_.or_fail(bring(u, stream));
    if (status.ok()) continue;
    for (uint32_t v : set) --slots_[v].refs;
    return status;
  }
  ++host_refs_[unit];
  ++fetched_;
  return Ok();
}

Status Weights::bring(uint32_t unit, const strata_stream* stream) {
  STRATA_RETURN_IF_ERROR(wait(unit, stream));
  if (!check_writes_ || slots_[unit].refs != 1) return Ok();
  STRATA_RETURN_IF_ERROR(wait(unit, nullptr));
  return guard_.remember(copy_place(unit), full_buffer(unit), slots_[unit].full_bytes);
}

Status Weights::release(uint32_t unit, const strata_stream* stream) {
  if (host_refs_[unit] == 0) {
    return {STRATA_FAILED_PRECONDITION, "unit \"" + layout_.units[unit].name + "\" is released but was not fetched"};
  }
  STRATA_RETURN_IF_ERROR(queue_.or_fail(note_use(unit, stream)));
  --host_refs_[unit];
  --fetched_;
  release_one(unit);
  for (uint32_t u : layout_.units[unit].needs) release_one(u);
  return Ok();
}

// What the host's stream did with the unit and those it needs, so far, comes before anything that overwrites them.
Status Weights::note_use(uint32_t unit, const strata_stream* stream) {
  if (!stream) return Ok();
  Marker end;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream, &end));
  const Use use = {stream->native, Work::ending_at(end)};
  const auto note = [&use](std::vector<Use>& uses) {
    const auto same = std::find_if(uses.begin(), uses.end(), [&](const Use& u) { return u.stream == use.stream; });
    same == uses.end() ? uses.push_back(use) : void(*same = use);
  };
  for (uint32_t u : layout_.units[unit].needs) note(slots_[u].uses);
  note(slots_[unit].uses);
  return Ok();
}

Status Weights::undo_write(uint32_t unit, const strata_stream* stream, std::optional<Written>* written) {
  written->reset();
  if (!check_writes_ || host_refs_[unit] == 0) return Ok();
  Marker end;
  STRATA_RETURN_IF_ERROR(Marker::at_end_of(device_, stream, &end));
  STRATA_RETURN_IF_ERROR(end.before(nullptr));
  std::vector<uint32_t> set = layout_.units[unit].needs;
  set.push_back(unit);
  for (uint32_t u : set) {
    const Slot& slot = slots_[u];
    std::optional<uint64_t> byte;
    STRATA_RETURN_IF_ERROR(guard_.compare(copy_place(u), full_buffer(u), slot.full_bytes, &byte));
    if (!byte) continue;
    uint32_t segment = 0;
    while (segment + 1 < slot.full.size() && slot.full[segment + 1] <= *byte) ++segment;
    *written = {u, segment, (*byte - slot.full[segment]) / dtype_size(layout_.units[u].segments[segment].dtype)};
  }
  return Ok();
}

char* Weights::full_buffer(uint32_t unit) const {
  return sharded(unit) ? slabs_.at(slots_[unit].slab) : slots_[unit].memory.at(0);
}

void* Weights::address(const Param& owner) const {
  const Slot& slot = slots_[owner.home];
  if (slot.refs == 0) return nullptr;
  if (owner.numel == 0) return const_cast<char*>(kNothing);
  return full_buffer(owner.home) + slot.full[owner.segment] + owner.offset * dtype_size(owner.dtype);
}

// Takes one reference, and starts the gather that makes the unit's weights whole if none is under way.
Status Weights::acquire(uint32_t unit) {
  Slot& slot = slots_[unit];
  if (sharded(unit) && !slot.live) {
    STRATA_RETURN_IF_ERROR(make_room(unit));
    submit_gather(unit);
  } else if (slot.stale) {
    submit_gather(unit);
  } else if (slot.prefetched) {
    add(counters_.prefetch_hits, 1);
  }
  if (slot.prefetched) {
    slot.prefetched = false;
    prefetched_elements_ -= layout_.units[unit].elements;
  }
  ++slot.refs;
  return Ok();
}

Status Weights::wait(uint32_t unit, const strata_stream* stream) {
  Slot& slot = slots_[unit];
  const Work& work = slot.gathered ? slot.gathered : slot.updated;
  if (!work) return Ok();
  const char* const what = slot.gathered ? "wait for gather" : "wait for update";
  const Span span(trace_.host, what, unit, nullptr, !work.is_set());
  return work.before(stream, queue_.patience()).during("fetch of unit \"" + layout_.units[unit].name + "\"");
}

void Weights::release_one(uint32_t unit) {
  Slot& slot = slots_[unit];
  if (--slot.refs > 0 || !sharded(unit)) return;
  const uint64_t distance = distance_to_next_use(unit);
  if (distance == kNever || distance > static_cast<uint64_t>(settings_.max_reuse_distance)) drop(unit);
}

// Elements other units will bring before this one is used again, by the recorded order.
uint64_t Weights::distance_to_next_use(uint32_t unit) const {
  uint64_t elements = 0;
  for (size_t k = 0;; ++k) {
    const int64_t next = order_.next(k);
    if (next < 0) return kNever;
    const auto& needs = layout_.units[next].needs;
    if (next == unit || std::find(needs.begin(), needs.end(), unit) != needs.end()) return elements;
    elements += layout_.units[next].elements;
    for (uint32_t n : needs) elements += sharded(n) ? layout_.units[n].elements : 0;
  }
}

void Weights::drop(uint32_t unit) {
  Slot& slot = slots_[unit];
  if (own_slab_.empty()) arena_.give(slot.slab, layout_.units[unit].full_bytes);
  if (!slot.uses.empty()) dropped_.push_back({slot.slab, slot.slab + slot.full_bytes, std::move(slot.uses)});
  slot.uses.clear();
  live_elements_ -= layout_.units[unit].elements;
  slot.live = false;
  slot.gathered = {};
}

Status Weights::drop_after_gather(uint32_t unit) {
  Slot& slot = slots_[unit];
  if (slot.gathered) {
    const Span wait(trace_.host, "wait for gather", unit, nullptr, !slot.gathered.is_set());
    STRATA_RETURN_IF_ERROR(slot.gathered.wait_enqueued(queue_.patience()));
  }
  if (slot.prefetched) {
    slot.prefetched = false;
    prefetched_elements_ -= layout_.units[unit].elements;
    add(counters_.prefetch_dropped, 1);
  }
  drop(unit);
  return Ok();
}

// Finds a slab for the unit, dropping kept and prefetched ones, the one needed last first.
Status Weights::make_room(uint32_t unit) {
  Slot& slot = slots_[unit];
  const Unit& u = layout_.units[unit];
  const auto max_live = static_cast<uint64_t>(settings_.max_live_parameters);
  for (;;) {
    if (live_elements_ + u.elements <= max_live) {
      if (auto offset = take_slab(unit)) {
        slot.slab = *offset;
        slot.live = true;
        live_elements_ += u.elements;
        return Ok();
      }
    }
    int64_t victim = -1;
    uint64_t farthest = 0;
    for (uint32_t v = 0; v < slots_.size(); ++v) {
      if (!slots_[v].live || slots_[v].refs > 0) continue;
      const uint64_t distance = distance_to_next_use(v);
      if (victim < 0 || distance > farthest) {
        victim = v;
        farthest = distance;
      }
    }
    if (victim < 0) break;
    STRATA_RETURN_IF_ERROR(drop_after_gather(static_cast<uint32_t>(victim)));
  }
  return {STRATA_RESOURCE_EXHAUSTED, "fetch of unit \"" + u.name + "\" (" + count_text(u.elements) + " elements): " +
                                         count_text(live_elements_) + " elements are fetched already, " +
                                         in_words("max_live_parameters") + ": release units earlier or raise it"};
}

// ---- gathering ---------------------------------------------------------------------------------------------------

// Of the units that lay where this one will. One wait is enough for all later gathers: they follow on the same stream.
std::vector<Work> Weights::uses_of_place(uint32_t unit) {
  std::vector<Work> uses;
  const uint64_t begin = slots_[unit].slab, end = begin + slots_[unit].full_bytes;
  for (size_t i = dropped_.size(); i-- > 0;) {
    if (dropped_[i].end <= begin || dropped_[i].begin >= end) continue;
    for (Use& use : dropped_[i].uses) uses.push_back(std::move(use.end));
    dropped_.erase(dropped_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return uses;
}

void Weights::submit_gather(uint32_t unit) {
  Slot& slot = slots_[unit];
  const Unit& u = layout_.units[unit];
  CommOp op;
  op.label = "gather of unit \"" + u.name + "\"";
  op.tag = (1ull << 32) | unit;
  op.unit = unit;
  if (sharded(unit)) op.after = uses_of_place(unit);
  if (slot.updated) op.after.push_back(slot.updated);
  const bool from_tier = sharded(unit) && offloaded();
  const bool alone = layout_.world == 1;
  op.kind = alone ? CommOp::Kind::kLocal : CommOp::Kind::kGather;
  char* full = full_buffer(unit);
  char* shard = from_tier ? (alone ? full : staging_.at(0)) : slot.memory.at(0);
  if (from_tier && addressable(unit)) {
    op.prepare = [this, unit, shard, region = &slot.region](const strata_stream* stream) {
      return tier(unit).to_device(*region, device_, shard, stream);
    };
  } else if (from_tier) {
    reader_->expect(op.label, unit, slot.region, slot.updated);
    op.prepare = [this, shard, region = &slot.region](const strata_stream* stream) {
      return reader_->bring(*region, shard, stream);
    };
  }
  for (uint32_t i = 0; i < u.segments.size() && !alone; ++i) {
    const Segment& s = u.segments[i];
    char* out = full + slot.full[i];
    if (!sharded(unit) && !s.trainable) continue;  // frozen weights never go stale
    const char* in = sharded(unit) ? shard + slot.shard[i] : out + layout_.rank * s.shard_bytes();
    op.items.push_back(coll_item(in, s.dtype, out, s.dtype, s.shard));
  }
  slot.stale = false;
  slot.gathered = slot.shard_read = queue_.submit(std::move(op));
}

void Weights::prefetch() {
  for (size_t k = 0;; ++k) {
    const int64_t next = order_.next(k);
    if (next < 0) return;
    for (uint32_t n : layout_.units[next].needs) {
      if (!prefetch_one(n)) return;
    }
    if (!prefetch_one(static_cast<uint32_t>(next))) return;
  }
}

// False when the budget is used up.
bool Weights::prefetch_one(uint32_t unit) {
  Slot& slot = slots_[unit];
  const Unit& u = layout_.units[unit];
  if (sharded(unit) ? slot.live : !slot.stale) return true;
  if (prefetched_elements_ + u.elements > static_cast<uint64_t>(settings_.prefetch_bucket_size)) return false;
  if (sharded(unit)) {
    if (live_elements_ + u.elements > static_cast<uint64_t>(settings_.max_live_parameters)) return false;
    const auto offset = take_slab(unit);
    if (!offset) return false;
    slot.slab = *offset;
    slot.live = true;
    live_elements_ += u.elements;
  }
  slot.prefetched = true;
  prefetched_elements_ += u.elements;
  submit_gather(unit);
  return true;
}

Status Weights::wait_for_readers() const {
  for (const Slot& slot : slots_) {
    for (const Use& use : slot.uses) STRATA_RETURN_IF_ERROR(use.end.before(nullptr, queue_.patience()));
    if (slot.shard_read) STRATA_RETURN_IF_ERROR(slot.shard_read.before(nullptr, queue_.patience()));
  }
  return Ok();
}

// ---- updates -----------------------------------------------------------------------------------------------------

void Weights::begin_update(uint32_t unit, Work updated, std::vector<Work>* after) {
  Slot& slot = slots_[unit];
  for (Use& use : slot.uses) after->push_back(std::move(use.end));
  slot.uses.clear();
  if (slot.shard_read) after->push_back(slot.shard_read);
  slot.updated = std::move(updated);
  slot.gathered = {};
  slot.stale = !sharded(unit) && layout_.world > 1 && layout_.stage > 0;
}

Status Weights::end_step() {
  order_.end_step();
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    Slot& slot = slots_[u];
    if (slot.live && slot.refs == 0) STRATA_RETURN_IF_ERROR(drop_after_gather(u));
    if (!sharded(u) && slot.prefetched) {
      slot.prefetched = false;
      prefetched_elements_ -= layout_.units[u].elements;
      add(counters_.prefetch_dropped, 1);
    }
  }
  return Ok();
}

Status Weights::invalidate(uint32_t unit) {
  Slot& slot = slots_[unit];
  if (slot.live) return drop_after_gather(unit);
  return Ok();
}

std::vector<uint32_t> Weights::forward_order() const {
  std::vector<uint32_t> order;
  std::vector<bool> seen(slots_.size(), false);
  auto push = [&](uint32_t u) {
    if (!seen[u]) order.push_back(u);
    seen[u] = true;
  };
  if (layout_.resident >= 0) push(static_cast<uint32_t>(layout_.resident));
  for (uint32_t u : order_.last()) {
    for (uint32_t n : layout_.units[u].needs) push(n);
    push(u);
  }
  for (uint32_t u = 0; u < slots_.size(); ++u) push(u);
  return order;
}

OwnedWeights Weights::owned(uint32_t unit, uint32_t segment) const {
  const Slot& slot = slots_[unit];
  const Segment& s = layout_.units[unit].segments[segment];
  if (!sharded(unit)) {
    return {slot.memory.at(slot.full[segment]) + layout_.owned(s).begin * dtype_size(s.dtype), nullptr, 0};
  }
  if (!offloaded()) return {slot.memory.at(slot.shard[segment]), nullptr, 0};
  char* address = slot.region.address();
  return {address ? address + slot.shard[segment] : nullptr, &slot.region, slot.shard[segment]};
}

char* Weights::whole(uint32_t unit, uint32_t segment) const {
  return slots_[unit].memory.at(slots_[unit].full[segment]);
}

}  // namespace strata
