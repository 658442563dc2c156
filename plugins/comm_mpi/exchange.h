// exchange.h - the collectives themselves: check, post, move.
//
// Every call runs the same course: check the items, meet the others on the channel (which compares the posts), then
// move the data. all_gather, broadcast and all_to_all are MPI's, in their non-blocking form, so that each wait has a
// deadline. Sums are ours, because MPI may add in any order: each rank receives its slice of every other rank's input,
// as it is, and adds in rank order in fp32; all_reduce then gathers the results. The same bytes go over the wire as
// with a ring.
//
// Sums work in rounds, so that the receive buffer is small. A round ends before the next begins, and in all_reduce
// every piece of input is sent before its results are received, so an input may be its output.
//
// A transfer that fails half way cannot be called back: `in_flight` then stays true, and the memory involved must not
// be given back to the system.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "channel.h"
#include "collective_kit/call.h"
#include "rank_sum/rank_sum.h"
#include "strata/iface/collective.h"

namespace comm_mpi {

using strata::collective_kit::Item;

class Exchange {
 public:
  Exchange(Channel* channel, MPI_Comm data, const strata_host* host);
  ~Exchange();
  // One collective, start to end. After an error every later call returns that error.
  Error run(Op op, const strata_coll_args& args, const Deadline& deadline);
  bool in_flight() const { return in_flight_; }

 private:
  // Elements of an item that one round of a sum handles: the slice of each rank that part() tells. `slot` is the byte
  // offset of our slice in every sender's part of the receive buffer.
  struct Piece {
    size_t item;
    uint64_t begin;
    uint64_t count;
    uint64_t slot;
  };
  struct Part {
    uint64_t begin;
    uint64_t count;
  };

  Error move(const Deadline& deadline);
  Error move_item(const Item& item, const Deadline& deadline);
  Error sums(const Deadline& deadline);
  Error sum_round(const std::vector<Piece>& round, const Deadline& deadline);
  void send_inputs(const Piece& piece);
  void add(const Piece& piece);
  void share_results(const Piece& piece);
  Part part(const Piece& piece, int rank) const;
  void send(const void* data, uint64_t bytes, int to);
  void receive(void* data, uint64_t bytes, int from);
  Error finish(const Deadline& deadline);
  char* slot(int rank, const Piece& piece) const;

  Channel* channel_;
  const MPI_Comm data_;
  const strata_executor_api* executor_;
  void* executor_ctx_;
  const int rank_;
  const int world_;
  const strata::rank_sum::Isa isa_;
  const uint64_t slot_bytes_;  // of the receive buffer, for each sender
  char* buffer_ = nullptr;     // world - 1 slots, made by the first sum
  bool in_flight_ = false;

  strata::collective_kit::Call call_;  // the one being run
  std::vector<MPI_Request> requests_;
  int start_code_ = MPI_SUCCESS;  // of the first send or receive that could not be started
};

}  // namespace comm_mpi
