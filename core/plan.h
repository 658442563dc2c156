// plan.h - every byte a rank will allocate, known, printed and checked before the first large allocation.
//
// The numbers come from the same size functions the allocations use, so the plan cannot drift from the run.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "core/counters.h"
#include "core/status.h"

namespace strata {

struct PlanItem {
  std::string what;
  TierKind tier;
  uint64_t bytes;
  uint64_t pinned;   // of them page-locked
  std::string note;  // which settings made it so, for the log
};

// "41.3 % of it, by cpu_state_budget = 1000000": what a budget came to.
std::string kept_note(uint64_t kept, uint64_t all, const std::string& setting);
// "4 of 999424 elements, buffer_size 1000000: why it is not that". `is_given`: it is not the default.
std::string buffers_note(uint64_t count, uint64_t elements, uint64_t asked, bool is_given, const std::string& why);

struct Plan {
  std::deque<PlanItem> items;  // a host may keep their names
  void add(std::string what, TierKind tier, uint64_t bytes, bool pinned = false, std::string note = "") {
    if (bytes > 0) items.push_back({std::move(what), tier, bytes, pinned ? bytes : 0, std::move(note)});
  }
  // In place of what was there under this name.
  void set(const std::string& what, TierKind tier, uint64_t bytes);
  // So many bytes of what is there under this name, if anything is, are page-locked.
  void pin(const std::string& what, TierKind tier, uint64_t bytes);
  uint64_t in(TierKind tier) const;
  uint64_t pinned() const;
  // One line per item and one per tier, for the log.
  std::vector<std::string> lines() const;
  // Bytes on disk of `rank` against what its tier may take, for a reason that the tier gives.
  Status check_disk(int rank, uint64_t budget, const std::string& reason) const;
  // Host RAM of the ranks of this machine against its limit. `device_in_ram`: the device tier is RAM, too.
  Status check_host(bool device_in_ram, int local_world, int64_t configured_limit) const;
};

// host_memory_limit, else the cgroup's limit, else MemTotal; `origin` says which.
uint64_t host_limit(int64_t configured, std::string* origin);

const char* tier_name(TierKind tier);    // "device", "cpu", "nvme"
std::string size_text(uint64_t bytes);   // "1.25 GiB"
std::string bytes_text(uint64_t bytes);  // "1.25 GiB (1342177280 bytes)"

}  // namespace strata
