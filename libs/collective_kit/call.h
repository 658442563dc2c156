// call.h - one collective call as its caller gave it: read, checked, and described for the other ranks.
//
// The checks are those that hold for every plugin: dtypes, alignment, sizes that overflow, and which overlap of input
// and output is an in-place call. Whether memory may be used at all is the plugin's own matter.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collective_kit/post.h"
#include "plugin_kit/error.h"
#include "strata/iface/collective.h"

namespace strata::collective_kit {

using plugin_kit::Error;

struct Item {
  const char* in;
  char* out;
  uint64_t count;
  strata_dtype in_dtype;
  strata_dtype out_dtype;
  uint64_t in_size;  // bytes of an element
  uint64_t out_size;
};

class Call {
 public:
  Call(int rank, int world) : rank_(rank), world_(world) {}
  // Takes in call `number`. After an error only `what` is good.
  Error read(uint64_t call_number, Op operation, const strata_coll_args& args);

  uint64_t number = 0;
  Op op = Op::kBarrier;
  int root = 0;
  std::string what;  // opens the text of an error: call 7, all_gather [gather layer3]
  std::vector<Item> items;

  uint64_t in_bytes(const Item& item) const;
  uint64_t out_bytes(const Item& item) const;
  bool sums() const { return op == Op::kReduceScatter || op == Op::kAllReduce; }
  bool reads_input_of(int rank) const { return op != Op::kBroadcast || rank == root; }
  // INVALID_ARGUMENT: `why` is wrong with item `index`.
  Error bad_item(size_t index, const std::string& why) const;
  // What the other ranks compare with theirs.
  void describe(const strata_coll_args& args, Post* post) const;
  void describe(const strata_coll_args& args, ShownPost* post) const;

 private:
  Error read_items(const strata_coll_args& args);
  Error check_item(size_t index) const;
  bool overlaps_wrongly(const Item& item) const;

  const int rank_;
  const int world_;
};

}  // namespace strata::collective_kit
