#include "host_memory/host_memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

namespace strata::host_memory {
namespace {

uint64_t round_up(uint64_t n, uint64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A mapping whose start is a multiple of kHugePage: maps more than needed and gives both ends back.
void* map_aligned(uint64_t bytes) {
  const uint64_t size = round_up(bytes, kAlignment);
  const uint64_t padded = size + kHugePage;
  if (size < bytes || padded < size) return nullptr;
  void* raw = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(raw);
  char* start = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(begin), kHugePage));
  const uint64_t head = static_cast<uint64_t>(start - begin);
  if (head > 0) munmap(begin, head);
  if (padded - head > size) munmap(start + size, padded - head - size);
  // Only advice: without huge pages the memory is as good, its first touch is slower.
  (void)madvise(start, size, MADV_HUGEPAGE);
  return start;
}

}  // namespace

void* allocate(uint64_t bytes) noexcept {
  if (bytes >= kMappedFrom) return map_aligned(bytes);
  void* ptr = nullptr;
  if (posix_memalign(&ptr, kAlignment, bytes) != 0) return nullptr;
  std::memset(ptr, 0, bytes);
  return ptr;
}

void release(void* ptr, uint64_t bytes) noexcept {
  if (!ptr) return;
  if (bytes >= kMappedFrom) {
    munmap(ptr, round_up(bytes, kAlignment));
  } else {
    std::free(ptr);
  }
}

std::shared_ptr<char> allocate_shared(uint64_t bytes) {
  char* const ptr = static_cast<char*>(allocate(bytes));
  if (!ptr) return nullptr;
  return {ptr, [bytes](char* p) { release(p, bytes); }};
}

void touch(void* ptr, uint64_t bytes) noexcept {
  auto* p = static_cast<volatile char*>(ptr);
  for (uint64_t at = 0; at < bytes; at += kAlignment) p[at] = 0;
}

}  // namespace strata::host_memory
