// hash.h - FNV-1a over bytes: for agreements between ranks, not for integrity of data.
#pragma once

#include <cstddef>
#include <cstdint>

namespace strata {

inline uint64_t fnv1a(const void* data, size_t bytes, uint64_t seed = 1469598103934665603ull) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; ++i) seed = (seed ^ p[i]) * 1099511628211ull;
  return seed;
}

}  // namespace strata
