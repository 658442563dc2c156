#include "exchange.h"

#include <cstring>

namespace comm_local {
namespace {

// From this many bytes written by one rank on, outputs go past the caches (see rank_sum.h).
constexpr uint64_t kStreamBytes = 4u << 20;

const char* op_name(int32_t op) {
  static const char* const names[] = {"?",         "all_gather", "reduce_scatter", "all_reduce",
                                      "broadcast", "all_to_all", "barrier"};
  return names[op >= 1 && op <= 6 ? op : 0];
}

std::string describe(const Post& post) {
  std::string text =
      std::string(op_name(post.op)) + " \"" + post.label + "\" (" + std::to_string(post.bytes) + " bytes";
  if (post.items != 1) text += " in " + std::to_string(post.items) + " items";
  text += ", tag " + std::to_string(post.tag);
  if (post.op == static_cast<int32_t>(Op::kBroadcast)) text += ", root " + std::to_string(post.root);
  return text + ")";
}

bool same(const Post& a, const Post& b) {
  return a.call == b.call && a.op == b.op && a.tag == b.tag && a.bytes == b.bytes && a.items == b.items &&
         a.root == b.root && a.digest == b.digest;
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

bool multiply(uint64_t a, uint64_t b, uint64_t* out) { return !__builtin_mul_overflow(a, b, out); }

}  // namespace

Exchange::Exchange(Board* board, Memory* memory, const strata_host* host, Isa isa)
    : board_(board), memory_(memory), isa_(isa), rank_(board->rank()), world_(board->world()) {
  executor_ = static_cast<const strata_executor_api*>(host->get_interface(host->ctx, STRATA_HOST_EXECUTOR));
  executor_ctx_ = host->ctx;
}

// ---- the course of a call ----

Error Exchange::run(Op op, const strata_coll_args& args, const Deadline& deadline) {
  if (Error e = board_->failure(); !e.ok()) return e;
  op_ = op;
  root_ = op == Op::kBroadcast ? args.root : 0;
  call_ = board_->mine().calls.fetch_add(1) + 1;
  what_ = "call " + std::to_string(call_) + ", " + op_name(static_cast<int32_t>(op)) + " \"" +
          (args.label ? args.label : "") + "\"";
  if (Error e = prepare(args); !e.ok()) {
    // The others could not know why we do not come.
    return board_->fail(e, {STRATA_FAILED_PRECONDITION, board_->who(rank_) + " gave up: " + e.text()});
  }
  if (Error e = board_->sync(what_, deadline); !e.ok()) return e;
  if (Error e = compare(); !e.ok()) return board_->fail(e);
  if (op == Op::kBarrier) return {};
  if (Error e = find_sources(); !e.ok()) return board_->fail(e);
  switch (op) {
    case Op::kAllGather:
      all_gather();
      break;
    case Op::kReduceScatter:
      reduce_scatter();
      break;
    case Op::kAllReduce:
      if (Error e = all_reduce(deadline); !e.ok()) return e;
      break;
    case Op::kBroadcast:
      broadcast();
      break;
    case Op::kAllToAll:
      all_to_all();
      break;
    case Op::kBarrier:
      break;
  }
  return board_->sync(what_, deadline);
}

uint64_t Exchange::in_elements(uint64_t count) const {
  return op_ == Op::kReduceScatter || op_ == Op::kAllToAll ? count * static_cast<uint64_t>(world_) : count;
}
uint64_t Exchange::out_elements(uint64_t count) const {
  return op_ == Op::kAllGather || op_ == Op::kAllToAll ? count * static_cast<uint64_t>(world_) : count;
}
bool Exchange::reads_input_of(int rank) const { return op_ != Op::kBroadcast || rank == root_; }

// ---- checking and posting ----

Error Exchange::prepare(const strata_coll_args& args) {
  items_.clear();
  if (root_ < 0 || root_ >= world_) {
    return {STRATA_INVALID_ARGUMENT,
            what_ + ": root " + std::to_string(root_) + " in a world of " + std::to_string(world_)};
  }
  if (op_ != Op::kBarrier) {
    if (args.item_count > 0 && (!args.items || args.item_stride < sizeof(strata_coll_item))) {
      return {STRATA_INVALID_ARGUMENT, what_ + ": " + std::to_string(args.item_count) + " items with stride " +
                                           std::to_string(args.item_stride) + ", an item has " +
                                           std::to_string(sizeof(strata_coll_item)) + " bytes"};
    }
    for (uint64_t k = 0; k < args.item_count; ++k) {
      const char* at = reinterpret_cast<const char*>(args.items) + k * args.item_stride;
      if (Error e = read_item(*reinterpret_cast<const strata_coll_item*>(at), k); !e.ok()) return e;
    }
  }
  return post(args);
}

Error Exchange::read_item(const strata_coll_item& given, uint64_t index) {
  if (!STRATA_HAS(&given, strata_coll_item, out_dtype)) {
    return {STRATA_INVALID_ARGUMENT,
            what_ + ": item " + std::to_string(index) + " has struct_size " + std::to_string(given.struct_size)};
  }
  const Item item = {static_cast<const char*>(given.in), static_cast<char*>(given.out), given.count, given.in_dtype,
                     given.out_dtype};
  items_.push_back(item);
  return check_item(item, index);
}

Error Exchange::check_item(const Item& item, uint64_t index) const {
  const std::string name = what_ + ": item " + std::to_string(index) + " (" + std::to_string(item.count) + " x " +
                           dtype_name(item.in_dtype) + " to " + dtype_name(item.out_dtype) + "): ";
  auto bad = [&](const std::string& why) { return Error(STRATA_INVALID_ARGUMENT, name + why); };
  const bool sums = op_ == Op::kReduceScatter || op_ == Op::kAllReduce;
  const uint64_t in_size = size_of(item.in_dtype);
  const uint64_t out_size = size_of(item.out_dtype);
  if (in_size == 0 || out_size == 0) return bad("unknown dtype");
  if (sums && (!is_float(item.in_dtype) || !is_float(item.out_dtype))) return bad("sums take f32, bf16 and f16 only");
  if (!sums && item.in_dtype != item.out_dtype) return bad("input and output dtype must be the same");
  uint64_t elements, bytes;
  if (!multiply(item.count, static_cast<uint64_t>(world_), &elements) || !multiply(elements, 8, &bytes)) {
    return bad("more bytes than 64 bits can count");
  }
  if (item.count == 0) return {};
  Place ignored;
  if (reads_input_of(rank_)) {
    if (!item.in || reinterpret_cast<uintptr_t>(item.in) % in_size != 0) return bad("input is NULL or not aligned");
    if (!memory_->find(item.in, in_elements(item.count) * in_size, &ignored)) {
      return bad("its input is not in memory of this collective; allocate it through the collective");
    }
  }
  if (!item.out || reinterpret_cast<uintptr_t>(item.out) % out_size != 0) return bad("output is NULL or not aligned");
  return reads_input_of(rank_) ? check_overlap(item, name) : Error();
}

// Input and output may share bytes only where the order of reading and writing makes it right.
Error Exchange::check_overlap(const Item& item, const std::string& name) const {
  const uint64_t in_bytes = in_elements(item.count) * size_of(item.in_dtype);
  const uint64_t out_bytes = out_elements(item.count) * size_of(item.out_dtype);
  if (item.in + in_bytes <= item.out || item.out + out_bytes <= item.in) return {};
  const uint64_t own_slice = static_cast<uint64_t>(rank_) * item.count * size_of(item.in_dtype);
  bool in_place = false;
  if (op_ == Op::kAllGather) in_place = item.in == item.out + own_slice;
  if (op_ == Op::kReduceScatter) in_place = item.out == item.in + own_slice && item.in_dtype == item.out_dtype;
  if (op_ == Op::kAllReduce) in_place = item.in == item.out && size_of(item.out_dtype) <= size_of(item.in_dtype);
  if (op_ == Op::kBroadcast) in_place = item.in == item.out;
  if (in_place) return {};
  return {STRATA_INVALID_ARGUMENT, name + "input and output overlap, and not as an in-place call may"};
}

// Makes *base at least `bytes` of memory others can read.
Error Exchange::ensure_shared(uint64_t bytes, void** base, uint64_t* have) {
  if (bytes <= *have) return {};
  const uint64_t size = std::max(bytes, *have * 2);
  void* fresh = nullptr;
  if (Error e = memory_->alloc(size, &fresh); !e.ok()) return {e.code(), what_ + ": " + e.text()};
  if (*base) {
    (void)memory_->free(*base, false);  // nobody reads it: every rank has left the last call
    board_->mine().frees.fetch_add(1);
  }
  *base = fresh;
  *have = size;
  return {};
}

Error Exchange::post(const strata_coll_args& args) {
  Post& own = board_->mine().posts[call_ % 2];
  own = Post();
  if (Error e = ensure_shared(items_.size() * sizeof(Posted), &table_, &table_bytes_); !e.ok()) return e;
  auto* table = static_cast<Posted*>(table_);
  uint64_t written = 0;
  for (size_t k = 0; k < items_.size(); ++k) {
    const Item& item = items_[k];
    table[k] = {item.count, item.in_dtype, item.out_dtype, {}};
    const uint64_t in_bytes = in_elements(item.count) * size_of(item.in_dtype);
    const uint64_t out_bytes = out_elements(item.count) * size_of(item.out_dtype);
    if (item.count > 0 && reads_input_of(rank_)) (void)memory_->find(item.in, in_bytes, &table[k].in);
    own.bytes += std::max(in_bytes, out_bytes);
    written += out_bytes;
    own.digest = mix(own.digest, item.count);
    own.digest = mix(own.digest, static_cast<uint64_t>(item.in_dtype) * 256 + static_cast<uint64_t>(item.out_dtype));
  }
  if (!items_.empty()) (void)memory_->find(table_, table_bytes_, &own.table);
  if (op_ == Op::kAllReduce && world_ > 1) {
    if (Error e = ensure_shared(kScratchBytes, &scratch_, &scratch_bytes_); !e.ok()) return e;
    (void)memory_->find(scratch_, scratch_bytes_, &own.scratch);
  }
  stream_ = written >= kStreamBytes;
  own.call = call_;
  own.op = static_cast<int32_t>(op_);
  own.root = root_;
  own.tag = args.tag;
  own.items = items_.size();
  std::strncpy(own.label, args.label ? args.label : "", sizeof(own.label) - 1);
  return {};
}

Error Exchange::compare() {
  for (int r = 0; r < world_; ++r) memory_->refresh(r, board_->seat(r).frees.load());
  const Post& first = post_of(0);
  for (int r = 1; r < world_; ++r) {
    if (!same(first, post_of(r))) return {STRATA_FAILED_PRECONDITION, difference(first, 0, post_of(r), r)};
  }
  return {};
}

std::string Exchange::difference(const Post& a, int rank_a, const Post& b, int rank_b) {
  std::string text = "call " + std::to_string(a.call) + ": rank " + std::to_string(rank_a) + " is in " + describe(a) +
                     ", rank " + std::to_string(rank_b) + " in " + describe(b);
  if (a.op != b.op || a.items != b.items) return text;
  const char *table_a, *table_b;
  if (!memory_->resolve(rank_a, a.table, &table_a).ok() || !memory_->resolve(rank_b, b.table, &table_b).ok())
    return text;
  auto words = [](const Posted& p) {
    return std::to_string(p.count) + " x " + dtype_name(p.in_dtype) + " to " + dtype_name(p.out_dtype);
  };
  for (uint64_t k = 0; k < a.items; ++k) {
    const std::string one = words(reinterpret_cast<const Posted*>(table_a)[k]);
    const std::string other = words(reinterpret_cast<const Posted*>(table_b)[k]);
    if (one != other) return text + "; item " + std::to_string(k) + " is " + one + " there and " + other + " here";
  }
  return text;
}

// The address, in this process, of every input that this call reads.
Error Exchange::find_sources() {
  sources_.assign(static_cast<size_t>(world_) * items_.size(), nullptr);
  scratches_.assign(static_cast<size_t>(world_), nullptr);
  for (int r = 0; r < world_; ++r) {
    if (!reads_input_of(r) || items_.empty()) continue;
    const char* table = nullptr;
    Error e = memory_->resolve(r, post_of(r).table, &table);
    for (size_t k = 0; k < items_.size() && e.ok(); ++k) {
      const Posted& posted = reinterpret_cast<const Posted*>(table)[k];
      if (r == rank_) {
        sources_[static_cast<size_t>(r) * items_.size() + k] = items_[k].in;
      } else if (posted.count > 0) {
        e = memory_->resolve(r, posted.in, &sources_[static_cast<size_t>(r) * items_.size() + k]);
      }
    }
    if (e.ok() && op_ == Op::kAllReduce && world_ > 1) {
      e = memory_->resolve(r, post_of(r).scratch, &scratches_[static_cast<size_t>(r)]);
    }
    if (!e.ok()) return {e.code(), what_ + ": " + e.text()};
  }
  return {};
}

}  // namespace comm_local
