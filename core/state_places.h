// state_places.h - where the optimizer state of each unit lies, and so where its gradients end and its update runs; and
// where they are added up, if there are several micro-batches.
//
// All of it in the tier of the manifest; or, where state is offloaded and the device has a budget for some of it, units
// in their order on the device as long as that lasts, and the rest in the tier. What is then left of the budget keeps
// sums of further units on the device. The front of a segment, its first elements, lies apart from the rest of it: what
// a budget of host memory keeps where the tier is no memory, or what the device updates where the manifest says how
// much that is. It is the same share of every segment, so that what is moved lies evenly over the forward order.
// Decided once, before anything is allocated.
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

  // Elements of each segment of each unit, in whole blocks of kShardElements; 0 where there is no state.
  using Sizes = std::vector<std::vector<uint64_t>>;
  // After choose. `bytes` as there.
  void keep_in_memory(const std::vector<uint64_t>& bytes, const Sizes& sizes, uint64_t budget) {
    uint64_t all = 0;
    for (size_t u = 0; u < bytes.size(); ++u) all += on_device_[u] ? 0 : bytes[u];
    if (memory_ && all > 0) choose_front(sizes, std::min(budget, all), all, false);
  }
  // Of all of them together this share, to a block.
  void stream(const Sizes& sizes, double share) {
    constexpr uint64_t kWhole = uint64_t{1} << 40;
    choose_front(sizes, static_cast<uint64_t>(share * static_cast<double>(kWhole)), kWhole, true);
  }
  // How many elements of a segment are its front.
  uint64_t front(uint32_t unit, uint32_t segment) const { return front_.empty() ? 0 : front_[unit][segment]; }
  // Where fronts lie.
  const Tier& front_tier() const { return memory_ ? *memory_ : tier_; }

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
  // `carries`: what a segment lacks to a whole block is the next one's.
  void choose_front(const Sizes& sizes, uint64_t part, uint64_t all, bool carries) {
    __extension__ using Wide = unsigned __int128;
    Wide left = carries ? all / 2 : 0;
    front_.assign(sizes.size(), {});
    for (size_t u = 0; u < sizes.size(); ++u) {
      for (const uint64_t elements : sizes[u]) {
        const Wide blocks = on_device_[u] ? 0 : Wide{elements / kShardElements} * part + left;
        if (!on_device_[u]) left = carries ? blocks % all : 0;
        front_[u].push_back(static_cast<uint64_t>(blocks / all) * kShardElements);
      }
    }
  }
  const Device& device_;
  const Tier& device_tier_;
  const Tier& tier_;
  const Tier* const memory_;
  Sizes front_;                         // by unit and segment; none: no segment has one
  std::vector<bool> on_device_, sums_;  // by unit
};

}  // namespace strata
