// h5_memory.h - HDF5's file driver for a file that is made: HDF5 writes into memory, where a full disk, a limit or a
// signal cannot fail it.
//
// A failed write leaves HDF5 1.10 with objects that it cannot close, and the process crashes at exit. The memory is
// sparse: where data will be there is none, and only what HDF5 wrote takes room.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <map>
#include <string>

namespace strata::checkpoint::h5 {

class Memory {
 public:
  // A file that is created with `fapl` is written here under whatever name. This outlives it.
  void use_for(hid_t fapl);
  // What HDF5 wrote, by its place in the file; holes between the chunks.
  const std::map<uint64_t, std::string>& chunks() const { return chunks_; }
  uint64_t end() const { return end_; }

  void read(uint64_t at, size_t bytes, char* out) const;
  void write(uint64_t at, size_t bytes, const char* data);
  void resize(uint64_t end);

 private:
  static constexpr uint64_t kChunk = 64 << 10;
  std::map<uint64_t, std::string> chunks_;  // each at a multiple of kChunk, and as long
  uint64_t end_ = 0;
};

}  // namespace strata::checkpoint::h5
