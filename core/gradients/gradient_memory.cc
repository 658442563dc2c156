#include "core/gradients/gradient_memory.h"

#include <algorithm>
#include <utility>

namespace strata {

GradientMemory::GradientMemory(const Layout& layout, const ZeroSettings& settings, GradientPlan plan,
                               const Device& device, const Collective& collective, const CommQueue& queue,
                               const StatePlaces& places, Trace& trace, const strata_lender* lender)
    : layout_(layout),
      settings_(settings),
      plan_(plan),
      device_(device),
      collective_(collective),
      queue_(queue),
      places_(places),
      slots_(layout.units.size()),
      buffers_(device, queue, trace),
      lender_(device, lender) {
  uint64_t largest = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    Slot& slot = slots_[u];
    for (const Segment& s : layout.units[u].segments) {
      slot.wire.push_back(slot.buffer_bytes);
      if (s.trainable && plan_.needs_wire_buffer(s)) slot.buffer_bytes += s.elements * dtype_size(plan_.wire(s));
    }
    largest = std::max(largest, layout.units[u].trainable_elements);
  }
  waiting_limit_ = static_cast<uint64_t>(settings.reduce_bucket_size) + largest;
}

// ---- sizes -------------------------------------------------------------------------------------------------------

// Buffers for all units, or for those that wait, two that are being filled, and those that stay open over the whole
// backward because several units feed them. Beside a room that is smaller than all buffers: zeros, from which a unit
// without a gradient is reduced.
GradientMemory::Room GradientMemory::room() const {
  uint64_t all = 0, largest = 0, shared = 0, widest = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    all += slots_[u].buffer_bytes;
    largest = std::max(largest, slots_[u].buffer_bytes);
    if (layout_.units[u].feeders.size() > 1) shared += slots_[u].buffer_bytes;
    for (const Segment& s : layout_.units[u].segments) {
      if (s.trainable && plan_.needs_wire_buffer(s)) widest = std::max(widest, dtype_size(plan_.wire(s)));
    }
  }
  if (widest == 0 || waiting_limit_ >= all / widest) return {all, 0};
  const uint64_t part = waiting_limit_ * widest + 2 * largest + shared;
  return part < all ? Room{part, largest} : Room{all, 0};
}

uint64_t GradientMemory::owned_bytes(bool on_device) const {
  uint64_t bytes = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    for (const Segment& s : layout_.units[u].segments) {
      if (!s.trainable || places_.on_device(u) != on_device) continue;
      bytes += layout_.owned(s).size() * dtype_size(plan_.owned(s));
    }
  }
  return bytes;
}

uint64_t GradientMemory::accumulator_bytes() const {
  uint64_t bytes = 0;
  for (const Unit& u : layout_.units) bytes += plan_.local ? u.trainable_elements * sizeof(float) : 0;
  return bytes;
}

uint64_t GradientMemory::sum_bytes(uint32_t unit) const {
  uint64_t bytes = 0;
  for (const Segment& s : layout_.units[unit].segments) {
    if (s.trainable && plan_.adds_up() && places_.leaves_device(unit)) bytes += layout_.owned(s).size() * sizeof(float);
  }
  return bytes;
}

std::vector<uint64_t> GradientMemory::bytes_to_host_sums() const {
  std::vector<uint64_t> bytes;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    for (const Segment& s : layout_.units[u].segments) {
      if (!s.trainable || !sums_on_host(u)) continue;
      bytes.push_back(layout_.owned(s).size() * dtype_size(takes_as_sent(s) ? plan_.wire(s) : STRATA_F32));
    }
  }
  return bytes;
}

uint64_t GradientMemory::arriving_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) bytes += sums_on_host(u) ? 0 : sum_bytes(u);
  return bytes;
}

bool GradientMemory::uses_scratch(uint32_t unit) const {
  const auto& segments = layout_.units[unit].segments;
  const auto in_scratch = [this](const Segment& s) { return s.trainable && !takes_as_sent(s); };
  return (plan_.adds_up() || !keeps(unit)) && std::any_of(segments.begin(), segments.end(), in_scratch);
}

