#include "collectives.h"

#include <algorithm>

namespace comm_nccl {
namespace {

using strata::collective_kit::Op;
using strata::plugin_kit::join;

constexpr size_t kPiecesAtOnce = 64;

ncclDataType_t type_of(strata_dtype dtype) {
  return dtype == STRATA_F32 ? ncclFloat32 : dtype == STRATA_BF16 ? ncclBfloat16 : ncclFloat16;
}

}  // namespace

Collectives::Collectives(std::shared_ptr<Gpu> gpu, std::shared_ptr<Communicators> communicators, int rank, int world,
                         bool deterministic)
    : gpu_(std::move(gpu)),
      communicators_(std::move(communicators)),
      rank_(rank),
      world_(world),
      deterministic_(deterministic),
      slot_bytes_(kBufferBytes / static_cast<uint64_t>(world) / 4096 * 4096) {}

Collectives::~Collectives() {
  if (buffer_free_) gpu_->forget(buffer_free_);
}

Error Collectives::launch(const Call& call, cudaStream_t stream) {
  std::unique_lock<std::mutex> lock;
  if (communicators_) {
    lock = std::unique_lock(communicators_->calls());
    if (!communicators_->usable()) return {STRATA_UNAVAILABLE, call.what + ": the communicators are gone"};
  }
  Error e = group(call, [&]() -> Error {
    for (const Item& item : call.items) {
      if (item.count == 0 || ours(call, item)) continue;
      if (Error wrong = move(call, item, stream); !wrong.ok()) return wrong;
    }
    return {};
  });
  return e.ok() ? sums(call, stream) : e;
}

bool Collectives::ours(const Call& call, const Item& item) const {
  return call.sums() && (deterministic_ || world_ == 1 || item.in_dtype != item.out_dtype);
}

// NCCL wants the end of a group even when a call in it failed.
template <class Body>
Error Collectives::group(const Call& call, const Body& body) {
  if (!communicators_) return body();
  const Nccl& nccl = communicators_->nccl();
  if (Error e = communicators_->check(nccl.group_start(), call.what); !e.ok()) return e;
  const Error e = body();
  const Error end = communicators_->check(nccl.group_end(), call.what);
  return e.ok() ? end : e;
}

Error Collectives::move(const Call& call, const Item& item, cudaStream_t stream) {
  const uint64_t bytes = item.count * item.in_size;
  if (call.op == Op::kAllToAll) return swap(call, item, stream);
  if (world_ == 1) {
    if (item.in != item.out) gpu_->copy(item.out, item.in, bytes, stream);
    return {};
  }
  const Nccl& nccl = communicators_->nccl();
  ncclResult_t result = ncclInvalidArgument;
  if (call.op == Op::kAllGather) {
    result = nccl.all_gather(item.in, item.out, bytes, ncclInt8, communicators_->gathers(), stream);
  } else if (call.op == Op::kBroadcast) {
    const void* from = rank_ == call.root ? item.in : item.out;
    result = nccl.broadcast(from, item.out, bytes, ncclInt8, call.root, communicators_->gathers(), stream);
  } else if (call.op == Op::kReduceScatter) {
    result = nccl.reduce_scatter(item.in, item.out, item.count, type_of(item.in_dtype), ncclSum,
                                 communicators_->reductions(), stream);
  } else if (call.op == Op::kAllReduce) {
    result = nccl.all_reduce(item.in, item.out, item.count, type_of(item.in_dtype), ncclSum,
                             communicators_->reductions(), stream);
  }
  return communicators_->check(result, call.what);
}

Error Collectives::swap(const Call& call, const Item& item, cudaStream_t stream) {
  const uint64_t bytes = item.count * item.in_size;
  auto at = [&](auto* base, int rank) { return base + static_cast<uint64_t>(rank) * bytes; };
  gpu_->copy(at(item.out, rank_), at(item.in, rank_), bytes, stream);
  for (int step = 1; step < world_; ++step) {
    const int to = (rank_ + step) % world_, from = (rank_ + world_ - step) % world_;
    if (Error e = pass(call, at(item.in, to), bytes, to, at(item.out, from), bytes, from, stream); !e.ok()) return e;
  }
  return {};
}

Error Collectives::pass(const Call& call, const void* out, uint64_t out_bytes, int to, void* in, uint64_t in_bytes,
                        int from, cudaStream_t stream) {
  const Nccl& nccl = communicators_->nccl();
  const ncclComm_t comm = call.sums() ? communicators_->reductions() : communicators_->gathers();
  if (out_bytes > 0) {
    if (Error e = communicators_->check(nccl.send(out, out_bytes, ncclInt8, to, comm, stream), call.what); !e.ok()) {
      return e;
    }
  }
  if (in_bytes == 0) return {};
  return communicators_->check(nccl.recv(in, in_bytes, ncclInt8, from, comm, stream), call.what);
}

// ---- sums in rank order ----

Error Collectives::sums(const Call& call, cudaStream_t stream) {
  std::vector<Piece> pieces;
  uint64_t used = 0;
  for (const Item& item : call.items) {
    if (!ours(call, item)) continue;
    for (uint64_t begin = 0; begin < item.count;) {
      const uint64_t room = (slot_bytes_ - used) / item.in_size;
      if (room == 0 || pieces.size() == kPiecesAtOnce) {
        if (Error e = round(call, pieces, stream); !e.ok()) return e;
        pieces.clear();
        used = 0;
        continue;
      }
      const uint64_t most = call.op == Op::kAllReduce ? room * static_cast<uint64_t>(world_) : room;
      pieces.push_back({&item, begin, std::min(item.count - begin, most), used});
      used = std::min(slot_bytes_, used + (slice_of(call, pieces.back(), 0).count * item.in_size + 63) / 64 * 64);
      begin += pieces.back().count;
    }
  }
  return pieces.empty() ? Error() : round(call, pieces, stream);
}

// What rank `rank` adds up of this piece: as much as every other, but for the last ranks of an all_reduce.
Collectives::Slice Collectives::slice_of(const Call& call, const Piece& piece, int rank) const {
  const uint64_t r = static_cast<uint64_t>(rank), world = static_cast<uint64_t>(world_);
  if (call.op == Op::kReduceScatter) return {r * piece.item->count + piece.begin, piece.count};
  const uint64_t slice = (piece.count + world - 1) / world;
  const uint64_t first = std::min(piece.count, r * slice);
  return {piece.begin + first, std::min(piece.count - first, slice)};
}

Error Collectives::round(const Call& call, const std::vector<Piece>& pieces, cudaStream_t stream) {
  borrow_buffer(stream);
  auto all = [&](auto step) {
    return group(call, [&]() -> Error {
      for (const Piece& piece : pieces) {
        if (Error e = (this->*step)(call, piece, stream); !e.ok()) return e;
      }
      return {};
    });
  };
  Error e = all(&Collectives::send_inputs);
  if (!e.ok()) return e;
  for (const Piece& piece : pieces) add(call, piece, stream);
  if (buffer_free_) gpu_->forget(buffer_free_);
  buffer_free_ = gpu_->mark(stream);
  return call.op == Op::kAllReduce ? all(&Collectives::share_results) : Error();
}

// Calls of several streams share the buffer.
void Collectives::borrow_buffer(cudaStream_t stream) {
  if (buffer_free_ && buffer_stream_ != stream) gpu_->wait_for(stream, buffer_free_);
  buffer_stream_ = stream;
}

Error Collectives::send_inputs(const Call& call, const Piece& piece, cudaStream_t stream) {
  const Item& item = *piece.item;
  const uint64_t own_bytes = slice_of(call, piece, rank_).count * item.in_size;
  for (int step = 1; step < world_; ++step) {
    const int to = (rank_ + step) % world_, from = (rank_ + world_ - step) % world_;
    const Slice theirs = slice_of(call, piece, to);
    if (Error e = pass(call, item.in + theirs.begin * item.in_size, theirs.count * item.in_size, to, slot(from, piece),
                       own_bytes, from, stream);
        !e.ok()) {
      return e;
    }
  }
  return {};
}

void Collectives::add(const Call& call, const Piece& piece, cudaStream_t stream) {
  const Item& item = *piece.item;
  const Slice own = slice_of(call, piece, rank_);
  if (own.count == 0) return;
  const char* in = item.in + own.begin * item.in_size;
  if (item.in == item.out && item.in_size != item.out_size) {
    // Results are narrower than the inputs they would be written over: one thread's would hit another's input.
    gpu_->copy(slot(rank_, piece), in, own.count * item.in_size, stream);
    in = slot(rank_, piece);
  }
  char* out = item.out + (call.op == Op::kReduceScatter ? piece.begin : own.begin) * item.out_size;
  const Parts parts = {in, buffer_ + piece.slot, slot_bytes_, rank_, world_};
  gpu_->sum(parts, item.in_dtype, out, item.out_dtype, own.count, stream);
}

Error Collectives::share_results(const Call& call, const Piece& piece, cudaStream_t stream) {
  const Item& item = *piece.item;
  const Slice own = slice_of(call, piece, rank_);
  for (int step = 1; step < world_; ++step) {
    const int to = (rank_ + step) % world_, from = (rank_ + world_ - step) % world_;
    const Slice theirs = slice_of(call, piece, from);
    if (Error e = pass(call, item.out + own.begin * item.out_size, own.count * item.out_size, to,
                       item.out + theirs.begin * item.out_size, theirs.count * item.out_size, from, stream);
        !e.ok()) {
      return e;
    }
  }
  return {};
}

char* Collectives::slot(int rank, const Piece& piece) const {
  return buffer_ + static_cast<uint64_t>(rank) * slot_bytes_ + piece.slot;
}

// ---- opening ----

Error Collectives::warm_up(cudaStream_t stream) {
  constexpr uint64_t kCount = 1024;
  char* const out = buffer_ + kBufferBytes / 2;
  for (Op op : {Op::kAllGather, Op::kBroadcast, Op::kAllToAll, Op::kReduceScatter, Op::kAllReduce}) {
    Call call(rank_, world_);
    call.op = op;
    call.what = join("opening, ", strata::collective_kit::op_name(op));
    call.items = {{buffer_, out, kCount, STRATA_F32, STRATA_F32, 4, 4}};
    if (Error e = launch(call, stream); !e.ok()) return e;
  }
  // The way of sums in rank order.
  Call mixed(rank_, world_);
  mixed.op = Op::kReduceScatter;
  mixed.what = "opening, a sum in rank order";
  mixed.items = {
      {out, out + kBufferBytes / 4, kCount / static_cast<uint64_t>(world_) + 1, STRATA_BF16, STRATA_F32, 2, 4}};
  return launch(mixed, stream);
}

}  // namespace comm_nccl
