// states.h - the optimizer's state of this rank's slices: where each array lies, and how a piece of it is reached.
//
// The optimizer plugin declares the arrays; the state tier holds them, one region per segment and array. On an
// addressable tier a piece is worked on in place; otherwise it is read into a buffer, changed, and written back. So are
// weights on a device when their update runs on the host.
// The pipeline over many pieces is in update.h; `visit` is the one-piece form for reading and writing tensors.
#pragma once

#include <functional>
#include <vector>

#include "core/backends.h"
#include "core/layout.h"
#include "core/tier.h"
#include "core/weights.h"

namespace strata {

class States {
 public:
  States(const Layout& layout, const Device& device, const Optimizer& optimizer, const Tier& tier,
         const Weights& weights);

  // Asks the optimizer what it keeps for the dtypes in use.
  Status declare();
  uint64_t bytes() const;
  Status allocate();

  const Tier& tier() const { return tier_; }
  // The update runs on the host, on memory of the host.
  bool on_host() const { return tier_.kind() != kDeviceTier || !device_.is_asynchronous(); }
  // State and weights are updated where they lie. Known before anything is allocated.
  bool in_place(uint32_t unit) const { return tier_.addressable() && weight_in_place(unit); }
  const strata_optim_layout& layout_of(const Segment& s) const { return layouts_[static_cast<size_t>(s.dtype)]; }
  bool has_layout(const Segment& s) const { return layouts_[static_cast<size_t>(s.dtype)].struct_size != 0; }
  // Index of a canonical array ("master", "exp_avg", ...), or -1.
  int canonical_index(const Segment& s, const std::string& name) const;

  // A piece of a segment: elements [begin, begin + count) of what this rank owns, both multiples of 2,048.
  struct Piece {
    uint32_t unit = 0, segment = 0;
    uint64_t begin = 0, count = 0;
  };
  // Bytes a buffer needs to hold a piece of `count` elements: state arrays, then the weight.
  uint64_t buffer_bytes(const Segment& s, uint64_t count) const;
  // Pointers to the arrays and the weight of a piece: in place, or into `buffer`.
  void point(const Piece& piece, char* buffer, std::vector<void*>* arrays, void** weight) const;
  // Moves a piece between where it lies and a buffer of `memory_for_updates`: the arrays, and the weight where it is
  // state or `weight_too`. Nothing to do in place. Copies from and to the device are work on `stream`.
  Status load(const Piece& piece, char* buffer, bool weight_too, const strata_stream* stream,
              std::vector<Work>* done) const;
  Status store(const Piece& piece, char* buffer, const strata_stream* stream, std::vector<Work>* done) const;
  Status memory_for_updates(uint64_t bytes, Memory* out) const;

  // Runs fn(args, index of `first` within the piece) on elements [first, first + count) of the owned range, cut into
  // bounded pieces; `write` stores them afterwards.
  using Visitor = std::function<Status(const strata_optim_args& args, uint64_t first)>;
  Status visit(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, bool write, const Visitor& fn);

 private:
  Status check_memory(const strata_optim_layout& layout) const;
  bool weight_in_place(uint32_t unit) const {
    return weights_.addressable(unit) && (!device_.is_asynchronous() || on_host() != weights_.on_device(unit));
  }
  template <class Move>
  Status move_arrays(const Piece& piece, char* buffer, Move move) const;
  Status move_weight(bool write, const Piece& piece, char* buffer, const strata_stream* stream,
                     std::vector<Work>* done) const;

  const Layout& layout_;
  const Device& device_;
  const Optimizer& optimizer_;
  const Tier& tier_;
  const Weights& weights_;
  strata_optim_layout layouts_[8] = {};                    // by dtype
  std::vector<std::vector<std::vector<Region>>> regions_;  // [unit][segment][array]
  Memory visit_buffer_;
};

}  // namespace strata
