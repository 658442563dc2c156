#include "regions.h"

#include <algorithm>
#include <cstring>

#include "host_memory/host_memory.h"
#include "plugin_kit/parallel.h"
#include "plugin_kit/plugin_kit.h"

namespace strata::offload_cpu {
namespace {

using plugin_kit::fail;

constexpr uint64_t kPiece = 4 * host_memory::kHugePage;  // bytes a thread makes present at a time

std::string number(uint64_t n) { return n == UINT64_MAX ? "no limit" : std::to_string(n); }

}  // namespace

Regions::Regions(const strata_host* host, const Budgets& budgets, const strata_device_api* device,
                 strata_device* device_self)
    : host_(host),
      executor_(plugin_kit::host_interface<strata_executor_api>(host, STRATA_HOST_EXECUTOR)),
      budgets_(budgets),
      device_(device),
      device_self_(device_self) {}

Regions::~Regions() {
  for (const auto& [id, region] : regions_) release(region);
}

strata_status Regions::make(uint64_t bytes, bool may_pin, const char* label, strata_region* out) {
  Region region;
  region.bytes = bytes;
  region.label = label ? label : "unnamed";
  if (bytes == 0) return fail(host_, STRATA_INVALID_ARGUMENT, "offload_cpu alloc \"" + region.label + "\": 0 bytes");
  const uint64_t in_use = used();
  if (bytes > budgets_.bytes - in_use) {
    return fail(host_, STRATA_RESOURCE_EXHAUSTED,
                "offload_cpu alloc \"" + region.label + "\": " + std::to_string(bytes) + " bytes wanted, " +
                    std::to_string(in_use) + " of the budget of " + std::to_string(budgets_.bytes) +
                    " used (option budget_bytes)");
  }
  if (strata_status code = allocate(&region, may_pin)) return code;
  clear(&region);

  std::lock_guard lock(mutex_);
  try {
    regions_.emplace(last_id_ + 1, region);
  } catch (...) {
    release(region);
    throw;
  }
  *out = ++last_id_;
  used_ += bytes;
  if (region.pinned) pinned_ += bytes;
  return STRATA_OK;
}

void Regions::drop(strata_region id) {
  Region region;
  {
    std::lock_guard lock(mutex_);
    auto found = regions_.find(id);
    if (found != regions_.end()) {
      region = std::move(found->second);
      regions_.erase(found);
      used_ -= region.bytes;
      if (region.pinned) pinned_ -= region.bytes;
    }
  }
  if (!region.data) {
    const std::string text = "free of region " + std::to_string(id) + ", which is not allocated: ignored";
    host_->log(host_->ctx, STRATA_LOG_HOST_MISBEHAVING, "offload_cpu", text.c_str());
    return;
  }
  release(region);
}

bool Regions::find(strata_region id, Region* out) const {
  std::lock_guard lock(mutex_);
  auto found = regions_.find(id);
  if (found == regions_.end()) return false;
  *out = found->second;
  return true;
}

uint64_t Regions::used() const {
  std::lock_guard lock(mutex_);
  return used_;
}

uint64_t Regions::pinned() const {
  std::lock_guard lock(mutex_);
  return pinned_;
}

strata_status Regions::allocate(Region* region, bool may_pin) {
  if (budgets_.pin && may_pin) {
    if (strata_status code = try_pinned(region)) return code;
    if (region->data) return STRATA_OK;
  }
  region->data = static_cast<char*>(host_memory::allocate(region->bytes));
  if (region->data) return STRATA_OK;
  return fail(host_, STRATA_RESOURCE_EXHAUSTED,
              "offload_cpu alloc \"" + region->label + "\": the system refused " + std::to_string(region->bytes) +
                  " bytes; " + std::to_string(used()) + " used, budget " + number(budgets_.bytes));
}

// Leaves region->data NULL when ordinary memory is to be used. Only errors other than "cannot" and "no more" fail.
strata_status Regions::try_pinned(Region* region) {
  const uint64_t locked = pinned();
  if (region->bytes > budgets_.pinned_bytes - locked) {
    warn_once(*region, "the pinned budget is " + number(budgets_.pinned_bytes) + " bytes, " + std::to_string(locked) +
                           " used (option pinned_budget_bytes)");
    return STRATA_OK;
  }
  void* data = nullptr;
  strata_status code = STRATA_UNIMPLEMENTED;
  if (device_ && STRATA_HAS(device_, strata_device_api, free_pinned) && device_->alloc_pinned) {
    code = device_->alloc_pinned(device_self_, region->bytes, &data);
  }
  if (code == STRATA_UNIMPLEMENTED || code == STRATA_RESOURCE_EXHAUSTED) {
    warn_once(*region, code == STRATA_UNIMPLEMENTED ? "the device plugin cannot lock memory"
                                                    : "the device plugin could lock no more than the " +
                                                          std::to_string(locked) + " bytes locked so far");
    return STRATA_OK;
  }
  if (code != STRATA_OK) return code;  // the device plugin gave the text
  if (reinterpret_cast<uintptr_t>(data) % host_memory::kAlignment != 0) {
    device_->free_pinned(device_self_, data);
    warn_once(*region, "the device plugin's locked memory is not aligned to 4096 bytes");
    return STRATA_OK;
  }
  region->data = static_cast<char*>(data);
  region->pinned = true;
  return STRATA_OK;
}

void Regions::warn_once(const Region& region, const std::string& reason) {
  if (warned_) return;
  warned_ = true;
  const std::string text = "pin_memory: \"" + region.label + "\" wants " + std::to_string(region.bytes) +
                           " bytes, but " + reason + "; it and later regions like it use ordinary memory";
  host_->log(host_->ctx, STRATA_LOG_WARN, "offload_cpu", text.c_str());
}

// Zeroes locked memory, and makes the pages of ordinary memory, which is zero already, present: from all threads,
// because one alone is bound by page faults.
void Regions::clear(Region* region) const {
  plugin_kit::for_parts(executor_, host_->ctx, region->bytes, kPiece, [&](uint64_t begin, uint64_t n) {
    if (region->pinned) {
      std::memset(region->data + begin, 0, n);
    } else {
      host_memory::touch(region->data + begin, n);
    }
  });
}

void Regions::release(const Region& region) const {
  if (region.pinned) {
    device_->free_pinned(device_self_, region.data);
  } else {
    host_memory::release(region.data, region.bytes);
  }
}

}  // namespace strata::offload_cpu
