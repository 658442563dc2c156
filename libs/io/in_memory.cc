#include "io/in_memory.h"

#include <linux/magic.h>
#include <sys/statfs.h>

namespace strata::io {

bool is_in_memory(const std::string& path) {
  struct statfs s {};
  return ::statfs(path.c_str(), &s) == 0 && (s.f_type == TMPFS_MAGIC || s.f_type == RAMFS_MAGIC);
}

}  // namespace strata::io
