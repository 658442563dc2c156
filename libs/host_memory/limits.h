// limits.h - how much memory this process may use: the machine's, or its control group's where that is less.
//
// Read from /proc/meminfo and, under cgroup v2, from memory.max and memory.current of the process's group and of
// every group above it (each of them binds). What cannot be read does not limit.
#pragma once

#include <cstdint>
#include <string>

namespace strata::host_memory {

struct Limits {
  uint64_t total_bytes = 0;
  uint64_t free_bytes = 0;  // what could still be taken now
};

// `root` stands before /proc and /sys in every path; tests give a folder of their own.
Limits read_limits(const std::string& root = "");

}  // namespace strata::host_memory
