// tier.h - a place where bytes live: the device itself, or an offload plugin (cpu, nvme). One face for all of them.
//
// A region of an addressable tier has an address and is worked on in place: nothing moves and nothing is counted.
// Any other region is read and written in pieces; those bytes are counted here, once, when the transfer is asked for.
#pragma once

#include <string>
#include <vector>

#include "core/backends.h"
#include "core/counters.h"

namespace strata {

class Tier;

// Bytes in a tier; freed when it goes.
class Region {
 public:
  Region() = default;
  Region(Region&& o) noexcept { swap(o); }
  Region& operator=(Region&& o) noexcept {
    swap(o);
    return *this;
  }
  ~Region();

  uint64_t bytes() const { return bytes_; }
  // NULL when the tier is not addressable.
  char* address() const { return address_; }
  explicit operator bool() const { return tier_ != nullptr; }

 private:
  friend class Tier;
  void swap(Region& o);
  const Tier* tier_ = nullptr;
  strata_region id_ = 0;
  Memory device_memory_;
  char* address_ = nullptr;
  uint64_t bytes_ = 0;
};

// Memory that a tier was told of; forgotten when this goes, before the memory and the tier do. Memory that is left
// behind (backends.h) is not.
class Registration {
 public:
  Registration() = default;
  Registration(Registration&& o) noexcept { *this = std::move(o); }
  Registration& operator=(Registration&& o) noexcept {
    std::swap(offload_, o.offload_);
    std::swap(memory_, o.memory_);
    return *this;
  }
  ~Registration();
  void leave_behind() { offload_ = nullptr; }

 private:
  friend class Tier;
  const Offload* offload_ = nullptr;
  void* memory_ = nullptr;
};

// Memory of the device that transfers of tiers use.
struct TransferBuffer {
  // A transfer has not ended in time, and may use the memory yet.
  void leave_behind() {
    memory.leave_behind();
    for (Registration& each : registered) each.leave_behind();
  }

  Memory memory;
  std::vector<Registration> registered;
};

class Tier {
 public:
  // The device tier.
  Tier(const Device& device, Counters& counters) : device_(&device), counters_(&counters) {}
  // A tier served by an open offload plugin.
  Tier(TierKind kind, const Offload& offload, Counters& counters)
      : kind_(kind), offload_(&offload), counters_(&counters) {}

  TierKind kind() const { return kind_; }
  // Reads what the plugin can do; before the first alloc.
  Status inspect();
  bool addressable() const { return addressable_; }
  // What regions together never exceed; of an offload plugin.
  uint64_t budget() const { return budget_; }
  const std::string& budget_reason() const { return budget_reason_; }
  // Host memory that an offload plugin takes for itself with `bytes` in its regions.
  uint64_t own_bytes(uint64_t bytes) const { return own_bytes_ + ((bytes + kMiB - 1) / kMiB) * own_bytes_per_mib_; }
  // How long it has had transfers under way; 0 where that is not known.
  uint64_t busy_ns() const;

  // Zeros on an offload plugin, anything on the device. `label` appears in errors; `flags`: STRATA_REGION_*.
  Status alloc(uint64_t bytes, const std::string& label, Region* out, uint32_t flags = 0) const;
  // Moves bytes; `done` NULL: done on return. With DEADLINE_EXCEEDED `buffer` may be used yet: it must be left behind.
  Status read(const Region& region, uint64_t offset, uint64_t bytes, void* buffer, strata_event* done) const;
  Status write(const Region& region, uint64_t offset, uint64_t bytes, const void* buffer, strata_event* done) const;
  // The same between a region and the first bytes of `memory`, done on return: it is left behind where it must be.
  Status move_now(bool write_it, const Region& region, uint64_t offset, uint64_t bytes, Memory* memory) const;
  // Says that reads and writes will use this memory again and again: whole blocks of 4096, with no transfer under way
  // in them when `out` goes. It makes them cheaper where the tier can; the others do nothing.
  Status register_memory(void* memory, uint64_t bytes, Registration* out) const;
  // Bytes of an addressable tier that were moved from or to the device.
  void count(bool write, uint64_t bytes) const {
    strata::add((write ? counters_->tier_write : counters_->tier_read)[kind_], bytes);
  }
  // Brings a whole region of an addressable tier into device memory, as work on `stream`.
  Status to_device(const Region& region, const Device& device, void* to, const strata_stream* stream) const;

 private:
  friend class Region;
  strata_status alloc_on_plugin(uint64_t bytes, uint32_t flags, const std::string& label, strata_region* out) const;
  Status move(bool write, const Region& region, uint64_t offset, uint64_t bytes, void* buffer,
              strata_event* done) const;

  static constexpr uint64_t kMiB = uint64_t{1} << 20;
  TierKind kind_ = kDeviceTier;
  const Device* device_ = nullptr;
  const Offload* offload_ = nullptr;
  Counters* counters_;
  bool addressable_ = true;
  uint64_t budget_ = UINT64_MAX;
  std::string budget_reason_;  // "": the plugin does not say
  uint64_t own_bytes_ = 0, own_bytes_per_mib_ = 0;
};

}  // namespace strata
