// nvme_options.h - offload_nvme at a path, and what it logged.
#pragma once

#include <algorithm>
#include <string>

#include "offload_fixture.h"

namespace strata::test {

inline Options at(const std::string& path, const std::string& io = "auto", int probe_ms = 0) {
  return Options().set("nvme_path", path).set("probe_ms", probe_ms).set("io", io);
}

inline size_t mentions(const Tier& tier, const std::string& text) {
  const auto& lines = tier.rank.log_lines;
  return static_cast<size_t>(
      std::count_if(lines.begin(), lines.end(), [&](const auto& line) { return line.find(text) != line.npos; }));
}

}  // namespace strata::test
