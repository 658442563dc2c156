// device_lane.h - the parts of a step whose update runs on a device with streams.
//
// In place where state and weights are on the device. State that lies in host memory is streamed through buffers: in,
// updated, and out again, each on a stream of its own, so that both ways of the bus and the device work at once.
// A copy engine stays with a stream that always has a next copy (seen on H200): new weights of the host lane, and those
// that a fetch brings, would wait for the end of all streaming. So one part is copied in at a time, and the next is
// enqueued when it is there. A thread of its own while a step has streamed parts, else the update thread.
#pragma once

#include <chrono>

#include "core/update/part_update.h"

namespace strata {

class DeviceLane {
 public:
  DeviceLane(const Layout& layout, const Device& device, const States& states, const Weights& weights,
             const PartUpdate& update, std::chrono::nanoseconds deadline, Trace& trace)
      : layout_(layout),
        device_(device),
        states_(states),
        weights_(weights),
        update_(update),
        deadline_(deadline),
        trace_(trace) {}
  ~DeviceLane();

  // Elements of a streamed part at the most.
  static constexpr uint64_t kStreamed = uint64_t{8} << 20;
  // `streams`: there will be streamed parts.
  uint64_t buffer_bytes(bool streams) const;
  Status allocate(bool streams);

  // Enqueues parts of the job that `update` has begun, in forward order, behind `start`.
  Status run(const std::vector<UpdatePart>& parts, const Marker& start, const UnitDoneFn& done);
  // Everything so far is done, in host memory, too: for `stream`, or (NULL) for the calling thread.
  Status before(const strata_stream* stream) const;
  // How long the streamed parts of the last run took, once it is done. 0 where there were none.
  Status seconds(double* out) const;

 private:
  static constexpr size_t kBuffers = 3;  // one being filled, one updated, one emptied
  struct Buffer {
    Memory memory;
    Marker free;
  };
  Status bring(const UpdatePart& part, Buffer& buffer, const char** grad);
  Status take_back(const UpdatePart& part, Buffer& buffer);
  // Where the unit's new weights are complete.
  const Stream& writer(uint32_t unit) const { return weights_.on_device(unit) ? updates_ : out_; }

  const Layout& layout_;
  const Device& device_;
  const States& states_;
  const Weights& weights_;
  const PartUpdate& update_;
  const std::chrono::nanoseconds deadline_;
  Trace& trace_;
  Stream in_, updates_, out_;
  Buffer buffers_[kBuffers];
  size_t next_ = 0;
  Marker brought_;                                        // the last part's state and gradient are in its buffer
  Marker done_;                                           // of the last run
  strata_marker *began_ = nullptr, *finished_ = nullptr;  // timed: its streamed parts
  bool timed_ = false;                                    // it had some
};

}  // namespace strata
