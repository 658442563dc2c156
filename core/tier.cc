#include "core/tier.h"

#include <cstring>
#include <thread>

namespace strata {

void Region::swap(Region& o) {
  std::swap(tier_, o.tier_);
  std::swap(id_, o.id_);
  std::swap(device_memory_, o.device_memory_);
  std::swap(address_, o.address_);
  std::swap(bytes_, o.bytes_);
}

Region::~Region() {
  if (tier_ && tier_->offload_) tier_->offload_->api()->free(tier_->offload_->self(), id_);
}

Registration::~Registration() {
  if (offload_) offload_->api()->unregister_memory(offload_->self(), memory_);
}

Status Tier::register_memory(void* memory, uint64_t bytes, Registration* out) const {
  if (addressable_ || bytes == 0) return Ok();
  STRATA_RETURN_IF_ERROR(take_failure(offload_->api()->register_memory(offload_->self(), memory, bytes)));
  Registration made;
  made.offload_ = offload_;
  made.memory_ = memory;
  *out = std::move(made);
  return Ok();
}

Status Tier::inspect() {
  if (!offload_) return Ok();
  strata_offload_caps caps;
  STRATA_RETURN_IF_ERROR(read_caps(offload_->api(), offload_->self(), &caps));
  addressable_ = (caps.flags & STRATA_OFFLOAD_ADDRESSABLE) != 0;
  budget_ = caps.budget_bytes;
  own_bytes_ = caps.host_bytes;
  own_bytes_per_mib_ = caps.host_bytes_per_mib;
  if (caps.budget_reason) budget_reason_ = caps.budget_reason;
  if (caps.io_alignment > 0 && 4096 % caps.io_alignment != 0) {
    return {STRATA_UNIMPLEMENTED, "a tier that wants transfers at multiples of " + std::to_string(caps.io_alignment) +
                                      " bytes cannot be served: shards are multiples of 4096"};
  }
  return Ok();
}

uint64_t Tier::busy_ns() const {
  strata_offload_caps caps;
  return offload_ && read_caps(offload_->api(), offload_->self(), &caps).ok() ? caps.busy_ns : 0;
}

strata_status Tier::alloc_on_plugin(uint64_t bytes, uint32_t flags, const std::string& label,
                                    strata_region* out) const {
  const strata_offload_api* api = offload_->api();
  strata_status code = STRATA_UNIMPLEMENTED;
  if (flags != 0) code = api->alloc_for(offload_->self(), bytes, flags, label.c_str(), out);
  return code == STRATA_UNIMPLEMENTED ? api->alloc(offload_->self(), bytes, label.c_str(), out) : code;
}

Status Tier::alloc(uint64_t bytes, const std::string& label, Region* out, uint32_t flags) const {
  Region r;
  r.bytes_ = bytes;
  if (bytes == 0) {
    *out = std::move(r);
    return Ok();
  }
  if (!offload_) {
    STRATA_RETURN_IF_ERROR(Memory::on_device(*device_, bytes, &r.device_memory_).during(label));
    r.tier_ = this;
    r.address_ = r.device_memory_.at(0);
  } else {
    STRATA_RETURN_IF_ERROR(take_failure(alloc_on_plugin(bytes, flags, label, &r.id_)));
    r.tier_ = this;
    if (addressable_) {
      void* address = nullptr;
      STRATA_RETURN_IF_ERROR(take_failure(offload_->api()->map(offload_->self(), r.id_, &address)).during(label));
      r.address_ = static_cast<char*>(address);
    }
  }
  *out = std::move(r);
  return Ok();
}

Status Tier::move(bool write, const Region& region, uint64_t offset, uint64_t bytes, void* buffer,
                  strata_event* done) const {
  if (region.address_) {
    char* there = region.address_ + offset;
    std::memcpy(write ? there : buffer, write ? buffer : there, bytes);
    if (done) done->set(Ok());
    return Ok();
  }
  strata_io_args args = {sizeof(args), STRATA_ABI_MINOR, region.id_, offset, bytes, buffer};
  const auto call = write ? offload_->api()->write : offload_->api()->read;
  strata_status code;
  // A full queue drains by itself: the transfers in it have deadlines of their own.
  while ((code = call(offload_->self(), &args, done)) == STRATA_AGAIN) std::this_thread::yield();
  return take_failure(code);
}

Status Tier::read(const Region& region, uint64_t offset, uint64_t bytes, void* buffer, strata_event* done) const {
  add(counters_->tier_read[kind_], bytes);
  return move(false, region, offset, bytes, buffer, done);
}

Status Tier::move_now(bool write_it, const Region& region, uint64_t offset, uint64_t bytes, Memory* memory) const {
  const Status moved = write_it ? write(region, offset, bytes, memory->at(0), nullptr)
                                : read(region, offset, bytes, memory->at(0), nullptr);
  if (moved.code() == STRATA_DEADLINE_EXCEEDED) memory->leave_behind();
  return moved;
}

Status Tier::to_device(const Region& region, const Device& device, void* to, const strata_stream* stream) const {
  add(counters_->tier_read[kind_], region.bytes_);
  return device.copy(to, region.address_, region.bytes_, stream);
}

Status Tier::write(const Region& region, uint64_t offset, uint64_t bytes, const void* buffer,
                   strata_event* done) const {
  add(counters_->tier_write[kind_], bytes);
  return move(true, region, offset, bytes, const_cast<void*>(buffer), done);
}

}  // namespace strata
