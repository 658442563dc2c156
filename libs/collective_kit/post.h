// post.h - what a rank tells the others before it moves data, and the words for a difference.
//
// A plugin puts it where the other ranks see it (shared memory, a message) and may add fields of its own. It holds no
// pointers and is copied byte by byte between processes of one build.
#pragma once

#include <cstdint>
#include <string>

#include "strata/types.h"

namespace strata::collective_kit {

enum class Op : int32_t {
  kOpen = 0,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBroadcast,
  kAllToAll,
  kBarrier,
  kExchange  // where it is not an all-gather
};
const char* op_name(Op op);
// all_gather [gather of unit "layer3"]: labels may have quotes in them. Without one, the operation alone.
std::string titled(Op op, const std::string& label);

// Call number `call` of a rank; equal on all ranks but for the label.
struct Post {
  uint64_t call;
  uint64_t tag;
  uint64_t bytes;
  uint64_t items;
  uint64_t digest;  // of counts and dtypes of all items
  Op op;
  int32_t root;
  char label[96];
};

// One item, as a plugin shows it to the others.
struct Shape {
  uint64_t count;
  strata_dtype in_dtype;
  strata_dtype out_dtype;
};

// A post for plugins that send it as a message: with the first items, for the text of a difference.
struct ShownPost : Post {
  static constexpr uint64_t kItemsShown = 16;
  Shape shown[kItemsShown];
};

bool same(const Post& a, const Post& b);
// "call 3: rank 0 is in all_gather ..., rank 1 in barrier ..."
std::string difference(const Post& a, int rank_a, const Post& b, int rank_b);
std::string difference(const ShownPost& a, int rank_a, const ShownPost& b, int rank_b);
// True when the posts are of one operation with as many items, so that only items can make the difference.
bool differ_in_items(const Post& a, const Post& b);
// "; item 2 is 8 x f32 to f32 there and 4 x f32 to f32 here", or "" where they are the same.
std::string difference(uint64_t index, const Shape& a, const Shape& b);

}  // namespace strata::collective_kit
