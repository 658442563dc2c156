// gradient_memory.h - where gradients lie: unreduced ones, accumulators, what one reduction brings, this rank's reduced
// slices and sums of them, and their sums of squares.
//
// Sizes are known before anything is allocated. What lies on the device is the engine's own or the host's (lender.h):
// lent memory has addresses from a step's first gradient until the loan ends.
// Host thread; the collective and the update thread read addresses while they hold.
#pragma once

#include <vector>

#include "core/gradients/gradient_buffers.h"
#include "core/gradients/lender.h"
#include "core/layout.h"
#include "core/manifest/settings.h"
#include "core/plan.h"
#include "core/state_places.h"

namespace strata {

// How gradients are summed in this run; see the table in gradients.h.
struct GradientPlan {
  int micro_batches = 1;
  bool local = false;                    // full fp32 accumulators
  strata_dtype communication_dtype = 0;  // 0: the param's own
  strata_dtype wire(const Segment& s) const {
    if (communication_dtype != 0) return communication_dtype;
    return local ? STRATA_F32 : s.dtype;
  }
  strata_dtype owned(const Segment& s) const { return micro_batches == 1 ? wire(s) : STRATA_F32; }
  // Every micro-batch is reduced, and added to those before.
  bool adds_up() const { return micro_batches > 1 && !local; }
  // Full accumulators are sent as they are, or first rounded to a narrower wire dtype.
  bool needs_wire_buffer(const Segment& s) const { return !local || wire(s) != STRATA_F32; }
  static GradientPlan of(const Settings& settings) {
    const ZeroSettings& zero = settings.zero_optimization;
    GradientPlan plan;
    plan.micro_batches = static_cast<int>(settings.gradient_accumulation_steps);
    plan.local = plan.micro_batches > 1 && (zero.stage < 2 || zero.accumulate_locally);
    plan.communication_dtype = settings.communication_data_type;
    return plan;
  }
};

class GradientMemory {
 public:
  GradientMemory(const Layout& layout, const ZeroSettings& settings, GradientPlan plan, const Device& device,
                 const Collective& collective, const CommQueue& queue, const StatePlaces& places, Trace& trace,
                 const strata_lender* lender);

  const GradientPlan& plan() const { return plan_; }
  // What allocate, or the host, will give. `pins`: host memory of an offloaded state is page-locked.
  void add_to(Plan* plan, bool pins) const;
  Status allocate();

  // Memory on the device comes from the host, and only while there are gradients.
  bool is_lent() const { return static_cast<bool>(lender_); }
  // Whether owned() has addresses now.
  bool has_reduced(uint32_t unit) const { return !(lender_ && places_.on_device(unit)) || lender_.is_holding(); }
  // Before a gradient is written on `stream`, or a unit without one is completed (NULL). `*lent`: work on other streams
  // that uses this memory comes behind before().
  Status borrow(const strata_stream* stream, bool* lent);
  Status before(const strata_stream* stream) const { return lender_.before(stream); }
  // The update of `units` is under way: see Lender::until_fetched.
  void until_fetched(const std::vector<uint32_t>& units) { lender_.until_fetched(units); }
  // A micro-batch is over but for its reductions, which end with `reduced`; `first` is what gets gradients first. Where
  // nothing of it stays on the device, the host has its memory back at that unit's next fetch: for most of a forward.
  void end_micro_batch(uint32_t first, const Work& reduced);
  // `stream` waits for the last update of `unit`.
  Status note_fetch(uint32_t unit, const strata_stream* stream);

