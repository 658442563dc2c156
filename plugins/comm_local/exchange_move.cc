// The part of exchange.h that moves bytes: which rank reads what, from where, in which order; and the cutting of large
// pieces for the rank's threads. Everything here has its sources resolved and its arguments checked.
#include <algorithm>

#include "exchange.h"

namespace comm_local {
namespace {

// Work for several threads is cut at these fixed places.
constexpr uint64_t kCopyPart = 512u << 10;
constexpr uint64_t kSumPart = 64u << 10;  // elements
constexpr uint64_t kScratchHalf = kScratchBytes / 2;
constexpr uint64_t kSliceUnit = 32;  // elements: every slice of scratch starts on a cache line

// Calls fn(begin, n) for the parts of [0, total), on the executor where there are several parts and threads.
template <class Fn>
void for_parts(const strata_executor_api* executor, void* ctx, uint64_t total, uint64_t part, const Fn& fn) {
  if (!executor || total <= part || executor->threads(ctx) <= 1) {
    fn(uint64_t{0}, total);
    return;
  }
  struct Job {
    const Fn& fn;
    uint64_t total, part;
  } job = {fn, total, part};
  executor->parallel_for(
      ctx, (total + part - 1) / part,
      [](void* arg, uint64_t i) {
        const Job& j = *static_cast<const Job*>(arg);
        j.fn(i * j.part, std::min(j.part, j.total - i * j.part));
      },
      &job);
}

}  // namespace

// ---- moving ----

void Exchange::all_gather() {
  for (size_t k = 0; k < items_.size(); ++k) {
    const uint64_t slice = items_[k].count * size_of(items_[k].in_dtype);
    // Starting behind ourselves, so that ranks do not all read the same rank's memory at once.
    for (int i = 0; i < world_; ++i) {
      const int from = (rank_ + 1 + i) % world_;
      copy_all(items_[k].out + static_cast<uint64_t>(from) * slice, source(from, k), slice);
    }
  }
}

void Exchange::reduce_scatter() {
  const void* in[kMaxRanks];
  for (size_t k = 0; k < items_.size(); ++k) {
    const Item& item = items_[k];
    if (item.count == 0) continue;
    const uint64_t own = static_cast<uint64_t>(rank_) * item.count * size_of(item.in_dtype);
    for (int r = 0; r < world_; ++r) in[r] = source(r, k) + own;
    sum_all(in, item.in_dtype, item.out, item.out_dtype, item.count, stream_);
  }
}

void Exchange::broadcast() {
  for (size_t k = 0; k < items_.size(); ++k) {
    copy_all(items_[k].out, source(root_, k), items_[k].count * size_of(items_[k].in_dtype));
  }
}

void Exchange::all_to_all() {
  for (size_t k = 0; k < items_.size(); ++k) {
    if (items_[k].count == 0) continue;
    const uint64_t slice = items_[k].count * size_of(items_[k].in_dtype);
    for (int i = 0; i < world_; ++i) {
      const int from = (rank_ + 1 + i) % world_;
      copy_all(items_[k].out + static_cast<uint64_t>(from) * slice,
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
    if (Error e = board_->sync(what_, deadline); !e.ok()) return e;
    gather_round(round, half * kScratchHalf);
    half ^= 1;
    used = 0;
    round.clear();
    return {};
  };
  const uint64_t world = static_cast<uint64_t>(world_);
  for (size_t k = 0; k < items_.size(); ++k) {
    const uint64_t size = size_of(items_[k].out_dtype);
    for (uint64_t begin = 0; begin < items_[k].count;) {
      const uint64_t room = (kScratchHalf - used) / size / kSliceUnit * kSliceUnit;
      if (room == 0) {
        if (Error e = run_round(); !e.ok()) return e;
        continue;
      }
      const uint64_t count = std::min(items_[k].count - begin, room * world);
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
    const Item& item = items_[piece.item];
    const uint64_t first = std::min(piece.count, static_cast<uint64_t>(rank_) * piece.slice);
    const uint64_t count = std::min(piece.count - first, piece.slice);
    if (count == 0) continue;
    for (int r = 0; r < world_; ++r) in[r] = source(r, piece.item) + (piece.begin + first) * size_of(item.in_dtype);
    sum_all(in, item.in_dtype, scratch + piece.scratch, item.out_dtype, count, false);
  }
}

void Exchange::gather_round(const std::vector<Piece>& round, uint64_t half_offset) {
  for (const Piece& piece : round) {
    const Item& item = items_[piece.item];
    const uint64_t size = size_of(item.out_dtype);
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
    copy(static_cast<char*>(out) + begin, static_cast<const char*>(in) + begin, n, stream_);
  });
}

void Exchange::sum_all(const void* const* in, strata_dtype in_dtype, void* out, strata_dtype out_dtype, uint64_t count,
                       bool stream) const {
  for_parts(executor_, executor_ctx_, count, kSumPart, [&](uint64_t begin, uint64_t n) {
    const void* from[kMaxRanks];
    for (int r = 0; r < world_; ++r) from[r] = static_cast<const char*>(in[r]) + begin * size_of(in_dtype);
    sum(isa_, from, world_, in_dtype, static_cast<char*>(out) + begin * size_of(out_dtype), out_dtype, n, stream);
  });
}

}  // namespace comm_local
