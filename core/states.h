// states.h - the optimizer's state of this rank's slices: where each array lies, and how a piece of it is reached.
//
// The optimizer plugin declares the arrays; a unit's tier holds them, one region per segment and array, and
// where a part of a segment is kept in host memory one more. A piece is worked on in place where the update reaches it;
// otherwise it is read into a buffer, changed, and written back. So are weights on the other side than their update,
// and state in host memory that the device updates. The pipeline over many pieces is in update/host_lane.h; `visit` is
// the one-piece form for reading and writing tensors.
#pragma once

#include <functional>
#include <vector>

#include "core/backends.h"
#include "core/layout.h"
#include "core/state_places.h"
#include "core/weights/weights.h"

namespace strata {

class States {
 public:
  // `on_device` NULL: one optimizer updates everything.
  struct Optimizers {
    const Optimizer* main;
    const Optimizer* on_device;
  };
  States(const Layout& layout, const Device& device, Optimizers optimizers, const StatePlaces& places,
         const Weights& weights);

  // Asks the optimizers what they keep for the dtypes in use.
  Status declare();
  uint64_t bytes_of(uint32_t unit) const { return bytes_of(unit, false) + bytes_of(unit, true); }
  uint64_t bytes(TierKind tier) const;
  uint64_t front_bytes() const;
  // Elements of each segment that have state.
  StatePlaces::Sizes sizes() const;
  // Of buffers for `visit`, for state whose update runs on the host, or on the device.
  uint64_t visit_bytes(bool on_host) const;
  // The largest of the same for any pieces of up to `elements` that are not streamed.
  struct Buffer {
    uint64_t bytes = 0, elements = 0;
  };
  Buffer largest_buffer(uint64_t elements, bool on_host) const;
  // Weights on disk that the device updates pass through this much host memory.
  uint64_t bounce_bytes() const;
  // Of what lies in host memory, what the device will copy.
  enum class Streams { kNothing, kFront, kAny };
  Status allocate(Streams streams);

  const StatePlaces& places() const { return places_; }
  const strata_optim_layout& layout_of(const Segment& s) const { return layouts_[static_cast<size_t>(s.dtype)]; }
  bool has_layout(const Segment& s) const { return layouts_[static_cast<size_t>(s.dtype)].struct_size != 0; }
  // Index of a canonical array ("master", "exp_avg", ...), or -1.
  int canonical_index(const Segment& s, const std::string& name) const;

  // A piece of a segment: elements [begin, begin + count) of what this rank owns, both multiples of 2,048.
  struct Piece {
    uint32_t unit = 0, segment = 0;
    uint64_t begin = 0, count = 0;  // all of it in front(), or all of it behind
    bool streamed = false;          // lies in host memory, and is brought to the device for its update
  };
  // How much of a segment's state lies apart, elements from the first on: see StatePlaces.
  uint64_t front(uint32_t unit, uint32_t segment) const { return places_.front(unit, segment); }
  // Where its update runs, and what does it.
  bool on_host(const Piece& piece) const { return places_.on_host(piece.unit) && !piece.streamed; }
  const Optimizer& optimizer() const { return *optimizers_.main; }
  const Optimizer& optimizer(const Piece& piece) const {
    return on_host(piece) || !optimizers_.on_device ? *optimizers_.main : *optimizers_.on_device;
  }
  // State and weights are updated where they lie. Known before anything is allocated.
  bool in_place(const Piece& piece) const { return state_in_place(piece) && weight_in_place(piece); }
  // Bytes of a buffer that holds what is not in place of a piece: state arrays, then the weight.
  uint64_t buffer_bytes(const Piece& piece) const;
  // Of a piece's state and weight, wherever they are.
  uint64_t bytes(const Piece& piece) const { return array_bytes(piece) + weight_bytes(piece); }
  // Pointers to the arrays and the weight of a piece: in place, or into `buffer`.
  void point(const Piece& piece, char* buffer, std::vector<void*>* arrays, void** weight) const;
  // Moves a piece between where it lies and a buffer of `memory_for_updates`: the arrays, and the weight where it is
  // state or `weight_too`. Nothing to do in place. Copies from and to the device are work on `stream`; `done` NULL: all
  // of it is such work.
  Status load(const Piece& piece, char* buffer, bool weight_too, const strata_stream* stream,
              std::vector<Work>* done) const;
  Status store(const Piece& piece, char* buffer, const strata_stream* stream, std::vector<Work>* done) const;
  Status memory_for_updates(bool on_host, uint64_t bytes, Memory* out) const;
  // Tells the tiers of such memory of the host.
  Status register_buffer(const Memory& memory, std::vector<Registration>* out) const;

  // Runs fn(args, index of `first` within the piece) on elements [first, first + count) of the owned range, cut into
  // bounded pieces; `write` stores them afterwards.
  using Visitor = std::function<Status(const strata_optim_args& args, uint64_t first)>;
  Status visit(uint32_t unit, uint32_t segment, uint64_t first, uint64_t count, bool write, const Visitor& fn);

 private:
  uint64_t bytes_of(uint32_t unit, bool front) const;
  Status check_on_device(const Segment& s) const;
  Status check_memory(const strata_optim_layout& layout, bool on_host) const;
  const Segment& segment(const Piece& piece) const { return layout_.units[piece.unit].segments[piece.segment]; }
  uint64_t array_bytes(const Piece& piece) const;
  uint64_t weight_bytes(const Piece& piece) const { return piece.count * dtype_size(segment(piece).dtype); }
  bool state_in_place(const Piece& piece) const {
    return (places_.tier(piece.unit).addressable() || in_front(piece)) && !piece.streamed;
  }
  bool in_front(const Piece& piece) const { return piece.begin < front(piece.unit, piece.segment); }
  // Where an array of it lies.
  struct Place {
    const Region& region;
    uint64_t offset;  // bytes
  };
  Place place(const Piece& piece, uint32_t array) const;
  bool weight_in_place(const Piece& piece) const {
    const bool same_side = !device_.is_asynchronous() || on_host(piece) != weights_.on_device(piece.unit);
    return weights_.addressable(piece.unit) && same_side;
  }
  Status move_arrays(bool write, const Piece& piece, char* buffer, const strata_stream* stream,
                     std::vector<Work>* done) const;
  Status move_weight(bool write, const Piece& piece, char* buffer, const strata_stream* stream,
                     std::vector<Work>* done) const;
  Status move_through_host(bool write, const Region& region, uint64_t offset, uint64_t bytes, char* here,
                           const strata_stream* stream) const;

  const Layout& layout_;
  const Device& device_;
  const Optimizers optimizers_;
  const StatePlaces& places_;
  const Weights& weights_;
  strata_optim_layout layouts_[8] = {};  // by dtype
  struct Arrays {
    std::vector<Region> front, rest;
  };
  std::vector<std::vector<Arrays>> arrays_;  // [unit][segment]
  Memory visit_buffers_[2];                  // on the device; of the host
  mutable Memory bounce_;                    // between disk and device
};

}  // namespace strata
