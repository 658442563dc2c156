// host_lane.h - the parts of a step whose update runs on the host: read i+1 while updating i while writing i-1.
//
// Nothing is read or written where state and weights are updated in place; new weights of a device are written from a
// buffer. Update thread.
#pragma once

#include <chrono>

#include "core/update/part_update.h"

namespace strata {

class HostLane {
 public:
  HostLane(const Layout& layout, const Device& device, const States& states, const Weights& weights,
           const PartUpdate& update, std::chrono::nanoseconds deadline, Counters& counters, Trace& trace)
      : layout_(layout),
        device_(device),
        states_(states),
        weights_(weights),
        update_(update),
        deadline_(deadline),
        counters_(counters),
        trace_(trace) {}

  // For parts of up to `elements`.
  uint64_t buffer_bytes(uint64_t elements) const;
  Status allocate(uint64_t elements);
  // New weights that are written to the device are so on this one.
  const Stream& stream() const { return stream_; }

  // Parts of the job that `update` has begun, in forward order.
  Status run(const std::vector<UpdatePart>& parts, const UnitDoneFn& done);

 private:
  // One being read, one updated, one written; new weights of small parts may queue behind what else is copied.
  static constexpr size_t kLeast = 3, kMost = 12;
  static constexpr uint64_t kBufferBytes = uint64_t{256} << 20;  // where they fit in that
  struct Buffer {
    Memory memory;
    std::vector<Work> reads, writes;
  };
  uint64_t largest_part(uint64_t elements) const;
  static uint64_t buffer_count(uint64_t largest);
  Status read(const UpdatePart& part, Buffer& buffer);
  Status update(const UpdatePart& part, Buffer& buffer);
  Status write(const UpdatePart& part, Buffer& buffer);
  Status end_unit(const UpdatePart& part, const UnitDoneFn& done);
  Status wait(std::vector<Work>& transfers) const;
  Status wait_for_readers(const UpdatePart& part) const;
  Status drain(Status status);

  const Layout& layout_;
  const Device& device_;
  const States& states_;
  const Weights& weights_;
  const PartUpdate& update_;
  const std::chrono::nanoseconds deadline_;
  Counters& counters_;
  Trace& trace_;
  Stream stream_;
  std::vector<Buffer> buffers_;
};

}  // namespace strata
