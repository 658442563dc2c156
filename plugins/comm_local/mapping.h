// mapping.h - owns a mapping.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <utility>

namespace comm_local {

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
