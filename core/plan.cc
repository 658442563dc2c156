#include "core/plan.h"

#include <cstdio>
#include <fstream>
#include <sstream>

namespace strata {

namespace {
uint64_t mem_total() {
  std::ifstream in("/proc/meminfo");
  std::string key;
  uint64_t kib = 0;
  while (in >> key >> kib) {
    if (key == "MemTotal:") return kib * 1024;
    in.ignore(256, '\n');
  }
  return 0;
}
}  // namespace

const char* tier_name(TierKind tier) {
  static const char* const names[] = {"device", "cpu", "nvme"};
  return names[tier];
}

std::string size_text(uint64_t bytes) {
  static const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    ++unit;
  }
  char text[64];
  std::snprintf(text, sizeof(text), "%.2f %s", value, units[unit]);
  return text;
}

std::string bytes_text(uint64_t bytes) { return size_text(bytes) + " (" + std::to_string(bytes) + " bytes)"; }

std::string kept_note(uint64_t kept, uint64_t all, const std::string& setting) {
  char percent[32];
  std::snprintf(percent, sizeof(percent), "%.1f %%", 100 * static_cast<double>(kept) / static_cast<double>(all));
  return std::string(percent) + " of it, by " + setting;
}

std::string buffers_note(uint64_t count, uint64_t elements, uint64_t asked, bool is_given, const std::string& why) {
  return std::to_string(count) + " of " + std::to_string(elements) + " elements, " + (is_given ? "" : "the default ") +
         "buffer_size " + std::to_string(asked) + (elements == asked ? "" : ": " + why);
}

void Plan::set(const std::string& what, TierKind tier, uint64_t bytes) {
  for (PlanItem& item : items) {
    if (item.what == what && item.tier == tier) {
      item.bytes = bytes;
      return;
    }
  }
  add(what, tier, bytes);
}

void Plan::pin(const std::string& what, TierKind tier, uint64_t bytes) {
  for (PlanItem& item : items) {
    if (item.what == what && item.tier == tier) item.pinned = bytes;
  }
}

uint64_t Plan::in(TierKind tier) const {
  uint64_t sum = 0;
  for (const PlanItem& item : items) sum += item.tier == tier ? item.bytes : 0;
  return sum;
}

uint64_t Plan::pinned() const {
  uint64_t sum = 0;
  for (const PlanItem& item : items) sum += item.pinned;
  return sum;
}

std::vector<std::string> Plan::lines() const {
  std::vector<std::string> lines;
  for (const PlanItem& item : items) {
    lines.push_back(std::string(tier_name(item.tier)) + ": " + item.what + " " + bytes_text(item.bytes) +
                    (item.note.empty() ? "" : "; " + item.note));
  }
  for (TierKind tier : {kDeviceTier, kCpuTier, kNvmeTier}) {
    if (in(tier) > 0) lines.push_back(std::string(tier_name(tier)) + ": in all " + bytes_text(in(tier)));
  }
  return lines;
}

uint64_t host_limit(int64_t configured, std::string* origin) {
  if (configured > 0) {
    *origin = "host_memory_limit";
    return static_cast<uint64_t>(configured);
  }
  const uint64_t total = mem_total();
  std::ifstream in("/sys/fs/cgroup/memory.max");
  uint64_t cgroup = 0;
  if (in >> cgroup && cgroup < total) {
    *origin = "the cgroup's memory.max";
    return cgroup;
  }
  *origin = "MemTotal";
  return total;
}

Status Plan::check_disk(int rank, uint64_t budget, const std::string& reason) const {
  if (in(kNvmeTier) <= budget) return Ok();
  return {STRATA_RESOURCE_EXHAUSTED, "the plan needs " + bytes_text(in(kNvmeTier)) + " on nvme for rank " +
                                         std::to_string(rank) + ", which may take " + bytes_text(budget) +
                                         " there: " + reason + (reason.empty() ? "" : ", ") +
                                         "use more ranks, or keep more in memory with "
                                         "offload_optimizer.cpu_state_budget or offload_param.max_in_cpu"};
}

Status Plan::check_host(bool device_in_ram, int local_world, int64_t configured_limit) const {
  std::string origin;
  const uint64_t limit = host_limit(configured_limit, &origin);
  const uint64_t ranks = static_cast<uint64_t>(local_world);
  const uint64_t need = (in(kCpuTier) + (device_in_ram ? in(kDeviceTier) : 0)) * ranks;
  if (limit == 0 || need <= limit) return Ok();
  std::ostringstream text;
  text
      << "the plan needs " << bytes_text(need) << " of host memory for " << ranks << " rank(s) of this machine, "
      << origin << " allows " << bytes_text(limit) << ": use more ranks"
      << (in(kNvmeTier) == 0
              ? " or a higher stage, move state to nvme"
              : ", smaller buffers (buffer_size and buffer_count of offload_optimizer and offload_param, "
                "max_live_parameters, reduce_bucket_size), keep less of what is on disk (cpu_state_budget, max_in_cpu)")
      << ", or set host_memory_limit";
  return {STRATA_RESOURCE_EXHAUSTED, text.str()};
}

}  // namespace strata
