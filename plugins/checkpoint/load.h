// load.h - an open checkpoint: its description, and element ranges of its params out of the rank files.
//
// Opening looks at every file once; data is found, read and verified when it is asked for, block by block, so a rank
// reads only what it needs (the format document has the costs). Whole blocks go past the page cache; a part of a block
// goes through it, because the rest of that block is likely to be asked for next. Bulk reads run outside the HDF5 lock.
// One caller at a time.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/direct_file.h"
#include "model.h"
#include "replace.h"

namespace strata::checkpoint {

// One array of one segment in one rank file.
struct StoredArray {
  uint64_t offset = 0;  // in the file
  uint64_t bytes = 0;
  std::vector<uint64_t> hashes;  // per block; empty when nothing is verified
  std::vector<bool> verified;
};

// The rank files of one checkpoint, opened when first needed.
class RankFiles {
 public:
  RankFiles(const ReadDirectory& directory, const Description& d, bool verify, bool direct_io);
  // Reads elements `part` (counted in the segment, inside the rank's own range).
  void read(size_t rank, uint64_t segment, uint64_t array, Range part, char* out);

 private:
  // A rank's file and one of its arrays, for the functions below.
  struct Source {
    io::DirectFile& file;
    StoredArray& stored;
    const std::string path;
  };
  std::string path(size_t rank) const;
  io::DirectFile& open(size_t rank);
  StoredArray& find(size_t rank, uint64_t segment, uint64_t array);
  // Bytes [begin, end) of the array; each reports how far it came.
  uint64_t read_whole_blocks(const Source& from, uint64_t begin, uint64_t end, char* out);
  uint64_t read_part_of_block(const Source& from, uint64_t begin, uint64_t end, char* out);
  void verify_block(const Source& from, uint64_t block, const char* data);

  const ReadDirectory& directory_;
  const Description& description_;
  const bool verify_;
  const bool direct_io_;
  std::vector<std::unique_ptr<io::DirectFile>> files_;
  std::map<std::pair<size_t, std::pair<uint64_t, uint64_t>>, StoredArray> arrays_;
  std::unique_ptr<char, void (*)(void*)> buffer_;  // for one read that cannot land in place
};

}  // namespace strata::checkpoint

struct strata_ckpt_load {
  const strata_host* host;
  std::string tag;
  std::unique_ptr<strata::checkpoint::ReadDirectory> directory;
  strata::checkpoint::Description description;
  std::vector<std::vector<size_t>> owners;  // per segment: ranks that own something, by offset
  std::unique_ptr<strata::checkpoint::RankFiles> files;
  std::vector<strata_ckpt_param> params;  // what load_info shows
  std::vector<strata_option> meta;
};

namespace strata::checkpoint {

std::unique_ptr<strata_ckpt_load> open_checkpoint(const strata_ckpt& self, const std::string& root, const char* tag);
void read_param(strata_ckpt_load& load, uint64_t param, const std::string& array, Range part, char* out);

}  // namespace strata::checkpoint
