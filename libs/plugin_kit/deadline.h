// deadline.h - a point of the steady clock at which a wait ends, and how long it was from the start.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>

namespace strata::plugin_kit {

class Deadline {
 public:
  explicit Deadline(std::chrono::nanoseconds length)
      : length_(std::min<std::chrono::nanoseconds>(length, std::chrono::hours(24 * 365))),  // the sum must not overflow
        end_(std::chrono::steady_clock::now() + length_) {}
  static Deadline after(int64_t ns) { return Deadline(std::chrono::nanoseconds(ns)); }

  bool passed() const { return std::chrono::steady_clock::now() >= end_; }
  int64_t left_ns() const {
    const auto left = end_ - std::chrono::steady_clock::now();
    return std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::nanoseconds>(left).count());
  }
  // For poll(): at most `cap_ms`, rounded up so that the last wait does not turn into a busy loop.
  int poll_ms(int cap_ms) const { return static_cast<int>(std::min<int64_t>(cap_ms, left_ns() / 1'000'000 + 1)); }
  std::chrono::steady_clock::time_point point() const { return end_; }

  // "10.000 s": the whole length, for the text of an error.
  std::string text() const {
    const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(length_).count();
    const std::string fraction = std::to_string(ms % 1000);
    return std::to_string(ms / 1000) + "." + std::string(3 - fraction.size(), '0') + fraction + " s";
  }

 private:
  std::chrono::nanoseconds length_;
  std::chrono::steady_clock::time_point end_;
};

}  // namespace strata::plugin_kit
