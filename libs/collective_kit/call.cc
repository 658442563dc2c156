#include "collective_kit/call.h"

#include <algorithm>
#include <cstring>

#include "plugin_kit/dtypes.h"

namespace strata::collective_kit {
namespace {

using plugin_kit::dtype_name;
using plugin_kit::is_float;
using plugin_kit::join;
using plugin_kit::size_of;

bool is_aligned(const void* pointer, uint64_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

}  // namespace

Error Call::read(uint64_t call_number, Op operation, const strata_coll_args& args) {
  number = call_number;
  op = operation;
  root = op == Op::kBroadcast ? args.root : 0;
  what = "call " + std::to_string(number) + ", " + titled(op, args.label ? args.label : "");
  items.clear();
  if (root < 0 || root >= world_) {
    return {STRATA_INVALID_ARGUMENT, join(what, ": root ", root, " in a world of ", world_)};
  }
  return op == Op::kBarrier || op == Op::kExchange ? Error() : read_items(args);
}

Error Call::read_items(const strata_coll_args& args) {
  if (args.item_count > 0 && (!args.items || args.item_stride < sizeof(strata_coll_item))) {
    return {STRATA_INVALID_ARGUMENT, join(what, ": ", args.item_count, " items with stride ", args.item_stride,
                                          ", an item has ", sizeof(strata_coll_item), " bytes")};
  }
  for (uint64_t k = 0; k < args.item_count; ++k) {
    const auto& given =
        *reinterpret_cast<const strata_coll_item*>(reinterpret_cast<const char*>(args.items) + k * args.item_stride);
    if (!STRATA_HAS(&given, strata_coll_item, out_dtype)) {
      return {STRATA_INVALID_ARGUMENT, join(what, ": item ", k, " has struct_size ", given.struct_size)};
    }
    items.push_back({static_cast<const char*>(given.in), static_cast<char*>(given.out), given.count, given.in_dtype,
                     given.out_dtype, size_of(given.in_dtype), size_of(given.out_dtype)});
    if (Error e = check_item(k); !e.ok()) return e;
  }
  return {};
}

Error Call::check_item(size_t index) const {
  const Item& item = items[index];
  if (item.in_size == 0 || item.out_size == 0) return bad_item(index, "unknown dtype");
  if (sums() && (!is_float(item.in_dtype) || !is_float(item.out_dtype))) {
    return bad_item(index, "sums take f32, bf16 and f16 only");
  }
  if (!sums() && item.in_dtype != item.out_dtype) return bad_item(index, "input and output dtype must be the same");
  if (item.count > UINT64_MAX / 8 / static_cast<uint64_t>(world_)) {
    return bad_item(index, "more bytes than 64 bits can count");
  }
  if (item.count == 0) return {};
  const bool reads = reads_input_of(rank_);
  if (reads && (!item.in || !is_aligned(item.in, item.in_size))) return bad_item(index, "input is NULL or not aligned");
  if (!item.out || !is_aligned(item.out, item.out_size)) return bad_item(index, "output is NULL or not aligned");
  if (reads && overlaps_wrongly(item)) {
    return bad_item(index, "input and output overlap, and not as an in-place call may");
  }
  return {};
}

// Input and output may share bytes only where the order of reading and writing makes it right.
bool Call::overlaps_wrongly(const Item& item) const {
  if (item.in + in_bytes(item) <= item.out || item.out + out_bytes(item) <= item.in) return false;
  const uint64_t own_slice = static_cast<uint64_t>(rank_) * item.count * item.in_size;
  if (op == Op::kAllGather) return item.in != item.out + own_slice;
  if (op == Op::kReduceScatter) return item.out != item.in + own_slice || item.in_dtype != item.out_dtype;
  if (op == Op::kAllReduce) return item.in != item.out || item.out_size > item.in_size;
  return op != Op::kBroadcast || item.in != item.out;
}

uint64_t Call::in_bytes(const Item& item) const {
  const bool per_rank = op == Op::kReduceScatter || op == Op::kAllToAll;
  return item.count * item.in_size * (per_rank ? static_cast<uint64_t>(world_) : 1);
}

uint64_t Call::out_bytes(const Item& item) const {
  const bool per_rank = op == Op::kAllGather || op == Op::kAllToAll;
  return item.count * item.out_size * (per_rank ? static_cast<uint64_t>(world_) : 1);
}

Error Call::bad_item(size_t index, const std::string& why) const {
  const Item& item = items[index];
  return {STRATA_INVALID_ARGUMENT, join(what, ": item ", index, " (", item.count, " x ", dtype_name(item.in_dtype),
                                        " to ", dtype_name(item.out_dtype), "): ", why)};
}

void Call::describe(const strata_coll_args& args, Post* post) const {
  for (const Item& item : items) {
    post->bytes += std::max(in_bytes(item), out_bytes(item));
    post->digest = mix(post->digest, item.count);
    post->digest =
        mix(post->digest, static_cast<uint64_t>(item.in_dtype) * 256 + static_cast<uint64_t>(item.out_dtype));
  }
  post->call = number;
  post->op = op;
  post->root = root;
  post->tag = args.tag;
  post->items = items.size();
  std::strncpy(post->label, args.label ? args.label : "", sizeof(post->label) - 1);
}

void Call::describe(const strata_coll_args& args, ShownPost* post) const {
  describe(args, static_cast<Post*>(post));
  for (size_t k = 0; k < std::min<size_t>(items.size(), ShownPost::kItemsShown); ++k) {
    post->shown[k] = {items[k].count, items[k].in_dtype, items[k].out_dtype};
  }
}

}  // namespace strata::collective_kit
