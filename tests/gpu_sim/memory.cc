// memory.cc - first fit over offsets, and the two mappings.
#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <mutex>

#include "host_memory/host_memory.h"
#include "plugin_kit/error.h"

namespace gpu_sim {
namespace {

using strata::plugin_kit::raise;
namespace host_memory = strata::host_memory;

constexpr int kPoison = 0xFF;

char* map(uint64_t bytes, int protection) {
  void* at = ::mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) raise(STRATA_RESOURCE_EXHAUSTED, "mmap of ", bytes, " bytes: ", std::strerror(errno));
  return static_cast<char*>(at);
}

uint64_t address(const void* ptr) { return reinterpret_cast<uintptr_t>(ptr); }

}  // namespace

// Twice the budget in addresses: gaps and fragments must not make less of it.
Memory::Memory(uint64_t budget)
    : budget_(budget), mapped_(2 * budget + (1 << 20)), addresses_(map(mapped_, PROT_NONE)) {
  try {
    bytes_ = map(mapped_, PROT_READ | PROT_WRITE);
  } catch (...) {
    ::munmap(addresses_, mapped_);
    throw;
  }
}

Memory::~Memory() {
  for (const auto& [at, block] : pinned_) host_memory::release(reinterpret_cast<void*>(at), block.bytes);
  ::munmap(addresses_, mapped_);
  ::munmap(bytes_, mapped_);
}

void* Memory::alloc(uint64_t bytes, uint64_t alignment, uint8_t fill, const void* owner) {
  if (bytes == 0) return nullptr;
  std::lock_guard lock(mutex_);
  if (bytes > budget_ - used_) {
    raise(STRATA_RESOURCE_EXHAUSTED, bytes, " bytes wanted, ", budget_ - used_, " of ", budget_, " free");
  }
  const uint64_t offset = find_gap(bytes, alignment);
  blocks_.emplace(offset, Block{bytes, owner});
  used_ += bytes;
  std::memset(bytes_ + offset, fill, bytes);
  return addresses_ + offset;
}

uint64_t Memory::find_gap(uint64_t bytes, uint64_t alignment) const {
  uint64_t begin = 0;
  const auto next = [&] { return (begin + kAlignment + alignment - 1) / alignment * alignment; };
  for (const auto& [offset, block] : blocks_) {
    if (next() + bytes + kAlignment <= offset) return next();
    begin = offset + block.bytes;
  }
  if (next() + bytes + kAlignment > mapped_) {
    raise(STRATA_RESOURCE_EXHAUSTED, bytes, " bytes wanted, ", budget_ - used_, " of ", budget_,
          " free, but no gap between the allocations is as large");
  }
  return next();
}

void* Memory::alloc_pinned(uint64_t bytes, const void* owner) {
  if (bytes == 0) return nullptr;
  void* at = host_memory::allocate(bytes);
  if (!at) raise(STRATA_RESOURCE_EXHAUSTED, bytes, " bytes of page-locked memory wanted, the system has no such piece");
  std::memset(at, kPoison, bytes);
  std::lock_guard lock(mutex_);
  pinned_.emplace(address(at), Block{bytes, owner});
  return at;
}

bool Memory::free(const void* ptr) {
  std::lock_guard lock(mutex_);
  const auto found = is_device(ptr) ? blocks_.find(address(ptr) - address(addresses_)) : blocks_.end();
  if (found == blocks_.end()) return false;
  erase(found);
  return true;
}

void Memory::erase(Blocks::iterator block) {
  std::memset(bytes_ + block->first, kPoison, block->second.bytes);
  used_ -= block->second.bytes;
  blocks_.erase(block);
}

bool Memory::free_pinned(const void* ptr) {
  std::lock_guard lock(mutex_);
  const auto found = pinned_.find(address(ptr));
  if (found == pinned_.end()) return false;
  host_memory::release(reinterpret_cast<void*>(found->first), found->second.bytes);
  pinned_.erase(found);
  return true;
}

void Memory::free_all_of(const void* owner) {
  std::lock_guard lock(mutex_);
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    const auto here = block++;
    if (here->second.owner == owner) erase(here);
  }
  for (auto block = pinned_.begin(); block != pinned_.end();) {
    const auto here = block++;
    if (here->second.owner != owner) continue;
    host_memory::release(reinterpret_cast<void*>(here->first), here->second.bytes);
    pinned_.erase(here);
  }
}

uint64_t Memory::free_bytes() const {
  std::shared_lock lock(mutex_);
  return budget_ - used_;
}

bool Memory::is_device(const void* ptr) const { return address(ptr) - address(addresses_) < mapped_; }

bool Memory::covers(const Blocks& blocks, uint64_t begin, uint64_t bytes) {
  const auto after = blocks.upper_bound(begin);
  if (after == blocks.begin()) return false;
  const auto& [at, block] = *std::prev(after);
  const uint64_t skipped = begin - at;
  return skipped <= block.bytes && bytes <= block.bytes - skipped;
}

char* Memory::resolve(const void* ptr, uint64_t bytes, HostMemory host) const {
  const bool device = is_device(ptr);
  const uint64_t offset = address(ptr) - address(addresses_);
  char* place = device ? bytes_ + offset : static_cast<char*>(const_cast<void*>(ptr));
  if (bytes == 0 || (!device && host == HostMemory::kAny)) return place;
  std::shared_lock lock(mutex_);
  if (device && !covers(blocks_, offset, bytes)) {
    raise(STRATA_OUT_OF_RANGE, bytes, " bytes at device address ", ptr, " are not inside of an allocation that lives");
  }
  if (!device && !covers(pinned_, address(ptr), bytes)) {
    raise(STRATA_INVALID_ARGUMENT, bytes, " bytes at ", ptr,
          " are neither device memory nor of alloc_pinned: a device cannot reach them");
  }
  return place;
}

}  // namespace gpu_sim
