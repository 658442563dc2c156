#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace comm_local {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kHugePage = 2u << 20;
constexpr uint64_t kMaxBytes = uint64_t{1} << 46;  // beyond any address space; keeps the sums below from overflowing

std::string os_error(const std::string& what) { return what + ": " + std::strerror(errno); }

// madvise values newer than the C library's headers (Linux 5.14 and 6.1).
constexpr int kPopulateWrite = 23;
constexpr int kCollapse = 25;

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// mmap, with large mappings starting at a huge page's border; huge pages need that of address and file offset alike.
void* map(uint64_t size, int protection, int flags, int file, uint64_t offset) {
  if (size < kHugePage) return ::mmap(nullptr, size, protection, flags, file, static_cast<off_t>(offset));
  const uint64_t room_size = size + kHugePage;
  void* room = ::mmap(nullptr, room_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return room;
  const auto address = reinterpret_cast<uintptr_t>(room);
  char* const start = static_cast<char*>(room);
  char* const at = start + (round_up(address, kHugePage) - address);
  void* base = ::mmap(at, size, protection, flags | MAP_FIXED, file, static_cast<off_t>(offset));
  if (base == MAP_FAILED) {
    const int why = errno;
    ::munmap(room, room_size);
    errno = why;
    return base;
  }
  const char* const end = at + round_up(size, kPage);
  if (at > start) ::munmap(start, static_cast<size_t>(at - start));
  if (end < start + room_size) ::munmap(const_cast<char*>(end), static_cast<size_t>(start + room_size - end));
  return base;
}

// Large shared chunks get their pages at once, and huge ones where the kernel can: a gather from small pages spends a
// third of its time in page walks (measured), and a system rarely gives shared memory huge pages by itself. False only
// when there is no memory; older kernels leave the pages to the first touch.
bool make_pages(void* base, uint64_t size) {
  if (::madvise(base, size, kPopulateWrite) != 0 && errno != EINVAL) return false;
  (void)::madvise(base, size / kHugePage * kHugePage, kCollapse);
  return true;
}

}  // namespace

Error create_memfd(const std::string& purpose, Fd* out) {
  *out = Fd(::memfd_create(("strata " + purpose).c_str(), MFD_CLOEXEC));
  if (!*out) return {STRATA_RESOURCE_EXHAUSTED, os_error("memfd_create for " + purpose)};
  return {};
}

Error Memory::alloc(uint64_t bytes, void** out) {
  const std::string what =
      "alloc of " + std::to_string(bytes) + " bytes of " + (shared() ? "shared" : "plain") + " memory";
  if (bytes > kMaxBytes) return {STRATA_RESOURCE_EXHAUSTED, what + ": more than 2^46"};
  const uint64_t size = round_up(std::max<uint64_t>(bytes, 1), kPage);
  const bool large = size >= kHugePage;
  const int file = shared() ? files_[static_cast<size_t>(rank_)].get() : -1;
  const uint64_t offset = shared() && large ? round_up(file_end_, kHugePage) : file_end_;
  if (shared() && ::ftruncate(file, static_cast<off_t>(offset + size)) != 0) {
    return {STRATA_RESOURCE_EXHAUSTED, os_error(what)};
  }
  void* base = map(size, PROT_READ | PROT_WRITE, shared() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, file, offset);
  if (base == MAP_FAILED) return {STRATA_RESOURCE_EXHAUSTED, os_error(what)};
  Mapping mapping(base, size);
  if (shared()) file_end_ = offset + size;
  if (large) (void)::madvise(base, size, MADV_HUGEPAGE);
  if (large && shared() && !make_pages(base, size)) return {STRATA_RESOURCE_EXHAUSTED, os_error(what)};
  chunks_[static_cast<const char*>(base)] = Chunk{std::move(mapping), offset};
  *out = base;
  return {};
}

Error Memory::free(void* ptr, bool keep) {
  auto it = chunks_.find(static_cast<const char*>(ptr));
  if (it == chunks_.end()) return {STRATA_INVALID_ARGUMENT, "free of memory that alloc did not give"};
  const uint64_t offset = it->second.file_offset;
  const uint64_t bytes = it->second.mapping.bytes();
  if (keep && !shared()) {
    kept_.push_back(std::move(it->second.mapping));
  } else if (shared()) {
    const int file = files_[static_cast<size_t>(rank_)].get();
    (void)::fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                      static_cast<off_t>(bytes));
  }
  chunks_.erase(it);
  return {};
}

bool Memory::find(const void* p, uint64_t bytes, Place* out) const {
  const char* at = static_cast<const char*>(p);
  auto it = chunks_.upper_bound(at);
  if (it == chunks_.begin()) return false;
  --it;
  const Mapping& mapping = it->second.mapping;
  const uint64_t offset = static_cast<uint64_t>(at - mapping.base());
  if (offset > mapping.bytes() || bytes > mapping.bytes() - offset) return false;
  out->chunk = shared() ? it->second.file_offset : reinterpret_cast<uintptr_t>(mapping.base());
  out->chunk_bytes = mapping.bytes();
  out->offset = offset;
  return true;
}

Error Memory::resolve(int rank, const Place& place, const char** out) {
  if (!shared()) {
    *out = reinterpret_cast<const char*>(static_cast<uintptr_t>(place.chunk)) + place.offset;
    return {};
  }
  auto& mapped = peers_[static_cast<size_t>(rank)].mapped;
  auto it = mapped.find(place.chunk);
  if (it == mapped.end()) {
    const int file = files_[static_cast<size_t>(rank)].get();
    void* base = map(place.chunk_bytes, PROT_READ, MAP_SHARED, file, place.chunk);
    if (base == MAP_FAILED) {
      return {STRATA_RESOURCE_EXHAUSTED,
              os_error("mapping " + std::to_string(place.chunk_bytes) + " bytes of rank " + std::to_string(rank))};
    }
    it = mapped.emplace(place.chunk, Mapping(base, place.chunk_bytes)).first;
  }
  *out = it->second.base() + place.offset;
  return {};
}

void Memory::refresh(int rank, uint64_t frees) {
  if (!shared()) return;
  Peer& peer = peers_[static_cast<size_t>(rank)];
  if (peer.frees == frees) return;
  peer.frees = frees;
  peer.mapped.clear();
}

std::vector<Mapping> Memory::take_all() {
  std::vector<Mapping> all = std::move(kept_);
  for (auto& [address, chunk] : chunks_) all.push_back(std::move(chunk.mapping));
  chunks_.clear();
  return all;
}

}  // namespace comm_local