uint64_t GradientMemory::scratch_bytes() const {
  uint64_t all = 0, largest = 0;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    if (!uses_scratch(u)) continue;
    all += layout_.units[u].trainable_elements;
    largest = std::max(largest, layout_.units[u].trainable_elements);
  }
  const uint64_t group = std::max(largest, std::min(all, static_cast<uint64_t>(settings_.reduce_bucket_size)));
  return group / (layout_.stage == 0 ? 1 : static_cast<uint64_t>(layout_.world)) * sizeof(float);
}

uint64_t GradientMemory::norm_blocks(bool counted) const {
  uint64_t blocks = 0;
  for (const Unit& u : layout_.units) {
    for (const Segment& s : u.segments) blocks += s.trainable && s.counted == counted ? s.shard / kShardElements : 0;
  }
  return blocks;
}

void GradientMemory::add_to(Plan* plan, bool pins) const {
  const bool streams = device_.is_asynchronous();
  const TierKind state = places_.offload().kind();
  const std::string lent = is_lent() ? " (lent by the host)" : "";
  plan->add("gradient buffers" + lent, kDeviceTier, buffer_bytes());
  plan->add("gradient accumulators" + lent, kDeviceTier, accumulator_bytes());
  plan->add("arriving gradients" + lent, kDeviceTier, arriving_bytes());
  plan->add("reduction scratch" + lent, kDeviceTier, scratch_bytes());
  plan->add("reduced gradients" + lent, kDeviceTier, owned_bytes(true));
  plan->add("reduced gradients", kCpuTier, owned_bytes(false), state == kCpuTier ? pins : streams);
  plan->add("gradient norms", streams ? kCpuTier : kDeviceTier, norm_bytes(), streams);
}

// ---- memory ------------------------------------------------------------------------------------------------------

Status GradientMemory::allocate() {
  STRATA_RETURN_IF_ERROR(Memory::shared_with_host(device_, norm_bytes(), &norms_).during("norms"));
  auto* counted = reinterpret_cast<double*>(norms_.at(0));
  double* copies = counted + norm_blocks(true);
  std::vector<uint64_t> sizes;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    sizes.push_back(slots_[u].buffer_bytes);
    for (const Segment& s : layout_.units[u].segments) {
      double*& norm = s.counted ? counted : copies;
      slots_[u].norm.push_back(norm);
      norm += s.trainable ? s.shard / kShardElements : 0;
    }
  }
  buffers_.plan(std::move(sizes), room());
  Blocks blocks;
  STRATA_RETURN_IF_ERROR(allocate_offloaded().during("reduced gradients"));
  if (!is_lent()) STRATA_RETURN_IF_ERROR(allocate_blocks(&blocks));
  place(blocks);
  return Ok();
}

// Reduced gradients lie where the update reads them; an NVMe tier reads them from RAM.
Status GradientMemory::allocate_offloaded() {
  const uint64_t bytes = owned_bytes(false);
  char* at = nullptr;
  if (bytes > 0 && places_.offload().addressable()) {
    STRATA_RETURN_IF_ERROR(places_.offload().alloc(bytes, "reduced gradients", &offloaded_region_));
    at = offloaded_region_.address();
  } else if (bytes > 0) {
    STRATA_RETURN_IF_ERROR(Memory::shared_with_host(device_, bytes, &offloaded_memory_));
    at = offloaded_memory_.at(0);
  }
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    if (!places_.on_device(u)) place_reduced(u, &at);
  }
  return Ok();
}

