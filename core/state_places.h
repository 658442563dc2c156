// state_places.h - where the optimizer state of each unit lies, and so where its gradients end and its update runs.
//
// All of it in the tier of the manifest; or, where state is offloaded and the device has a budget for some of it, units
// in their order on the device as long as that lasts, and the rest in the tier. Decided once, before anything is
// allocated.
#pragma once

#include <cstdint>
#include <vector>

#include "core/tier.h"

namespace strata {

class StatePlaces {
 public:
  StatePlaces(const Device& device, const Tier& device_tier, const Tier& tier, size_t units)
      : device_(device), device_tier_(device_tier), tier_(tier), on_device_(units, tier.kind() == kDeviceTier) {}

  // `bytes`: state of each unit.
  void choose(const std::vector<uint64_t>& bytes, uint64_t device_budget) {
    for (size_t u = 0; u < bytes.size(); ++u) {
      if (on_device_[u] || bytes[u] == 0 || bytes[u] > device_budget) continue;
      on_device_[u] = true;
      device_budget -= bytes[u];
    }
  }

  // The manifest's tier: where state is that the device does not keep.
  const Tier& offload() const { return tier_; }
  bool on_device(uint32_t unit) const { return on_device_[unit]; }
  const Tier& tier(uint32_t unit) const { return on_device_[unit] ? device_tier_ : tier_; }
  // The update runs on the host, on memory of the host.
  bool on_host(uint32_t unit) const { return !on_device_[unit] || !device_.is_asynchronous(); }
  // Reduced gradients leave the device for the host's memory.
  bool leaves_device(uint32_t unit) const { return !on_device_[unit] && device_.is_asynchronous(); }

 private:
  const Device& device_;
  const Tier& device_tier_;
  const Tier& tier_;
  std::vector<bool> on_device_;
};

}  // namespace strata
