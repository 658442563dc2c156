// gradients.h - the way of a gradient: folded into its unit's flat buffer, reduced, kept as this rank's slice.
//
// Within a micro-batch a unit goes IDLE -> FILLING (first gradient) -> READY (no more to come) -> REDUCING -> IDLE.
// Every trainable unit is reduced exactly once per reduction point, zeros for what is absent, in the canonical order:
// rank 0's order of the last step (reverse registration order at first); a unit out of turn waits. Finished units are
// coalesced into buckets of up to reduce_bucket_size elements, one grouped reduction each.
//
// What is added where
//   one micro-batch              wire dtype in the flat buffer -> sum in fp32 -> rounded once to the wire dtype
//   several, stages 2 and 3      the same with an fp32 result, added to this rank's fp32 sum: on the device, or, where
//                                the optimizer state leaves it, in host memory (host_sums.h)
//   several, stages 0 and 1, or  full fp32 accumulators on every rank, reduced once per step
//   accumulate_locally
// The first gradient of a param in a micro-batch is copied; from the second on the sum is kept in fp32 beside the
// buffer and rounded once, when the unit is reduced.
//
// On a device with streams a gradient is folded on the host's own stream, where the memory it lies in is safe; units
// are completed on another one behind that, and reduced behind that.
//
// Host thread, except the work marked "collective thread", which runs behind each reduction.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "core/comm_queue.h"
#include "core/gradients/gradient_memory.h"
#include "core/gradients/host_sums.h"
#include "core/weights/weights.h"

namespace strata {

class Gradients {
 public:
  Gradients(const Registry& registry, const Layout& layout, const ZeroSettings& settings, GradientPlan plan,
            const Device& device, const Collective& collective, CommQueue& queue, const StatePlaces& places,
            const Weights& weights, Counters& counters, Trace& trace, const strata_lender* lender,
            const Device& host_device, const std::vector<int>& cpus);

  // Waits for what the host's streams still write into gradient memory, which goes next.
  ~Gradients();

  void add_to(Plan* plan, bool pins) const;
  Status allocate();
  const GradientMemory& memory() const { return memory_; }
  // `stream` waits for the last update of `unit`.
  Status note_fetch(uint32_t unit, const strata_stream* stream) { return memory_.note_fetch(unit, stream); }

  // grads[i] is params[i]'s. All of them, or none.
  Status add(const uint32_t* params, const std::vector<strata_tensor>& grads, const strata_stream* stream);
  Status unit_done(uint32_t unit);
  Status end_backward();
  // What was given since the last step is gone, once the reductions under way are done.
  Status drop();
  int micro_batches_done() const { return micro_; }
  bool filling() const { return filling_; }
  // The step takes the gradients: which registered units got any on this rank, and the order they became ready in.
  std::vector<uint8_t> take_used();
  std::vector<uint32_t> take_order();
  void set_order(std::vector<uint32_t> order) {
    asks_ = may_overflow_ && order != order_;
    order_ = std::move(order);
  }
  // The update of `units` is under way.
  void begin_step(const std::vector<uint32_t>& units) {
    micro_ = 0;
    memory_.until_fetched(units);
  }

  // Of fp32 sums beside the buffers. They come with the first param that gets several gradients in a micro-batch.
  uint64_t fp32_sum_bytes() const;
  // This rank's reduced gradients of a segment, valid between the last reduction and the next step's first.
  const char* owned(uint32_t unit, uint32_t segment) const { return memory_.owned(unit, segment); }
  strata_dtype owned_dtype(const Segment& s) const { return plan().owned(s); }
  const GradientPlan& plan() const { return memory_.plan(); }
  // Until all reductions so far have ended as sums and squares. Collective thread.
  Status wait_for_reductions() const;
  // The same for everything submitted so far. Host thread.
  Status flush() const;
  // Sum of squares over this rank's own slices, added in a fixed order. Collective thread, when all reductions are
  // done.
  double norm_partial() const;
  // The first inf or NaN in this rank's slices: the param it lies in. Update thread.
  Status find_nonfinite(std::string* param) const;

 private:
  enum class State { kIdle, kFilling, kReady };
  struct Pending {
    uint32_t param;
    const void* data;
    strata_dtype dtype;
  };
  struct Slot {
    State state = State::kIdle;
    std::vector<Pending> pending;  // contiguous_gradients = false
    // The stream that wrote into the buffer last, where there is one, and the end of what it wrote, once that is known.
    std::optional<strata_stream> writer;
    Marker written;
  };

