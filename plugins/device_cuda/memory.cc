// memory.cc - see memory.h.
#include "memory.h"

#include <algorithm>

#include "cuda_kit/error.h"

namespace strata::device_cuda {

using cuda_kit::check;
using plugin_kit::raise;

void Memory::Handed::add(void* ptr, uint64_t size) {
  pieces.emplace(ptr, size);
  bytes += size;
}

bool Memory::Handed::remove(void* ptr) {
  const auto found = pieces.find(ptr);
  if (found == pieces.end()) return false;
  bytes -= found->second;
  pieces.erase(found);
  return true;
}

Memory::Memory(int ordinal, uint64_t device_budget, uint64_t pinned_budget) : ordinal_(ordinal), pool_(ordinal) {
  device_.budget = device_budget;
  pinned_.budget = pinned_budget;
  check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "a stream for allocations on GPU ", ordinal);
}

Memory::~Memory() {
  for (const auto& [ptr, bytes] : device_.pieces) pool_.release(ptr, stream_);
  for (const auto& [ptr, bytes] : pinned_.pieces) cudaFreeHost(ptr);
  cudaStreamSynchronize(stream_);
  cudaStreamDestroy(stream_);
}

void Memory::out_of_device_memory(uint64_t bytes) const {
  const Bytes now = device_bytes_locked();
  raise(STRATA_RESOURCE_EXHAUSTED, bytes, " bytes wanted, ", now.free, " of ", now.total, " free on GPU ", ordinal_,
        device_.budget ? plugin_kit::join(" (memory_budget = ", device_.budget, ")") : "");
}

void* Memory::allocate(uint64_t bytes) {
  if (bytes == 0) return nullptr;
  std::lock_guard lock(mutex_);
  // More than there is at all would overflow in the driver's rounding.
  if (bytes > device_.left() || bytes > device_bytes_locked().total) out_of_device_memory(bytes);
  void* ptr = nullptr;
  const cudaError_t error = pool_.allocate(&ptr, bytes, stream_);
  if (error == cudaErrorMemoryAllocation) out_of_device_memory(bytes);
  check(error, bytes, " bytes on GPU ", ordinal_);
  check(cudaStreamSynchronize(stream_), bytes, " bytes on GPU ", ordinal_);
  device_.add(ptr, bytes);
  return ptr;
}

bool Memory::release(void* ptr) {
  std::lock_guard lock(mutex_);
  if (!device_.remove(ptr)) return false;
  check(pool_.release(ptr, stream_), "free of ", ptr);
  return true;
}

void* Memory::allocate_pinned(uint64_t bytes) {
  if (bytes == 0) return nullptr;
  std::lock_guard lock(mutex_);
  if (bytes > pinned_.left()) {
    raise(STRATA_RESOURCE_EXHAUSTED, bytes, " bytes of page-locked host memory wanted, ", pinned_.left(),
          " of pinned_budget = ", pinned_.budget, " free");
  }
  void* ptr = nullptr;
  cudaError_t error = cudaErrorMemoryAllocation;
  if (bytes <= UINT64_MAX - kPinnedAlignment) {
    const uint64_t pages = (bytes + kPinnedAlignment - 1) / kPinnedAlignment * kPinnedAlignment;
    error = cudaHostAlloc(&ptr, pages, cudaHostAllocPortable | cudaHostAllocMapped);
  }
  check(error, bytes, " bytes of page-locked host memory, beside ", pinned_.bytes, " that are");
  pinned_.add(ptr, bytes);
  return ptr;
}

bool Memory::release_pinned(void* ptr) {
  std::lock_guard lock(mutex_);
  if (!pinned_.remove(ptr)) return false;
  check(cudaFreeHost(ptr), "free of page-locked memory at ", ptr);
  return true;
}

Memory::Bytes Memory::device_bytes() {
  std::lock_guard lock(mutex_);
  return device_bytes_locked();
}

Memory::Bytes Memory::device_bytes_locked() const {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "free memory of GPU ", ordinal_);
  Bytes bytes{total, std::min<uint64_t>(free + pool_.slack(), total)};
  if (device_.budget != 0) bytes.total = std::min(bytes.total, device_.budget);
  bytes.free = std::min({bytes.free, bytes.total, device_.left()});
  return bytes;
}

}  // namespace strata::device_cuda
