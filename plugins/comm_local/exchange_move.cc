// The part of exchange.h that moves bytes: which rank reads what, from where, in which order; and the cutting of large
// pieces for the rank's threads. Everything here has its sources resolved and its arguments checked.
#include <algorithm>

#include "exchange.h"
#include "plugin_kit/dtypes.h"
#include "plugin_kit/parallel.h"

namespace comm_local {
namespace {

using strata::plugin_kit::for_parts;

// Work for several threads is cut at these fixed places.
constexpr uint64_t kCopyPart = 512u << 10;
constexpr uint64_t kSumPart = 64u << 10;  // elements
constexpr uint64_t kScratchHalf = kScratchBytes / 2;
constexpr uint64_t kSliceUnit = 32;  // elements: every slice of scratch starts on a cache line

}  // namespace

// ---- moving ----

Error Exchange::move(const Deadline& deadline) {
  switch (call_.op) {
    case Op::kAllGather:
      all_gather();
      break;
    case Op::kReduceScatter:
      reduce_scatter();
      break;
    case Op::kAllReduce:
      return all_reduce(deadline);
    case Op::kBroadcast:
      broadcast();
      break;
    case Op::kAllToAll:
      all_to_all();
      break;
    case Op::kOpen:
    case Op::kBarrier:
    case Op::kExchange:
      break;
  }
  return {};
}

void Exchange::all_gather() {
  for (size_t k = 0; k < call_.items.size(); ++k) {
    const uint64_t slice = call_.items[k].count * call_.items[k].in_size;
    // Starting behind ourselves, so that ranks do not all read the same rank's memory at once.
    for (int i = 0; i < world_; ++i) {
      const int from = (rank_ + 1 + i) % world_;
      copy_all(call_.items[k].out + static_cast<uint64_t>(from) * slice, source(from, k), slice);
    }
  }
}

void Exchange::reduce_scatter() {
  const void* in[kMaxRanks];
  for (size_t k = 0; k < call_.items.size(); ++k) {
    const Item& item = call_.items[k];
    if (item.count == 0) continue;
    const uint64_t own = static_cast<uint64_t>(rank_) * item.count * item.in_size;
    for (int r = 0; r < world_; ++r) in[r] = source(r, k) + own;
    sum_all(in, item.in_dtype, item.out, item.out_dtype, item.count, stream_);
  }
}

void Exchange::broadcast() {
  for (size_t k = 0; k < call_.items.size(); ++k) {
    copy_all(call_.items[k].out, source(call_.root, k), call_.items[k].count * call_.items[k].in_size);
  }
}

void Exchange::all_to_all() {
  for (size_t k = 0; k < call_.items.size(); ++k) {
    if (call_.items[k].count == 0) continue;
    const uint64_t slice = call_.items[k].count * call_.items[k].in_size;
    for (int i = 0; i < world_; ++i) {
      const int from = (rank_ + 1 + i) % world_;
      copy_all(call_.items[k].out + static_cast<uint64_t>(from) * slice,
               source(from, k) + static_cast<uint64_t>(rank_) * slice, slice);
    }
  }
}

// Rounds fill one scratch half each and alternate between the halves. A half is written again two rounds later, after a
// sync that every rank enters only when it has read that half; so one sync per round is enough.
Error Exchange::all_reduce(const Deadline& deadline) {
  if (world_ == 1) {
    reduce_scatter();
    return {};
  }
  std::vector<Piece> round;
  uint64_t used = 0;
  uint64_t half = 0;
  auto run_round = [&]() -> Error {
    reduce_round(round, static_cast<char*>(scratch_) + half * kScratchHalf);
    if (Error e = board_->sync(call_.what, deadline); !e.ok()) return e;
    gather_round(round, half * kScratchHalf);
    half ^= 1;
    used = 0;
    round.clear();
    return {};
  };
  const uint64_t world = static_cast<uint64_t>(world_);
  for (size_t k = 0; k < call_.items.size(); ++k) {
    const uint64_t size = call_.items[k].out_size;
    for (uint64_t begin = 0; begin < call_.items[k].count;) {
      const uint64_t room = (kScratchHalf - used) / size / kSliceUnit * kSliceUnit;
      if (room == 0) {
        if (Error e = run_round(); !e.ok()) return e;
        continue;
      }
      const uint64_t count = std::min(call_.items[k].count - begin, room * world);
      const uint64_t slice = ((count + world - 1) / world + kSliceUnit - 1) / kSliceUnit * kSliceUnit;
      round.push_back({k, begin, count, slice, used});
      used += (slice * size + 63) / 64 * 64;
      begin += count;
    }
  }
  return round.empty() ? Error() : run_round();
}

void Exchange::reduce_round(const std::vector<Piece>& round, char* scratch) {
  const void* in[kMaxRanks];
  for (const Piece& piece : round) {
    const Item& item = call_.items[piece.item];
    const uint64_t first = std::min(piece.count, static_cast<uint64_t>(rank_) * piece.slice);
    const uint64_t count = std::min(piece.count - first, piece.slice);
    if (count == 0) continue;
    for (int r = 0; r < world_; ++r) in[r] = source(r, piece.item) + (piece.begin + first) * item.in_size;
    sum_all(in, item.in_dtype, scratch + piece.scratch, item.out_dtype, count, false);
  }
}

void Exchange::gather_round(const std::vector<Piece>& round, uint64_t half_offset) {
  for (const Piece& piece : round) {
    const Item& item = call_.items[piece.item];
    const uint64_t size = item.out_size;
    for (int r = 0; r < world_; ++r) {
      const uint64_t first = std::min(piece.count, static_cast<uint64_t>(r) * piece.slice);
      const uint64_t count = std::min(piece.count - first, piece.slice);
      copy_all(item.out + (piece.begin + first) * size,
               scratches_[static_cast<size_t>(r)] + half_offset + piece.scratch, count * size);
    }
  }
}

// ---- on all threads of the rank ----

void Exchange::copy_all(void* out, const void* in, uint64_t bytes) const {
  if (out == in || bytes == 0) return;  // in place
  for_parts(executor_, executor_ctx_, bytes, kCopyPart, [&](uint64_t begin, uint64_t n) {
    strata::rank_sum::copy(static_cast<char*>(out) + begin, static_cast<const char*>(in) + begin, n, stream_);
  });
}

void Exchange::sum_all(const void* const* in, strata_dtype in_dtype, void* out, strata_dtype out_dtype, uint64_t count,
                       bool stream) const {
  const uint64_t in_size = strata::plugin_kit::size_of(in_dtype), out_size = strata::plugin_kit::size_of(out_dtype);
  for_parts(executor_, executor_ctx_, count, kSumPart, [&](uint64_t begin, uint64_t n) {
    const void* from[kMaxRanks];
    for (int r = 0; r < world_; ++r) from[r] = static_cast<const char*>(in[r]) + begin * in_size;
    strata::rank_sum::sum(isa_, from, world_, in_dtype, static_cast<char*>(out) + begin * out_size, out_dtype, n,
                          stream);
  });
}

}  // namespace comm_local