  // Where one reduction of a segment puts this rank's slice, in which dtype, and where the sum over micro-batches is.
  struct Landing {
    uint32_t unit, segment;
    char *out, *sum;  // device memory
    strata_dtype dtype;
  };
  bool trainable(uint32_t unit) const { return layout_.units[unit].trainable_elements > 0; }
  // Nobody on this rank gave the unit a gradient, and it is reduced from zeros that lie ready.
  bool is_absent(uint32_t unit) { return !plan().local && buffers().zeros() && !buffers().is_open(unit); }
  GradientBuffers& buffers() { return memory_.buffers(); }
  Status borrow(const strata_stream* stream);
  Status find_room(const std::vector<Pending>& given, const strata_stream* stream);
  Status take_in(const std::vector<Pending>& given, const strata_stream* stream);
  Status close_unit(uint32_t unit);
  Status end_micro_batch();
  Status check(uint32_t param, const strata_tensor& grad) const;
  Slot& slot_of(const Pending& given) { return slots_[registry_.params[given.param].home]; }
  Status take_turn(Slot& slot, const strata_stream* stream);
  Status make_room(const std::vector<Pending>& given);
  Status fold(const std::vector<Pending>& given, const strata_stream* stream);
  Status fold_one(const Pending& given, const strata_stream* stream);
  Status launch_folds(const strata_stream* stream);
  char* sum_of(const Param& owner, strata_dtype* dtype) const;
  Status settle_writers();
  Status open_buffer(uint32_t unit);
  Status bound_waiting();
  void ask(bool drops);
  void begin_micro_batch();
  Status mark_ready(uint32_t unit);
  Status note_written(Slot& slot);
  Status advance();
  Status append(uint32_t unit);
  Status launch();
  Status complete(uint32_t unit);
  Status complete_segment(uint32_t unit, uint32_t segment);
  char* sent(uint32_t unit, uint32_t segment);
  Landing land(uint32_t unit, uint32_t segment, char** scratch);
  bool leaves_device(uint32_t unit) const { return memory_.places().leaves_device(unit); }
  const Segment& segment_of(const Landing& l) const { return layout_.units[l.unit].segments[l.segment]; }
  const Segment& segment_of(const Param& owner) const { return layout_.units[owner.home].segments[owner.segment]; }
  Status arrive(const Landing& landing, int micro, const strata_stream* stream);
  Status arrive_on_host(const Landing& landing, int micro, const strata_stream* stream);
  Status square(const Landing& landing, const strata_stream* stream);
  Status find_nonfinite_in(uint32_t unit, uint32_t segment, int64_t* index) const;

  const Registry& registry_;
  const Layout& layout_;
  const ZeroSettings& settings_;
  const Device& device_;
  CommQueue& queue_;
  const Weights& weights_;
  Counters& counters_;
  Trace& trace_;

  std::vector<Slot> slots_;  // by layout unit
  GradientMemory memory_;
  HostSums host_sums_;
  Stream completing_;                    // brings buffers into the state that is reduced
  std::map<uint32_t, Memory> sums_;      // fp32 sums of params with several gradients, by owner
  Marker sums_read_;                     // units completed before this point read their sums
  std::vector<uint32_t> contributions_;  // of this micro-batch (local: of this step), by owner
  std::vector<strata_fold_item> folds_;  // to be launched together
  std::vector<uint64_t> last_fold_;      // by owner: the launch it was in last
  uint64_t fold_launch_ = 1;
  std::vector<uint8_t> unit_closed_;  // registered units this rank is done with, this micro-batch
  std::vector<uint8_t> used_;         // registered units with a gradient this step
  std::vector<uint32_t> order_;       // canonical
  Work reduced_;                      // the last reduction
  std::vector<uint32_t> ready_order_, recorded_;
  std::vector<uint8_t> launched_;  // this micro-batch
  size_t next_ = 0;                // position in order_
  std::vector<uint32_t> bucket_;
  uint64_t bucket_elements_ = 0;
  uint64_t waiting_elements_ = 0;  // of units that are done and not sent
  bool may_overflow_ = false;      // there can be more of them than may wait
  bool asks_ = false;              // before each reduction, whether a rank drops instead
  bool dropped_ = false;           // one did. Collective thread
  int micro_ = 0;
  bool filling_ = false;
};

}  // namespace strata
