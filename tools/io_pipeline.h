// io_pipeline.h - the transfers of an update whose state lies on a disk, without the update: what a step could reach.
//
// Buffers and order are the engine's at its defaults (core/update/host_lane.h): a piece is read ahead of its turn, and
// written behind those after it, so that reads and writes are under way at once, as many as there are buffers.
#pragma once

#include <chrono>
#include <cstdint>

#include "io/load.h"

namespace strata::cli {

// An array of a part of the state; three of them in each of four buffers, half of which are read ahead.
constexpr uint64_t kTransfer = uint64_t{16} << 20, kPipelineBuffers = 12, kPipelineAhead = 6;
constexpr uint64_t kPipelineMemory = kPipelineBuffers * kTransfer;

struct Pipeline {
  io::QueueFile file;  // written before
  uint64_t file_bytes = 0;
  char* memory = nullptr;  // kPipelineMemory
};

// Reads and writes the file, from its start to its end and round again, until `length` is over and what was read is
// written; bytes of both sides count. Transfers are smaller in a file that has no room for more than a few.
io::LoadResult run_pipeline(io::Queue& queue, const Pipeline& pipeline, std::chrono::nanoseconds length);

}  // namespace strata::cli
