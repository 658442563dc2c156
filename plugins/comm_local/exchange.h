// exchange.h - the collectives themselves: post, compare, move, part.
//
// Every call runs the same course:
//   1. read and check the items, write them to our table, post (number, operation, tag, bytes, label)
//   2. sync: every rank has posted, every input is complete
//   3. compare all posts; each rank sees the same difference and fails with the same words
//   4. pull: each rank reads the others' inputs where they lie and writes its own outputs only
//   5. sync: nobody reads our input any more, so the caller may change it
// all_reduce alone has syncs inside step 4: its ranks reduce a slice each into scratch memory and gather from there, in
// rounds, so that the scratch is small (it stays in the cache) and an input may be its output.
//
// Posts alternate between two places: a rank may be one call ahead of another that still compares, never two.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "board.h"
#include "collective_kit/call.h"
#include "memory.h"
#include "plugin_kit/plugin_kit.h"
#include "rank_sum/rank_sum.h"
#include "strata/iface/collective.h"

namespace comm_local {

using strata::collective_kit::Item;
using strata::collective_kit::Op;
using strata::rank_sum::Isa;

// Scratch of all_reduce per rank: two halves, small enough to stay in the cache.
constexpr uint64_t kScratchBytes = 2u << 20;

class Exchange {
 public:
  Exchange(Board* board, Memory* memory, const strata_host* host, Isa isa);
  // One collective, start to end. After an error every later call returns that error.
  Error run(Op op, const strata_coll_args& args, const Deadline& deadline);

 private:
  // What others need to know of an item; an array of these is a rank's table.
  struct Posted : strata::collective_kit::Shape {
    Place in;
  };
  // A part of an item that one round of all_reduce handles: rank r reduces elements begin + r * slice onward.
  struct Piece {
    size_t item;
    uint64_t begin;
    uint64_t count;
    uint64_t slice;
    uint64_t scratch;  // byte offset of the slice in each rank's scratch half
  };

  Error prepare(Op op, const strata_coll_args& args);
  Error move(const Deadline& deadline);
  Error ensure_shared(uint64_t bytes, void** base, uint64_t* have);
  Error post(const strata_coll_args& args);
  Error compare();
  std::string difference(const Post& a, int rank_a, const Post& b, int rank_b);
  Error find_sources();

  void all_gather();
  void reduce_scatter();
  Error all_reduce(const Deadline& deadline);
  void reduce_round(const std::vector<Piece>& round, char* scratch);
  void gather_round(const std::vector<Piece>& round, uint64_t half_offset);
  void broadcast();
  void all_to_all();

  void copy_all(void* out, const void* in, uint64_t bytes) const;
  void sum_all(const void* const* in, strata_dtype in_dtype, void* out, strata_dtype out_dtype, uint64_t count,
               bool stream) const;
  const char* source(int rank, size_t item) const {
    return sources_[static_cast<size_t>(rank) * call_.items.size() + item];
  }
  const Post& post_of(int rank) const { return board_->seat(rank).posts[call_.number % 2]; }

  Board* board_;
  Memory* memory_;
  const strata_executor_api* executor_;
  void* executor_ctx_;
  const Isa isa_;
  const int rank_;
  const int world_;

  strata::collective_kit::Call call_;  // the one being run
  bool stream_ = false;
  std::vector<const char*> sources_;  // [rank][item], NULL where nothing is read
  std::vector<const char*> scratches_;

  void* table_ = nullptr;  // our posted items
  uint64_t table_bytes_ = 0;
  void* scratch_ = nullptr;  // kScratchBytes
  uint64_t scratch_bytes_ = 0;
};

}  // namespace comm_local
