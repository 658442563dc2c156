// error.h - the plugin's error value, its deadline, and the two owners of kernel objects it needs.
//
// Nothing in the plugin throws on purpose; functions return an Error whose text names the ranks and numbers. The ABI
// slots hand it to the host. A Deadline is a point of the steady clock; every wait of the plugin ends at one.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include "strata/abi.h"

namespace comm_local {

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

class Deadline {
 public:
  static Deadline after(int64_t ns) { return Deadline(ns); }
  int64_t left_ns() const {
    return std::max<int64_t>(
        0, std::chrono::duration_cast<std::chrono::nanoseconds>(end_ - std::chrono::steady_clock::now()).count());
  }
  bool passed() const { return left_ns() == 0; }
  // For poll(): at most `cap_ms`, rounded up so that the last wait does not turn into a busy loop.
  int poll_ms(int cap_ms) const { return static_cast<int>(std::min<int64_t>(cap_ms, left_ns() / 1'000'000 + 1)); }
  std::chrono::steady_clock::time_point point() const { return end_; }
  std::string text() const;  // "10.000 s", how long it was from the start

 private:
  // A year at most, so that the sum cannot overflow.
  static int64_t clamp(int64_t ns) { return std::min<int64_t>(ns, 31'536'000'000'000'000); }
  explicit Deadline(int64_t ns)
      : length_ns_(clamp(ns)), end_(std::chrono::steady_clock::now() + std::chrono::nanoseconds(clamp(ns))) {}
  int64_t length_ns_;
  std::chrono::steady_clock::time_point end_;
};

inline std::string Deadline::text() const {
  const int64_t ms = length_ns_ / 1'000'000;
  std::string fraction = std::to_string(ms % 1000);
  return std::to_string(ms / 1000) + "." + std::string(3 - fraction.size(), '0') + fraction + " s";
}

// Owns a file descriptor.
class Fd {
 public:
  explicit Fd(int fd = -1) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

// Owns a mapping.
class Mapping {
 public:
  Mapping() = default;
  Mapping(void* base, uint64_t bytes) : base_(static_cast<char*>(base)), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (base_) ::munmap(base_, bytes_);
  }
  char* base() const { return base_; }
  uint64_t bytes() const { return bytes_; }

 private:
  char* base_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace comm_local
