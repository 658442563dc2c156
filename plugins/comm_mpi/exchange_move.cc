// exchange_move.cc - how each collective moves its data; see exchange.h for the course of a call.
#include <algorithm>
#include <climits>
#include <cstring>

#include "exchange.h"
#include "host_memory/host_memory.h"
#include "plugin_kit/parallel.h"

namespace comm_mpi {
namespace {

constexpr int kTag = 2;
constexpr size_t kRequestsAtOnce = 64;       // of MPI's own collectives in one call
constexpr size_t kPiecesAtOnce = 64;         // of sums in one round
constexpr uint64_t kSumPart = 64 * 1024;     // elements one thread adds at a time
constexpr uint64_t kStreamBytes = 4u << 20;  // outputs of this size go past the caches (see rank_sum.h)

// `bytes` of memory as a count and a type of MPI's: counts are ints, so beyond 2 GiB a type of that length is made.
class Bytes {
 public:
  explicit Bytes(uint64_t bytes) {
    if (bytes <= INT_MAX) {
      count = static_cast<int>(bytes);
      return;
    }
    constexpr uint64_t kBlock = uint64_t{1} << 30;
    MPI_Datatype block = MPI_DATATYPE_NULL;
    MPI_Type_contiguous(static_cast<int>(kBlock), MPI_BYTE, &block);
    const int lengths[] = {static_cast<int>(bytes / kBlock), static_cast<int>(bytes % kBlock)};
    const MPI_Aint places[] = {0, static_cast<MPI_Aint>(bytes / kBlock * kBlock)};
    const MPI_Datatype types[] = {block, MPI_BYTE};
    MPI_Type_create_struct(2, lengths, places, types, &type);
    MPI_Type_commit(&type);
    MPI_Type_free(&block);
    count = 1;
  }
  Bytes(const Bytes&) = delete;
  ~Bytes() {
    if (type != MPI_BYTE) MPI_Type_free(&type);
  }
  int count = 0;
  MPI_Datatype type = MPI_BYTE;
};

}  // namespace

Error Exchange::move(const Deadline& deadline) {
  if (call_.sums()) return sums(deadline);
  for (const Item& item : call_.items) {
    if (item.count == 0) continue;
    if (Error e = move_item(item, deadline); !e.ok()) return e;
    if (requests_.size() < kRequestsAtOnce) continue;
    if (Error e = finish(deadline); !e.ok()) return e;
  }
  if (Error e = finish(deadline); !e.ok()) return e;
  if (call_.op != Op::kBroadcast || rank_ != call_.root) return {};
  for (const Item& item : call_.items) {
    if (item.out != item.in && item.count > 0) std::memcpy(item.out, item.in, item.count * item.in_size);
  }
  return {};
}

// Starts one item. An item too large for MPI's counts is waited for at once, while its type is there.
Error Exchange::move_item(const Item& item, const Deadline& deadline) {
  const Bytes slice(item.count * item.in_size);
  MPI_Request request = MPI_REQUEST_NULL;
  int code = MPI_SUCCESS;
  if (call_.op == Op::kAllGather) {
    const bool in_place = item.in == item.out + static_cast<uint64_t>(rank_) * item.count * item.in_size;
    code = MPI_Iallgather(in_place ? MPI_IN_PLACE : item.in, slice.count, slice.type, item.out, slice.count, slice.type,
                          data_, &request);
  } else if (call_.op == Op::kAllToAll) {
    code = MPI_Ialltoall(item.in, slice.count, slice.type, item.out, slice.count, slice.type, data_, &request);
  } else {  // a broadcast has one buffer: the root only reads it
    void* const buffer = rank_ == call_.root ? const_cast<char*>(item.in) : item.out;
    code = MPI_Ibcast(buffer, slice.count, slice.type, call_.root, data_, &request);
  }
  if (Error e = check_mpi(code, call_.what); !e.ok()) return e;
  requests_.push_back(request);
  return slice.type == MPI_BYTE ? Error() : finish(deadline);
}

// ---- sums ----

Error Exchange::sums(const Deadline& deadline) {
  if (!buffer_ && world_ > 1) {
    buffer_ = static_cast<char*>(strata::host_memory::allocate(slot_bytes_ * static_cast<uint64_t>(world_ - 1)));
    if (!buffer_) return {STRATA_RESOURCE_EXHAUSTED, call_.what + ": no memory for the receive buffer"};
  }
  std::vector<Piece> round;
  uint64_t used = 0;
  auto run_round = [&] {
    Error e = sum_round(round, deadline);
    round.clear();
    used = 0;
    return e;
  };
  for (size_t k = 0; k < call_.items.size(); ++k) {
    const Item& item = call_.items[k];
    for (uint64_t begin = 0; begin < item.count;) {
      const uint64_t room = (slot_bytes_ - used) / item.in_size;
      if (room == 0 || round.size() == kPiecesAtOnce) {
        if (Error e = run_round(); !e.ok()) return e;
        continue;
      }
      const uint64_t most = call_.op == Op::kAllReduce ? room * static_cast<uint64_t>(world_) : room;
      const Piece piece = {k, begin, std::min(item.count - begin, most), used};
      round.push_back(piece);
      used = std::min(slot_bytes_, used + (part(piece, 0).count * item.in_size + 63) / 64 * 64);
      begin += piece.count;
    }
  }
  return round.empty() ? Error() : run_round();
}

// The elements of the item that rank `rank` adds up in this piece: the same number for each rank, but for the last
// ranks of an all_reduce.
Exchange::Part Exchange::part(const Piece& piece, int rank) const {
  const uint64_t r = static_cast<uint64_t>(rank), world = static_cast<uint64_t>(world_);
  if (call_.op == Op::kReduceScatter) return {r * call_.items[piece.item].count + piece.begin, piece.count};
  const uint64_t slice = (piece.count + world - 1) / world;
  const uint64_t first = std::min(piece.count, r * slice);
  return {piece.begin + first, std::min(piece.count - first, slice)};
}

Error Exchange::sum_round(const std::vector<Piece>& round, const Deadline& deadline) {
  for (const Piece& piece : round) send_inputs(piece);
  if (Error e = finish(deadline); !e.ok()) return e;
  for (const Piece& piece : round) add(piece);
  if (call_.op == Op::kReduceScatter) return {};
  for (const Piece& piece : round) share_results(piece);
  return finish(deadline);
}

// To each rank its part of our input, from each rank our part of its input.
void Exchange::send_inputs(const Piece& piece) {
  const Item& item = call_.items[piece.item];
  for (int step = 1; step < world_; ++step) {
    const int to = (rank_ + step) % world_, from = (rank_ + world_ - step) % world_;
    const Part theirs = part(piece, to);
    receive(slot(from, piece), part(piece, rank_).count * item.in_size, from);
    send(item.in + theirs.begin * item.in_size, theirs.count * item.in_size, to);
  }
}

// The result goes straight to the output. Where that is the input too, its elements are no larger, so what is written
// has been read by then, and every rank has been sent its part.
void Exchange::add(const Piece& piece) {
  const Item& item = call_.items[piece.item];
  const Part own = part(piece, rank_);
  std::vector<const char*> in;
  for (int r = 0; r < world_; ++r) {
    in.push_back(r == rank_ ? item.in + own.begin * item.in_size : slot(r, piece));
  }
  char* out = item.out + (call_.op == Op::kReduceScatter ? piece.begin : own.begin) * item.out_size;
  const bool one_thread = item.out == item.in && item.out_size != item.in_size;
  const uint64_t at_once = one_thread ? own.count : kSumPart;
  strata::plugin_kit::for_parts(executor_, executor_ctx_, own.count, at_once, [&](uint64_t begin, uint64_t n) {
    std::vector<const void*> from;
    for (const char* p : in) from.push_back(p + begin * item.in_size);
    strata::rank_sum::sum(isa_, from.data(), world_, item.in_dtype, out + begin * item.out_size, item.out_dtype, n,
                          own.count * item.out_size >= kStreamBytes);
  });
}

void Exchange::share_results(const Piece& piece) {
  const Item& item = call_.items[piece.item];
  const Part own = part(piece, rank_);
  for (int step = 1; step < world_; ++step) {
    const int to = (rank_ + step) % world_, from = (rank_ + world_ - step) % world_;
    const Part theirs = part(piece, from);
    receive(item.out + theirs.begin * item.out_size, theirs.count * item.out_size, from);
    send(item.out + own.begin * item.out_size, own.count * item.out_size, to);
  }
}

// Pieces are smaller than the receive buffer, so an int holds their bytes.
void Exchange::send(const void* data, uint64_t bytes, int to) {
  if (bytes == 0 || start_code_ != MPI_SUCCESS) return;
  requests_.push_back(MPI_REQUEST_NULL);
  start_code_ = MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, kTag, data_, &requests_.back());
}

void Exchange::receive(void* data, uint64_t bytes, int from) {
  if (bytes == 0 || start_code_ != MPI_SUCCESS) return;
  requests_.push_back(MPI_REQUEST_NULL);
  start_code_ = MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, kTag, data_, &requests_.back());
}

Error Exchange::finish(const Deadline& deadline) {
  if (Error e = check_mpi(start_code_, call_.what); !e.ok()) return e;
  return channel_->finish(&requests_, call_.what, deadline);
}

char* Exchange::slot(int rank, const Piece& piece) const {
  const int index = rank < rank_ ? rank : rank - 1;
  return buffer_ + static_cast<uint64_t>(index) * slot_bytes_ + piece.slot;
}

}  // namespace comm_mpi
