// shadow.h - a region and what it should hold: random writes and reads of any range, compared byte by byte.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "offload_fixture.h"

namespace strata::test {

class Shadow {
 public:
  Shadow(Tier& tier, uint64_t bytes, unsigned seed)
      : tier_(tier), region(tier.alloc(bytes, "layer3 exp_avg")), bytes_(bytes), holds_(bytes), random_(seed) {}

  // Empty, or what went wrong. Memory begins at `skew` bytes past a multiple of 65536.
  std::string write(uint64_t offset, uint64_t bytes, size_t skew = 0) {
    char* from = memory(bytes, skew);
    for (uint64_t i = 0; i < bytes; ++i) from[i] = static_cast<char>(random_());
    const strata_status code = tier_.write(region, offset, from, bytes);
    if (code != STRATA_OK) return reason(code);
    std::copy(from, from + bytes, holds_.begin() + static_cast<ptrdiff_t>(offset));
    return "";
  }
  std::string read(uint64_t offset, uint64_t bytes, size_t skew = 0) {
    char* to = memory(bytes, skew);
    std::memset(to, 0x5A, bytes);
    const strata_status code = tier_.read(region, offset, to, bytes);
    if (code != STRATA_OK) return reason(code);
    const bool same = std::equal(to, to + bytes, holds_.begin() + static_cast<ptrdiff_t>(offset));
    return same ? "" : "other bytes at " + std::to_string(offset) + ", " + std::to_string(bytes);
  }
  std::string read_all() { return read(0, bytes_); }
  // `unit` 1: any range.
  std::string random_calls(int count, uint64_t unit) {
    for (int i = 0; i < count; ++i) {
      const uint64_t units = bytes_ / unit;
      const uint64_t a = random_() % units, n = 1 + random_() % (units - a);
      const size_t skew = unit == 1 ? random_() % 3 * 2 : 0;
      const std::string wrong = random_() % 2 ? write(a * unit, n * unit, skew) : read(a * unit, n * unit, skew);
      if (!wrong.empty()) return wrong;
    }
    return read_all();
  }

 private:
  char* memory(uint64_t bytes, size_t skew) {
    memory_.resize(bytes + skew + 65536);
    const auto at = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (65536 - at % 65536) % 65536 + skew;
  }
  Tier& tier_;

 public:
  const strata_region region;

 private:
  const uint64_t bytes_;
  std::vector<char> holds_, memory_;
  std::mt19937 random_;
};

}  // namespace strata::test