  // Elements that may be done and wait for their turn or for their bucket to fill.
  uint64_t waiting_limit() const { return waiting_limit_; }
  GradientBuffers& buffers() { return buffers_; }
  uint64_t buffer_bytes(uint32_t unit) const { return slots_[unit].buffer_bytes; }
  // Of a segment: in the unit's open buffer; full fp32 sums; the reduced slice, NULL where frozen; the same on the
  // device, where that is elsewhere and micro-batches are added up there; sums of squares of this rank's blocks.
  char* wire(uint32_t unit, uint32_t segment) const { return buffers_.at(unit) + slots_[unit].wire[segment]; }
  char* accumulator(uint32_t unit, uint32_t segment) const { return slots_[unit].accumulator[segment]; }
  char* owned(uint32_t unit, uint32_t segment) const { return slots_[unit].owned[segment]; }
  char* arriving(uint32_t unit, uint32_t segment) const { return slots_[unit].arriving[segment]; }
  double* norm(uint32_t unit, uint32_t segment) const { return slots_[unit].norm[segment]; }
  // Room for one reduction's fp32 results.
  char* scratch() const { return blocks_.scratch; }
  // Micro-batches are added up in host memory, in owned().
  bool sums_on_host(uint32_t unit) const {
    return plan_.adds_up() && places_.leaves_device(unit) && !places_.sums_on_device(unit);
  }
  // A rank alone receives what it sent, and needs no other place for it: it is added as it is, or is what would arrive.
  bool takes_as_sent(const Segment& s) const {
    return layout_.world == 1 && (plan_.adds_up() || plan_.wire(s) == plan_.owned(s));
  }
  // Bytes of fp32 sums of a unit; 0: it has none, or keeps its state on the device. What the reductions of a
  // micro-batch bring to sums in host memory.
  uint64_t sum_bytes(uint32_t unit) const;
  std::vector<uint64_t> bytes_to_host_sums() const;
  // All sums of squares of counted segments, or of copies.
  const double* norms(bool counted) const {
    return reinterpret_cast<const double*>(norms_.at(0)) + (counted ? 0 : norm_blocks(true));
  }
  uint64_t norm_blocks(bool counted) const;
  const StatePlaces& places() const { return places_; }

 private:
  struct Slot {
    uint64_t buffer_bytes = 0;
    std::vector<uint64_t> wire;  // byte offset of each segment in the buffer
    std::vector<char*> owned, arriving, accumulator;
    std::vector<double*> norm;
  };
  // Where each kind of memory on the device begins.
  struct Blocks {
    char *buffers = nullptr, *accumulators = nullptr, *scratch = nullptr, *arriving = nullptr, *reduced = nullptr;
  };
  using Room = GradientBuffers::Room;
  Room room() const;
  uint64_t buffer_bytes() const { return room().buffers + room().zeros; }
  uint64_t owned_bytes(bool on_device) const;
  uint64_t accumulator_bytes() const;
  uint64_t arriving_bytes() const;
  uint64_t kept_bytes() const { return accumulator_bytes() + arriving_bytes() + owned_bytes(true); }
  bool uses_scratch(uint32_t unit) const;
  uint64_t scratch_bytes() const;
  uint64_t norm_bytes() const { return (norm_blocks(true) + norm_blocks(false)) * sizeof(double); }
  // Reduced slices, or sums of them, have a place on the device.
  bool keeps(uint32_t unit) const { return !places_.leaves_device(unit) || (plan_.adds_up() && !sums_on_host(unit)); }
  Status allocate_blocks(Blocks* blocks);
  Status allocate_offloaded();
  // The reduced slices of a unit, from `at` on.
  void place_reduced(uint32_t unit, char** at);
  void place(const Blocks& blocks);

  const Layout& layout_;
  const ZeroSettings& settings_;
  const GradientPlan plan_;
  const Device& device_;
  const Collective& collective_;
  const CommQueue& queue_;
  const StatePlaces& places_;
  uint64_t waiting_limit_ = 0;
  std::vector<Slot> slots_;  // by layout unit
  GradientBuffers buffers_;
  Lender lender_;
  strata_stream host_stream_{};  // of the last fetch: a loan that begins without a gradient is made on it
  Blocks blocks_;
  Memory accumulators_, scratch_, norms_, arriving_, reduced_;
  Region offloaded_region_;
  Memory offloaded_memory_;
};

}  // namespace strata
