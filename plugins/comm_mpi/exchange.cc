#include "exchange.h"

#include <cstring>

#include "host_memory/host_memory.h"
#include "process.h"

namespace comm_mpi {
namespace {

using strata::rank_sum::dtype_name;
using strata::rank_sum::is_float;
using strata::rank_sum::size_of;

// What the receive buffer of the sums has in all, and what a sender has of it at least.
constexpr uint64_t kBufferBytes = uint64_t{16} << 20;
constexpr uint64_t kLeastSlotBytes = uint64_t{64} << 10;

uint64_t slot_bytes(int world) {
  return std::max(kLeastSlotBytes, kBufferBytes / static_cast<uint64_t>(std::max(1, world - 1)) / 64 * 64);
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

bool multiply(uint64_t a, uint64_t b, uint64_t* out) { return !__builtin_mul_overflow(a, b, out); }

}  // namespace

Exchange::Exchange(Channel* channel, MPI_Comm data, const strata_host* host)
    : channel_(channel),
      data_(data),
      executor_(static_cast<const strata_executor_api*>(host->get_interface(host->ctx, STRATA_HOST_EXECUTOR))),
      executor_ctx_(host->ctx),
      rank_(channel->rank()),
      world_(channel->world()),
      isa_(strata::rank_sum::best_isa()),
      slot_bytes_(slot_bytes(channel->world())) {}

Exchange::~Exchange() { strata::host_memory::release(buffer_, slot_bytes_ * static_cast<uint64_t>(world_ - 1)); }

Error Exchange::run(Op op, const strata_coll_args& args, const Deadline& deadline) {
  if (Error e = channel_->failure(); !e.ok()) return e;
  op_ = op;
  root_ = op == Op::kBroadcast ? args.root : 0;
  ++call_;
  what_ = "call " + std::to_string(call_) + ", " + op_name(static_cast<int32_t>(op)) + " \"" +
          (args.label ? args.label : "") + "\"";
  Post post{};
  if (Error e = prepare(args, &post); !e.ok()) {
    // The others could not know why we do not come.
    return channel_->fail(e, {STRATA_FAILED_PRECONDITION, channel_->who(rank_) + " gave up: " + e.text()});
  }
  if (Error e = channel_->meet(post, what_, deadline); !e.ok()) return e;
  in_flight_ = op != Op::kBarrier;
  if (Error e = move(deadline); !e.ok()) {
    Process::get().leave_unfinished();
    return channel_->fail(e);
  }
  in_flight_ = false;
  channel_->complete();
  return {};
}

uint64_t Exchange::in_elements(uint64_t count) const {
  return op_ == Op::kReduceScatter || op_ == Op::kAllToAll ? count * static_cast<uint64_t>(world_) : count;
}
uint64_t Exchange::out_elements(uint64_t count) const {
  return op_ == Op::kAllGather || op_ == Op::kAllToAll ? count * static_cast<uint64_t>(world_) : count;
}

// ---- checking and posting ----

Error Exchange::prepare(const strata_coll_args& args, Post* post) {
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
  describe(args, post);
  return {};
}

Error Exchange::read_item(const strata_coll_item& given, uint64_t index) {
  if (!STRATA_HAS(&given, strata_coll_item, out_dtype)) {
    return {STRATA_INVALID_ARGUMENT,
            what_ + ": item " + std::to_string(index) + " has struct_size " + std::to_string(given.struct_size)};
  }
  const Item item = {static_cast<const char*>(given.in),
                     static_cast<char*>(given.out),
                     given.count,
                     given.in_dtype,
                     given.out_dtype,
                     size_of(given.in_dtype),
                     size_of(given.out_dtype)};
  items_.push_back(item);
  return check_item(item, index);
}

Error Exchange::check_item(const Item& item, uint64_t index) const {
  const std::string name = what_ + ": item " + std::to_string(index) + " (" + std::to_string(item.count) + " x " +
                           dtype_name(item.in_dtype) + " to " + dtype_name(item.out_dtype) + "): ";
  auto bad = [&](const std::string& why) { return Error(STRATA_INVALID_ARGUMENT, name + why); };
  const bool sum = op_ == Op::kReduceScatter || op_ == Op::kAllReduce;
  if (item.in_size == 0 || item.out_size == 0) return bad("unknown dtype");
  if (sum && (!is_float(item.in_dtype) || !is_float(item.out_dtype))) return bad("sums take f32, bf16 and f16 only");
  if (!sum && item.in_dtype != item.out_dtype) return bad("input and output dtype must be the same");
  uint64_t elements, bytes;
  if (!multiply(item.count, static_cast<uint64_t>(world_), &elements) || !multiply(elements, 8, &bytes)) {
    return bad("more bytes than 64 bits can count");
  }
  if (item.count == 0) return {};
  const bool reads = op_ != Op::kBroadcast || rank_ == root_;
  if (reads && (!item.in || reinterpret_cast<uintptr_t>(item.in) % item.in_size != 0)) {
    return bad("input is NULL or not aligned");
  }
  if (!item.out || reinterpret_cast<uintptr_t>(item.out) % item.out_size != 0) {
    return bad("output is NULL or not aligned");
  }
  return reads ? check_overlap(item, name) : Error();
}

// Input and output may share bytes only where the order of reading and writing makes it right.
Error Exchange::check_overlap(const Item& item, const std::string& name) const {
  const uint64_t in_bytes = in_elements(item.count) * item.in_size;
  const uint64_t out_bytes = out_elements(item.count) * item.out_size;
  if (item.in + in_bytes <= item.out || item.out + out_bytes <= item.in) return {};
  const uint64_t own_slice = static_cast<uint64_t>(rank_) * item.count * item.in_size;
  bool in_place = false;
  if (op_ == Op::kAllGather) in_place = item.in == item.out + own_slice;
  if (op_ == Op::kReduceScatter) in_place = item.out == item.in + own_slice && item.in_dtype == item.out_dtype;
  if (op_ == Op::kAllReduce) in_place = item.in == item.out && item.out_size <= item.in_size;
  if (op_ == Op::kBroadcast) in_place = item.in == item.out;
  if (in_place) return {};
  return {STRATA_INVALID_ARGUMENT, name + "input and output overlap, and not as an in-place call may"};
}

void Exchange::describe(const strata_coll_args& args, Post* post) const {
  for (size_t k = 0; k < items_.size(); ++k) {
    const Item& item = items_[k];
    post->bytes += std::max(in_elements(item.count) * item.in_size, out_elements(item.count) * item.out_size);
    post->digest = mix(post->digest, item.count);
    post->digest =
        mix(post->digest, static_cast<uint64_t>(item.in_dtype) * 256 + static_cast<uint64_t>(item.out_dtype));
    if (k < Post::kItemsShown) post->shown[k] = {item.count, item.in_dtype, item.out_dtype};
  }
  post->call = call_;
  post->op = static_cast<int32_t>(op_);
  post->root = root_;
  post->tag = args.tag;
  post->items = items_.size();
  std::strncpy(post->label, args.label ? args.label : "", sizeof(post->label) - 1);
}

}  // namespace comm_mpi