Status GradientMemory::allocate_blocks(Blocks* blocks) {
  STRATA_RETURN_IF_ERROR(buffers_.allocate(collective_, &blocks->buffers));
  STRATA_RETURN_IF_ERROR(
      Memory::for_collectives(collective_, accumulator_bytes(), &accumulators_).during("gradient accumulators"));
  STRATA_RETURN_IF_ERROR(Memory::for_collectives(collective_, scratch_bytes(), &scratch_).during("reduction scratch"));
  STRATA_RETURN_IF_ERROR(Memory::on_device(device_, arriving_bytes(), &arriving_).during("arriving gradients"));
  STRATA_RETURN_IF_ERROR(Memory::on_device(device_, owned_bytes(true), &reduced_).during("reduced gradients"));
  blocks->accumulators = accumulators_.at(0);
  blocks->scratch = scratch_.at(0);
  blocks->arriving = arriving_.bytes() > 0 ? arriving_.at(0) : nullptr;
  blocks->reduced = reduced_.at(0);
  return Ok();
}

namespace {
char* take(char** next, uint64_t bytes) { return *next ? std::exchange(*next, *next + bytes) : nullptr; }
}  // namespace

void GradientMemory::place_reduced(uint32_t unit, char** at) {
  slots_[unit].owned.clear();
  for (const Segment& s : layout_.units[unit].segments) {
    const uint64_t count = s.trainable ? layout_.owned(s).size() : 0;
    slots_[unit].owned.push_back(count > 0 ? take(at, count * dtype_size(plan_.owned(s))) : nullptr);
  }
}

// Gives every segment its place in the blocks. Nothing uses the old ones; slices in the tier stay where they are: the
// update may be reading them.
void GradientMemory::place(const Blocks& blocks) {
  blocks_ = blocks;
  buffers_.place(blocks.buffers);
  Blocks at = blocks;
  for (uint32_t u = 0; u < slots_.size(); ++u) {
    Slot& slot = slots_[u];
    slot.arriving.clear();
    slot.accumulator.clear();
    if (places_.on_device(u)) place_reduced(u, &at.reduced);
    for (const Segment& s : layout_.units[u].segments) {
      const uint64_t count = s.trainable ? layout_.owned(s).size() : 0;
      const bool arrives = count > 0 && places_.leaves_device(u) && !sums_on_host(u);
      slot.arriving.push_back(arrives ? take(&at.arriving, count * sizeof(float)) : nullptr);
      slot.accumulator.push_back(s.trainable && plan_.local ? take(&at.accumulators, s.elements * sizeof(float))
                                                            : nullptr);
    }
  }
}

// What allocate_blocks does where nobody lends. Blocks that are still there from the last step stay.
Status GradientMemory::borrow(const strata_stream* stream, bool* lent) {
  if (!stream && host_stream_.native) stream = &host_stream_;
  lender_.keep();
  *lent = !lender_.is_holding();
  if (!*lent) return stream ? lender_.before(stream) : Ok();
  std::vector<char*> blocks;
  STRATA_RETURN_IF_ERROR(lender_.borrow(
      {buffer_bytes(), accumulator_bytes(), scratch_bytes(), arriving_bytes(), owned_bytes(true)}, stream, &blocks));
  place({blocks[0], blocks[1], blocks[2], blocks[3], blocks[4]});
  if (room().zeros > 0) STRATA_RETURN_IF_ERROR(device_.zero(blocks[0] + room().buffers, room().zeros, stream));
  return lender_.begin(stream);
}

void GradientMemory::end_micro_batch(uint32_t first, const Work& reduced) {
  if (lender_.is_holding() && kept_bytes() == 0) lender_.until_fetched({first}, reduced);
}

Status GradientMemory::note_fetch(uint32_t unit, const strata_stream* stream) {
  if (stream) host_stream_ = *stream;
  if (!lender_.is_holding()) return Ok();
  bool ended = false;
  for (uint32_t needed : layout_.units[unit].needs) {
    STRATA_RETURN_IF_ERROR(lender_.note_fetch(needed, stream, queue_.patience(), &ended));
  }
  STRATA_RETURN_IF_ERROR(lender_.note_fetch(unit, stream, queue_.patience(), &ended));
  if (ended) place({});
  return Ok();
}

}  // namespace strata
