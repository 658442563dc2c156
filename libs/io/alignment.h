// alignment.h - what O_DIRECT wants of a file: offsets and sizes, and memory, at multiples of which numbers.
#pragma once

#include <cstdint>

namespace strata::io {

struct DirectRule {
  uint64_t offset = 1;  // of file offsets and sizes; a power of two
  uint64_t memory = 1;  // of addresses
};

constexpr uint64_t kLargestAlignment = 65536;

// From the kernel where it says (STATX_DIOALIGN), else by trying reads of 512 bytes and more. `fd` is open for direct
// reads, on a file of at least 2 * kLargestAlignment bytes. 0, or an errno: EINVAL when none of them is possible.
int find_direct_rule(int fd, DirectRule* rule);

}  // namespace strata::io
