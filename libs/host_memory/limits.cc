#include "host_memory/limits.h"

#include <algorithm>
#include <fstream>
#include <optional>

namespace strata::host_memory {
namespace {

// The value of "key:   123 kB" in /proc/meminfo, in bytes.
uint64_t meminfo(const std::string& root, const std::string& key) {
  std::ifstream file(root + "/proc/meminfo");
  for (std::string word; file >> word;) {
    uint64_t kib = 0;
    if (word == key + ":" && file >> kib) return kib * 1024;
  }
  return 0;
}

// The number in a cgroup file; nothing when it is absent or says "max".
std::optional<uint64_t> number(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The process's group under cgroup v2: the line "0::/path" of /proc/self/cgroup; "" is the root.
std::string group(const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::/", 0) == 0) return line.size() > 4 ? line.substr(3) : "";
  }
  return "";
}

}  // namespace

Limits read_limits(const std::string& root) {
  Limits limits{meminfo(root, "MemTotal"), meminfo(root, "MemAvailable")};
  for (std::string path = group(root);; path.resize(path.find_last_of('/'))) {
    const std::string folder = root + "/sys/fs/cgroup" + path;
    if (auto max = number(folder + "/memory.max")) {
      const uint64_t used = number(folder + "/memory.current").value_or(0);
      limits.total_bytes = std::min(limits.total_bytes, *max);
      limits.free_bytes = std::min(limits.free_bytes, *max > used ? *max - used : 0);
    }
    if (path.empty()) return limits;
  }
}

}  // namespace strata::host_memory
