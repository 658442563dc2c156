// error.h - the plugin's error value and its deadline.
//
// Nothing in the plugin throws on purpose; functions return an Error whose text names the ranks and numbers. The ABI
// slots hand it to the host. A Deadline is a point of the steady clock; every wait of the plugin ends at one.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "strata/abi.h"

namespace comm_mpi {

class [[nodiscard]] Error {
 public:
  Error() = default;
  Error(strata_status code, std::string text) : code_(code), text_(std::move(text)) {}
  bool ok() const { return code_ == STRATA_OK; }
  strata_status code() const { return code_; }
  const std::string& text() const { return text_; }

 private:
  strata_status code_ = STRATA_OK;
  std::string text_;
};

// An error when an MPI function did not return MPI_SUCCESS; `what` names the function and what it was for.
Error check_mpi(int code, const std::string& what);

class Deadline {
 public:
  explicit Deadline(std::chrono::nanoseconds length)
      : length_(std::min<std::chrono::nanoseconds>(length, std::chrono::hours(24 * 365))),  // the sum must not overflow
        end_(std::chrono::steady_clock::now() + length_) {}
  bool passed() const { return std::chrono::steady_clock::now() >= end_; }
  std::chrono::steady_clock::time_point point() const { return end_; }
  // "10.000 s", how long it was from the start.
  std::string text() const {
    const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(length_).count();
    const std::string fraction = std::to_string(ms % 1000);
    return std::to_string(ms / 1000) + "." + std::string(3 - fraction.size(), '0') + fraction + " s";
  }

 private:
  std::chrono::nanoseconds length_;
  std::chrono::steady_clock::time_point end_;
};

}  // namespace comm_mpi
