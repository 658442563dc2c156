#include "core/weights/write_guard.h"

#include <algorithm>
#include <new>

namespace strata {

namespace {
constexpr uint64_t kWindow = 1 << 20;  // bytes brought to the host and compared at a time
}

Status WriteGuard::allocate(uint64_t bytes) {
  copies_.reset(new (std::nothrow) char[bytes]);
  window_.reset(new (std::nothrow) char[kWindow]);
  if (copies_ && window_) return Ok();
  return {STRATA_RESOURCE_EXHAUSTED, "check_weights: no host memory for copies of " + std::to_string(bytes) + " bytes"};
}

Status WriteGuard::remember(uint64_t place, const char* weights, uint64_t bytes) {
  return device_.copy(copies_.get() + place, weights, bytes);
}

Status WriteGuard::compare(uint64_t place, char* weights, uint64_t bytes, std::optional<uint64_t>* difference) {
  difference->reset();
  const char* copy = copies_.get() + place;
  for (uint64_t at = 0; at < bytes && !*difference; at += kWindow) {
    const uint64_t piece = std::min(kWindow, bytes - at);
    STRATA_RETURN_IF_ERROR(device_.copy(window_.get(), weights + at, piece));
    const char* end = window_.get() + piece;
    const char* differs = std::mismatch<const char*, const char*>(window_.get(), end, copy + at).first;
    if (differs != end) *difference = at + static_cast<uint64_t>(differs - window_.get());
  }
  return *difference ? device_.copy(weights, copy, bytes) : Ok();
}

}  // namespace strata
