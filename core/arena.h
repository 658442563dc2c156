// arena.h - places of varying size in one fixed range of offsets: first fit, lowest address, neighbours merged.
//
// Deterministic: the same sequence of calls gives the same offsets on every rank. Owns no memory.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace strata {

class Arena {
 public:
  explicit Arena(uint64_t bytes = 0) {
    if (bytes > 0) free_[0] = bytes;
  }

  std::optional<uint64_t> take(uint64_t bytes) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [offset, size] = *it;
      if (size < bytes) continue;
      free_.erase(it);
      if (size > bytes) free_[offset + bytes] = size - bytes;
      return offset;
    }
    return std::nullopt;
  }

  void give(uint64_t offset, uint64_t bytes) {
    auto next = free_.upper_bound(offset);
    if (next != free_.end() && offset + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free_[offset] = bytes;
  }

 private:
  std::map<uint64_t, uint64_t> free_;  // offset -> size
};

}  // namespace strata
