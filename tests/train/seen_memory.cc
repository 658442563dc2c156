// In place of libs/host_memory: zeroed and aligned like it, and noted.
#include "tests/train/seen_memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "host_memory/host_memory.h"

namespace {
std::mutex lock;
std::map<char*, uint64_t> pieces;
}  // namespace

namespace strata::host_memory {

void* allocate(uint64_t bytes) noexcept {
  void* at = nullptr;
  if (posix_memalign(&at, kAlignment, bytes) != 0) return nullptr;
  std::memset(at, 0, bytes);
  const std::lock_guard guard(lock);
  pieces[static_cast<char*>(at)] = bytes;
  return at;
}

void release(void* at, uint64_t) noexcept {
  const std::lock_guard guard(lock);
  pieces.erase(static_cast<char*>(at));
  std::free(at);
}

void touch(void*, uint64_t) noexcept {}

}  // namespace strata::host_memory

__attribute__((visibility("default"))) void strata_test_for_each_piece(void* ctx, strata::test::EachPiece each) {
  const std::lock_guard guard(lock);
  for (const auto& [at, bytes] : pieces) each(ctx, at, bytes);
}
