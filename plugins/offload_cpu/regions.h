// regions.h - the regions of one offload_cpu instance: who owns which bytes, against two budgets.
//
// A region is page-locked memory of the device plugin, or ordinary memory. Which of the two is settled when it is
// made: page-locked when that is asked for, fits the pinned budget and the device agrees; ordinary otherwise, which
// is said once per instance, with numbers, unless no device would copy from it. Budgets count the bytes asked for.
// `used` never exceeds the budget and `pinned` never exceeds the pinned budget, at any moment.
//
// Threads: `make` and `drop` come from one caller at a time; `find` and the counters may run beside them.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_map>

#include "strata/iface/device.h"
#include "strata/iface/offload.h"

namespace strata::offload_cpu {

struct Region {
  char* data = nullptr;
  uint64_t bytes = 0;
  bool pinned = false;
  std::string label;
};

struct Budgets {
  uint64_t bytes = UINT64_MAX;
  uint64_t pinned_bytes = UINT64_MAX;
  bool pin = false;
};

class Regions {
 public:
  // `device` may be NULL: nothing can be page-locked then.
  Regions(const strata_host* host, const Budgets& budgets, const strata_device_api* device, strata_device* device_self);
  ~Regions();
  Regions(const Regions&) = delete;

  strata_status make(uint64_t bytes, bool may_pin, const char* label, strata_region* out);
  void drop(strata_region id);
  // Copies the description out, so that it holds without the lock; the bytes live until drop.
  bool find(strata_region id, Region* out) const;

  uint64_t used() const;
  uint64_t pinned() const;
  uint64_t budget() const { return budgets_.bytes; }

 private:
  strata_status allocate(Region* region, bool may_pin);
  strata_status try_pinned(Region* region);
  void warn_once(const Region& region, const std::string& reason);
  void clear(Region* region) const;
  void release(const Region& region) const;

  const strata_host* host_;
  const strata_executor_api* executor_;
  const Budgets budgets_;
  const strata_device_api* device_;
  strata_device* device_self_;
  bool warned_ = false;

  mutable std::mutex mutex_;
  std::unordered_map<strata_region, Region> regions_;
  strata_region last_id_ = 0;
  uint64_t used_ = 0, pinned_ = 0;
};

}  // namespace strata::offload_cpu
