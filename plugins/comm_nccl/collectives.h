// collectives.h - how each collective moves its data: one group of NCCL calls, on the caller's stream.
//
// Gathers, broadcasts and all-to-alls have the one communicator, sums the other. Sums are NCCL's where input and output
// have one type, unless deterministic_reduce is set: NCCL rounds to that type after each addition, in an order of its
// own. All other sums are ours: each rank sends every other its slice as it is (the bytes a ring would send), and one
// kernel adds in rank order in fp32 and rounds once. They go in rounds through a buffer made at open.
//
// Two ranks need no order: a + b is b + a, and NCCL's one rounding is right. It adds bf16 and f16 either in that type
// (one rounding by definition) or in fp32 and then rounds; both give the same, since fp32 has at least 2p + 2 bits for
// the p = 8 of bf16 and the p = 11 of f16, from where rounding twice is rounding once; sums below the normal range are
// exact in all of them. Only a NaN may have other bits than ours.
#pragma once

#include <memory>
#include <vector>

#include "collective_kit/call.h"
#include "communicators.h"

namespace comm_nccl {

using strata::collective_kit::Call;
using strata::collective_kit::Item;

class Collectives {
 public:
  // `communicators` NULL: world 1.
  Collectives(std::shared_ptr<Gpu> gpu, std::shared_ptr<Communicators> communicators, int rank, int world,
              bool deterministic);
  ~Collectives();

  // Takes `buffer` of kBufferBytes for the rounds of sums.
  void use_buffer(void* buffer) { buffer_ = static_cast<char*>(buffer); }
  static constexpr uint64_t kBufferBytes = uint64_t{32} << 20;

  // Enqueues all of the call on `stream`. Errors are NCCL's and the device's.
  Error launch(const Call& call, cudaStream_t stream);
  // A small call of every kind, so that connections are made now, under the caller's deadline, and not by the first
  // step. Needs the buffer.
  Error warm_up(cudaStream_t stream);
  bool fixed_order() const { return deterministic_ || world_ <= 2; }

 private:
  // Elements of an item that one round of sums handles; `slot` is the byte offset in every rank's part of the buffer.
  struct Piece {
    const Item* item;
    uint64_t begin;
    uint64_t count;
    uint64_t slot;
  };
  struct Slice {
    uint64_t begin;
    uint64_t count;
  };
  template <class Body>
  Error group(const Call& call, const Body& body);
  Error move(const Call& call, const Item& item, cudaStream_t stream);
  Error swap(const Call& call, const Item& item, cudaStream_t stream);
  bool ours(const Call& call, const Item& item) const;

  Error sums(const Call& call, cudaStream_t stream);
  Error round(const Call& call, const std::vector<Piece>& pieces, cudaStream_t stream);
  Error send_inputs(const Call& call, const Piece& piece, cudaStream_t stream);
  void add(const Call& call, const Piece& piece, cudaStream_t stream);
  Error share_results(const Call& call, const Piece& piece, cudaStream_t stream);
  Slice slice_of(const Call& call, const Piece& piece, int rank) const;
  char* slot(int rank, const Piece& piece) const;
  // To `to` and from `from`, as bytes, within a group; nothing moves where there are none.
  Error pass(const Call& call, const void* out, uint64_t out_bytes, int to, void* in, uint64_t in_bytes, int from,
             cudaStream_t stream);
  void borrow_buffer(cudaStream_t stream);

  const std::shared_ptr<Gpu> gpu_;
  const std::shared_ptr<Communicators> communicators_;
  const int rank_;
  const int world_;
  const bool deterministic_;
  const uint64_t slot_bytes_;
  char* buffer_ = nullptr;
  cudaStream_t buffer_stream_ = nullptr;  // which used it last, until buffer_free_
  cudaEvent_t buffer_free_ = nullptr;
};

}  // namespace comm_nccl
