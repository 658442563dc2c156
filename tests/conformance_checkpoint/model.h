// model.h - made-up models for the checkpoint tests: segments, params and contents that follow a formula.
//
// Every element's bits are computed from (seed, segment, array, element), so that a test needs no copy of what it
// saved, any part can be checked, and the Python test knows the same numbers. Padding has bits too: a reader that
// strays into it is noticed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "strata/iface/checkpoint.h"
#include "tests/support/plugin_fixture.h"

namespace strata::test {

struct ArraySpec {
  std::string name;
  strata_dtype dtype;
};
struct SegmentSpec {
  std::string name;
  std::vector<ArraySpec> arrays;
  uint64_t elements = 0;
  std::vector<std::pair<uint64_t, uint64_t>> owned;  // per rank: offset, count
};
struct ParamSpec {
  std::string name;
  strata_dtype dtype;
  std::vector<int64_t> shape;
  uint64_t segment, offset;
  std::string alias_of;
  bool is_alias = false;
  uint64_t elements() const;
};

uint64_t dtype_bytes(strata_dtype dtype);

class Model {
 public:
  explicit Model(uint64_t seed = 0) : seed_(seed) {}

  uint64_t segment(const std::string& name, std::vector<ArraySpec> arrays);
  void param(uint64_t segment, const std::string& name, std::vector<int64_t> shape);
  void alias(const std::string& name, const std::string& of);
  void meta(const std::string& key, int64_t value);
  void meta_bool(const std::string& key, bool value);
  void meta(const std::string& key, double value);
  void meta(const std::string& key, const std::string& value);
  // Pads every segment to world equal slices of whole 2,048-element units and cuts it.
  void shard(int world);

  uint64_t bits(uint64_t segment, uint64_t array, uint64_t element) const;
  void fill(uint64_t segment, uint64_t array, uint64_t offset, uint64_t count, void* out) const;

  int world() const { return world_; }
  const ParamSpec& owner_of(const ParamSpec& p) const;
  uint64_t shard_bytes(int rank) const;

  std::vector<SegmentSpec> segments;
  std::vector<ParamSpec> params;
  struct MetaSpec {
    std::string key, text;
    strata_option option;
  };
  std::vector<MetaSpec> metas;

 private:
  uint64_t seed_;
  int world_ = 1;
};

// A model with every kind of param: odd shapes, empty, scalar, tied, frozen, three dtypes, names that need escaping.
Model ordinary_model(uint64_t seed = 0);

// One param and an empty one, for saves that are made by the hundred.
Model small_model(uint64_t seed, int world = 2);

// The ABI's view of one rank of a model; the model must outlive it.
class SaveArgs {
 public:
  SaveArgs(const Model& model, const std::string& root, const std::string& tag, int rank);
  SaveArgs(const SaveArgs&) = delete;
  strata_ckpt_save_args c{};

  strata_status fail_with = STRATA_OK;  // what the read callback returns from call `fail_at` on
  uint64_t fail_at = UINT64_MAX;
  uint64_t calls = 0;

 private:
  static strata_status STRATA_CALL read(void* self, uint64_t segment, uint64_t array, uint64_t offset, uint64_t count,
                                        void* dst);
  const Model& model_;
  std::string root_, tag_;
  int rank_;
  std::vector<std::vector<strata_ckpt_array>> arrays_;
  std::vector<strata_ckpt_segment> segments_;
  std::vector<strata_ckpt_param> params_;
  std::vector<strata_option> meta_;
};

// One instance of the plugin.
class Instance {
 public:
  explicit Instance(int rank = 0, int world = 1, Options* options = nullptr);
  ~Instance();
  Instance(const Instance&) = delete;

  const strata_checkpoint_api* api;
  std::unique_ptr<Rank> rank;
  strata_ckpt* self = nullptr;
};

// The text of the last failure on this thread, and clears it.
std::string failure_text(strata_status code);

// A directory of its own, removed at the end.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  const std::string path;
};

// write on every rank in turn, then commit on all. The first status that is not OK (after abandoning). `weights`: with
// the one weight file in the checkpoint.
strata_status save(const Model& model, const std::string& root, const std::string& tag, bool weights = false);
// Both phases of an export, then commit.
strata_status export_file(const Model& model, const std::string& root, const std::string& file);
// Opens a checkpoint (tag NULL: latest), reads every array of every param in `cuts` equal parts and compares all bits;
// also params' descriptions and meta. The first difference as text, "" when equal.
std::string difference(const Model& model, const std::string& root, const char* tag, int cuts = 1,
                       Options* options = nullptr);

std::string read_file(const std::string& path);
void write_file(const std::string& path, const std::string& bytes);

}  // namespace strata::test
