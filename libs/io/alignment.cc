#include "io/alignment.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>

#include "io/calls.h"

namespace strata::io {
namespace {

bool ask(int fd, DirectRule* rule) {
#ifdef STATX_DIOALIGN
  struct statx s {};
  if (calls().statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &s) != 0) return false;
  if (!(s.stx_mask & STATX_DIOALIGN) || s.stx_dio_offset_align == 0) return false;
  *rule = {s.stx_dio_offset_align, std::max<uint64_t>(s.stx_dio_mem_align, 1)};
  return true;
#else
  (void)fd, (void)rule;
  return false;
#endif
}

int try_reads(int fd, DirectRule* rule) {
  struct Freer {
    void operator()(void* p) const { std::free(p); }
  };
  const std::unique_ptr<void, Freer> memory(std::aligned_alloc(kLargestAlignment, 2 * kLargestAlignment));
  if (!memory) return ENOMEM;
  for (uint64_t a = 512; a <= kLargestAlignment; a *= 2) {
    // An odd multiple, of the offset and of the address: nothing larger divides them.
    ssize_t n;
    while ((n = calls().pread(fd, static_cast<char*>(memory.get()) + a, a, static_cast<off_t>(a))) < 0 &&
           errno == EINTR) {
    }
    if (n < 0 && errno != EINVAL) return errno;
    if (n < 0) continue;
    *rule = {a, a};
    return 0;
  }
  return EINVAL;
}

}  // namespace

int find_direct_rule(int fd, DirectRule* rule) { return ask(fd, rule) ? 0 : try_reads(fd, rule); }

}  // namespace strata::io
