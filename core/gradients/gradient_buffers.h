// gradient_buffers.h - room for unreduced gradients: a unit's flat buffer, from its first gradient to the end of its
// reduction.
//
// Where all buffers fit at once every unit has a place of its own. Otherwise places are found first fit; when what is
// free lies in pieces, the buffers still being filled move together. Every decision depends on sizes and host calls
// only, so that all ranks see the same room at the same call: places come free in the order their reductions were
// submitted, and only when they are needed, never by what happens to be finished. Host thread.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "core/arena.h"
#include "core/comm_queue.h"

namespace strata {

class GradientBuffers {
 public:
  GradientBuffers(const Device& device, const CommQueue& queue, Trace& trace)
      : device_(device), queue_(queue), trace_(trace) {}
  // Bytes for all buffers, and of zeros beside them.
  struct Room {
    uint64_t buffers = 0, zeros = 0;
  };
  // `sizes`: bytes of each unit's buffer. Then memory of its own, or what place() gives.
  void plan(std::vector<uint64_t> sizes, Room room);
  Status allocate(const Collective& collective, char** base);
  // Where the room is; NULL: nowhere. No buffer is open, and all reductions are over.
  void place(char* base);
  // As many zeros as were asked for, or NULL. Never written.
  char* zeros() const { return room_.zeros > 0 ? base_ + room_.buffers : nullptr; }

  bool is_open(uint32_t unit) const { return places_[unit].has_value(); }
  // Element addresses change with the next `open` of another unit.
  char* at(uint32_t unit) const { return base_ + *places_[unit]; }
  // Finds a place, waiting for reductions under way where there is no other room. Open buffers may have to move:
  // `settle` first waits for what is being written into them.
  Status open(uint32_t unit, const std::function<Status()>& settle);
  // What is written into open buffers on `stream` comes behind the reductions that read their places before.
  Status before(const strata_stream* stream) const;
  // The buffers of `units` are read by a reduction and free when it is done.
  void hand_over(const std::vector<uint32_t>& units, Work reduced);

 private:
  struct InFlight {
    std::vector<std::pair<uint32_t, uint64_t>> places;  // (unit, offset)
    Work reduced;
  };
  std::optional<uint64_t> find_place(uint32_t unit);
  Status reclaim_oldest();
  Status move_together();
  Status move_down(uint64_t from, uint64_t to, uint64_t bytes) const;

  const Device& device_;
  const CommQueue& queue_;
  Trace& trace_;
  std::vector<uint64_t> sizes_, own_place_;  // by unit; own places only where all fit
  std::vector<std::optional<uint64_t>> places_;
  Memory memory_;
  char* base_ = nullptr;
  Room room_;
  Arena arena_;
  std::deque<InFlight> in_flight_;
  Work reclaimed_;  // the last reduction whose places came free; it ends behind all earlier ones
};

}  // namespace strata
