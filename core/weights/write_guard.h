// write_guard.h - check_weights = true: finds a write into fetched weights, which are read-only, and undoes it.
//
// Keeps a copy, in host RAM, of every unit's weights from its first fetch to its last release and compares at the
// release. A tool for finding bugs: it costs the memory of the copies and two passes over the weights per fetch.
#pragma once

#include <memory>
#include <optional>

#include "core/backends.h"

namespace strata {

class WriteGuard {
 public:
  explicit WriteGuard(const Device& device) : device_(device) {}
  Status allocate(uint64_t bytes);

  // Copies weights to offset `place` of the copies.
  Status remember(uint64_t place, const char* weights, uint64_t bytes);
  // Compares with the copy; `*difference` is the first byte that differs, and then the old weights are put back.
  Status compare(uint64_t place, char* weights, uint64_t bytes, std::optional<uint64_t>* difference);

 private:
  const Device& device_;
  std::unique_ptr<char[]> copies_, window_;
};

}  // namespace strata
