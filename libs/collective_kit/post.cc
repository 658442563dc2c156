#include "collective_kit/post.h"

#include <algorithm>

#include "plugin_kit/dtypes.h"
#include "plugin_kit/error.h"

namespace strata::collective_kit {
namespace {

using plugin_kit::join;

std::string describe(const Post& post) {
  std::string text = join(titled(post.op, post.label), " (", post.bytes, " bytes");
  if (post.items != 1) text += join(" in ", post.items, " items");
  text += join(", tag 0x", std::hex, post.tag);
  if (post.op == Op::kBroadcast) text += join(", root ", post.root);
  return text + ")";
}

std::string describe(const Shape& shape) {
  return join(shape.count, " x ", plugin_kit::dtype_name(shape.in_dtype), " to ",
              plugin_kit::dtype_name(shape.out_dtype));
}

}  // namespace

const char* op_name(Op op) {
  static constexpr const char* names[] = {"open",      "all_gather", "reduce_scatter", "all_reduce",
                                          "broadcast", "all_to_all", "barrier",        "exchange"};
  return op >= Op::kOpen && op <= Op::kExchange ? names[static_cast<int32_t>(op)] : "an unknown operation";
}

std::string titled(Op op, const std::string& label) {
  return label.empty() ? op_name(op) : join(op_name(op), " [", label, "]");
}

bool same(const Post& a, const Post& b) {
  return a.call == b.call && a.op == b.op && a.tag == b.tag && a.bytes == b.bytes && a.items == b.items &&
         a.root == b.root && a.digest == b.digest;
}

bool differ_in_items(const Post& a, const Post& b) { return a.op == b.op && a.items == b.items; }

std::string difference(const Post& a, int rank_a, const Post& b, int rank_b) {
  return join("call ", a.call, ": rank ", rank_a, " is in ", describe(a), ", rank ", rank_b, " in ", describe(b));
}

std::string difference(const ShownPost& a, int rank_a, const ShownPost& b, int rank_b) {
  const std::string text = difference(static_cast<const Post&>(a), rank_a, static_cast<const Post&>(b), rank_b);
  if (!differ_in_items(a, b)) return text;
  for (uint64_t k = 0; k < std::min(a.items, ShownPost::kItemsShown); ++k) {
    const std::string item = difference(k, a.shown[k], b.shown[k]);
    if (!item.empty()) return text + item;
  }
  return a.digest == b.digest ? text : join(text, "; an item after the first ", ShownPost::kItemsShown, " differs");
}

std::string difference(uint64_t index, const Shape& a, const Shape& b) {
  const std::string one = describe(a), other = describe(b);
  return one == other ? "" : join("; item ", index, " is ", one, " there and ", other, " here");
}

}  // namespace strata::collective_kit
