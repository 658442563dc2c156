// load.h - keeps a queue full for a while and says how fast the disk was: what a tier's measurement at the start and
// `strata bench io` have in common.
#pragma once

#include <chrono>
#include <cstdint>

#include "io/queue.h"

namespace strata::io {

struct Load {
  QueueFile file;
  uint64_t file_bytes = 0;             // a piece at the least
  std::shared_ptr<char> memory;        // `depth` pieces
  unsigned depth = 0;                  // pieces on their way
  uint64_t piece = 0;                  // bytes
  bool reads = false, writes = false;  // both: in turns
  // How much of the file, from its start, has been written: what is read, and what writes add to.
  uint64_t* written = nullptr;
};

struct LoadResult {
  int error = 0;    // errno of the first transfer that failed
  double rate = 0;  // bytes per second
};

// Submits pieces, in the order of the file and round again, until `length` is over; then waits for the last of them.
LoadResult run_load(Queue& queue, const Load& load, std::chrono::nanoseconds length);

}  // namespace strata::io
