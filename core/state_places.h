// state_places.h - where the optimizer state of each unit lies, and so where its gradients end and its update runs; and
// where they are added up, if there are several micro-batches.
//
// All of it in the tier of the manifest; or, where state is offloaded and the device has a budget for some of it, units
// in their order on the device as long as that lasts, and the rest in the tier. What is then left of the budget keeps
// sums of further units on the device. Where the tier is no memory, a budget of host memory keeps the same share of
// every segment of the rest, so that what is read and written lies evenly over the forward order. Decided once, before
// anything is allocated.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/layout.h"
#include "core/tier.h"

namespace strata {

class StatePlaces {
 public:
  // `memory`: the tier of host memory for what is kept out of `tier`; may be NULL.
  StatePlaces(const Device& device, const Tier& device_tier, const Tier& tier, const Tier* memory, size_t units)
      : device_(device),
        device_tier_(device_tier),
        tier_(tier),
        memory_(memory),
        on_device_(units, tier.kind() == kDeviceTier),
        sums_(on_device_) {}

  // `bytes`: state of each unit. Returns what is left of the budget.
  uint64_t choose(const std::vector<uint64_t>& bytes, uint64_t device_budget) {
    const uint64_t left = keep(bytes, device_budget, &on_device_);
    sums_ = on_device_;
    return left;
  }
  // `bytes`: of sums of each unit's gradients.
  void choose_sums(const std::vector<uint64_t>& bytes, uint64_t device_budget) {
    (void)keep(bytes, device_budget, &sums_);
  }

  // After choose.
  void choose_kept(const std::vector<uint64_t>& bytes, uint64_t memory_budget) {
    uint64_t all = 0;
    for (size_t u = 0; u < bytes.size(); ++u) all += on_device_[u] ? 0 : bytes[u];
    if (memory_ && all > 0) kept_ = {std::min(memory_budget, all), all};
  }
  // Of `elements`, whole blocks of kShardElements, of a segment of `unit`: how many, from the first on, are kept.
  uint64_t kept(uint32_t unit, uint64_t elements) const {
    __extension__ using Wide = unsigned __int128;
    const Wide blocks = elements / kShardElements;
    return on_device_[unit] ? 0 : static_cast<uint64_t>(blocks * kept_.part / kept_.all) * kShardElements;
  }
  const Tier& memory() const { return *memory_; }

  // The manifest's tier: where state is that the device does not keep.
  const Tier& offload() const { return tier_; }
  bool on_device(uint32_t unit) const { return on_device_[unit]; }
  const Tier& tier(uint32_t unit) const { return on_device_[unit] ? device_tier_ : tier_; }
  // The update runs on the host, on memory of the host.
  bool on_host(uint32_t unit) const { return !on_device_[unit] || !device_.is_asynchronous(); }
  // Reduced gradients leave the device for the host's memory.
  bool leaves_device(uint32_t unit) const { return !on_device_[unit] && device_.is_asynchronous(); }
  // They are added up on the device first.
  bool sums_on_device(uint32_t unit) const { return sums_[unit] || !device_.is_asynchronous(); }

 private:
  static uint64_t keep(const std::vector<uint64_t>& bytes, uint64_t budget, std::vector<bool>* kept) {
    for (size_t u = 0; u < bytes.size(); ++u) {
      if ((*kept)[u] || bytes[u] == 0 || bytes[u] > budget) continue;
      (*kept)[u] = true;
      budget -= bytes[u];
    }
    return budget;
  }
  const Device& device_;
  const Tier& device_tier_;
  const Tier& tier_;
  const Tier* const memory_;
  struct {
    uint64_t part = 0, all = 1;
  } kept_;                              // share of all bytes
  std::vector<bool> on_device_, sums_;  // by unit
};

}  // namespace strata
