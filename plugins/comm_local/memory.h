// memory.h - memory every rank of the job can read.
//
// Between processes each rank has one memfd; every allocation is a chunk of its own, a range of that file which is
// never used twice. Peers hold the descriptor from the start and map a chunk, read-only, when a call first names it;
// freeing punches a hole in the file (the bytes go back to the system) and moves the rank's `frees` count, on which
// peers drop what they had mapped of it. Between threads a chunk is plain memory and its address is its name.
//
// Nothing has a name in a file system: when the processes end, by whatever means, the kernel frees everything.
// Threads: [control] calls and collectives of one instance take turns (interface rule), so there is no lock.
#pragma once

#include <map>
#include <vector>

#include "board.h"
#include "mapping.h"

namespace comm_local {

class Memory {
 public:
  // Plain memory, for threads and for a single rank.
  Memory() = default;
  // Shared memory: `files[r]` is rank r's memfd, `rank` is ours.
  Memory(std::vector<Fd> files, int rank) : files_(std::move(files)), rank_(rank), peers_(files_.size()) {}

  Error alloc(uint64_t bytes, void** out);
  // `keep`: between threads, put the memory aside until the instance is closed, because a rank may still be reading it.
  Error free(void* ptr, bool keep);
  // True when [p, p + bytes) lies in one chunk of this rank; then `out` names it for the others.
  bool find(const void* p, uint64_t bytes, Place* out) const;
  // The address here of a place of rank `rank`.
  Error resolve(int rank, const Place& place, const char** out);
  // Drops the mappings of a peer that freed memory since the last look.
  void refresh(int rank, uint64_t frees);
  // All chunks, to be kept alive by somebody else (threads: other ranks may still read them).
  std::vector<Mapping> take_all();

 private:
  struct Chunk {
    Mapping mapping;
    uint64_t file_offset = 0;
  };
  struct Peer {
    uint64_t frees = 0;
    std::map<uint64_t, Mapping> mapped;  // by file offset
  };
  bool shared() const { return !files_.empty(); }

  std::vector<Fd> files_;
  int rank_ = 0;
  std::vector<Peer> peers_;
  uint64_t file_end_ = 0;
  std::map<const char*, Chunk> chunks_;  // by address
  std::vector<Mapping> kept_;
};

// An empty memfd, closed on exec. Errors name what it is for.
Error create_memfd(const std::string& purpose, Fd* out);

}  // namespace comm_local
