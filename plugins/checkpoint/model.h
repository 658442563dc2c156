// model.h - what a checkpoint holds, as plain values: the same for a save's arguments, a rank file and the index.
//
// A Description is filled from the ABI's structs (from_args) or from JSON (describe.h) and then checked by the same
// rules (check), so that the reader never indexes with a number it has not looked at. Paths are those of
// docs/checkpoint_format.md.
#pragma once

#include <string>
#include <vector>

#include "error.h"
#include "strata/iface/checkpoint.h"

namespace strata::checkpoint {

struct DType {
  strata_dtype id;
  const char* name;  // in files: "BF16"
  uint64_t bytes;
};
const DType* find_dtype(strata_dtype id);          // NULL when unknown
const DType* find_dtype(const std::string& name);  // NULL when unknown

struct Range {
  uint64_t offset = 0;
  uint64_t count = 0;
  uint64_t end() const { return offset + count; }
};

struct Array {
  std::string name;
  strata_dtype dtype = 0;
  std::string path;  // below /segments and /xxh3
  uint64_t element_bytes() const { return find_dtype(dtype)->bytes; }
};

struct Segment {
  std::string name;
  uint64_t elements = 0;
  std::vector<Array> arrays;
  std::vector<Range> owned;  // per rank; in a rank file one entry, the rank's own

  const Array* find_array(const std::string& array) const;
};

struct Param {
  std::string name;
  std::string path;
  strata_dtype dtype = 0;
  std::vector<int64_t> shape;
  uint64_t segment = STRATA_NO_SEGMENT;
  uint64_t offset = 0;
  bool is_alias = false;
  std::string alias_of;

  uint64_t elements = 0;  // product of the shape, by check()
  size_t owner = 0;       // index of the param that has the storage (itself, but for an alias), by check()
};

struct Meta {
  std::string key;
  strata_option_type type = STRATA_OPT_STRING;
  int64_t i = 0;
  double f = 0;
  std::string s;
};

struct RankFile {
  std::string file;
  uint64_t bytes = 0;
};

struct Description {
  std::string format;
  uint64_t fingerprint = 0;
  std::string tag;
  int32_t rank = 0;  // of a rank file
  int32_t world = 0;
  std::vector<RankFile> files;
  std::vector<Segment> segments;
  std::vector<Param> params;
  std::vector<Meta> meta;

  // Raises `code` with `where` in front when sizes, indices, dtypes, names or aliases are wrong; fills derived fields.
  void check(strata_status code, const std::string& where);
  // The same for ownership: per rank, no overlap, every param covered.
  void check_owned(strata_status code, const std::string& where) const;
  // Per segment: the ranks that own something of it, in the order of their elements.
  std::vector<std::vector<size_t>> owners_in_order() const;
};

constexpr char kIndexFormat[] = "strata.checkpoint/1";
constexpr char kRankFormat[] = "strata.checkpoint.rank/1";
constexpr char kWeight[] = "weight";
constexpr uint64_t kHashBlock = uint64_t{1} << 20;  // bytes under one hash

// Copies and checks a save's arguments; paths and fingerprint are filled, files is empty, owned has this rank's entry.
Description from_args(const strata_ckpt_save_args& args);
// Raises INVALID_ARGUMENT unless `tag` is one path component of 1 to 200 bytes, not hidden and not reserved.
// Why `name` cannot name a checkpoint or a weight file, as the end of a sentence; "" when it can.
std::string why_not_a_name(const std::string& name);
void check_tag(const char* tag);
std::string rank_file_name(int32_t rank);

}  // namespace strata::checkpoint
