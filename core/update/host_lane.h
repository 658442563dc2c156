// host_lane.h - the parts of a step whose update runs on the host: reads of later parts, the update of one and writes
// of those before it go on at once.
//
// Nothing is read or written where state and weights are updated in place; new weights of a device are written from a
// buffer. A part takes the next of the buffers in turn, so reads and writes under way are bounded by their number.
// Update thread.
#pragma once

#include <chrono>
#include <deque>

#include "core/update/part_update.h"

namespace strata {

class HostLane {
 public:
  // How what is not updated in place passes through memory. `ahead`: parts that are read before their turn.
  struct Buffers {
    uint64_t part;   // elements of a part at the most
    uint64_t count;  // 0: as many as fit into kBufferBytes
    uint64_t ahead;
    uint64_t asked;             // for parts on disk: buffer_size; 0: there are none
    bool is_given;              // it is not the default
    std::string why;            // `part` is not what was asked for
    bool writes_behind = true;  // else the next part waits for them
  };
  HostLane(const Layout& layout, const Device& device, const States& states, const Weights& weights,
           const PartUpdate& update, const Buffers& shape, std::chrono::nanoseconds deadline, Counters& counters,
           Trace& trace)
      : layout_(layout),
        device_(device),
        states_(states),
        weights_(weights),
        update_(update),
        shape_(shape),
        deadline_(deadline),
        counters_(counters),
        trace_(trace) {}

  uint64_t buffer_bytes() const;
  std::string buffer_note() const;  // of those between disk and update
  Status allocate();
  // New weights that are written to the device are so on this one.
  const Stream& stream() const { return stream_; }

  // Parts of the job that `update` has begun, in forward order.
  Status run(const std::vector<UpdatePart>& parts, const UnitDoneFn& done);

 private:
  // One being read, one updated, one written; new weights of small parts may queue behind what else is copied.
  static constexpr size_t kLeast = 3, kMost = 12;
  static constexpr uint64_t kBufferBytes = uint64_t{256} << 20;
  struct Buffer : TransferBuffer {
    std::vector<Work> reads, writes;
  };
  // A unit that is updated but for weights on their way to a tier.
  struct Ending {
    size_t position;
    std::vector<Work> writes;
  };
  // The parts of a run that pass through a buffer, and how many of them were begun.
  struct Passing {
    std::vector<const UpdatePart*> parts;
    size_t next = 0;
  };
  bool passes(const UpdatePart& part) const { return states_.buffer_bytes(part.piece) > 0; }
  Buffer& buffer(size_t turn) { return buffers_[turn % buffers_.size()]; }
  uint64_t buffer_count(uint64_t largest) const;
  Status read_ahead(Passing& passing, size_t turn);
  Status read(const UpdatePart& part, Buffer& buffer);
  Status update(const UpdatePart& part, char* buffer);
  Status write(const UpdatePart& part, Buffer& buffer);
  Status end_unit(const UpdatePart& part, const UnitDoneFn& done);
  Status finish(const UnitDoneFn& done, bool to_the_end);
  // `buffer`: theirs; NULL: they are waited for there, too.
  Status wait(std::vector<Work>& transfers, TransferBuffer* buffer) const;
  Status wait_for_readers(const UpdatePart& part) const;
  Status drain(Status status);

  const Layout& layout_;
  const Device& device_;
  const States& states_;
  const Weights& weights_;
  const PartUpdate& update_;
  const Buffers shape_;
  const std::chrono::nanoseconds deadline_;
  Counters& counters_;
  Trace& trace_;
  Stream stream_;
  std::vector<Buffer> buffers_;
  std::vector<Work> weight_writes_;  // of the unit that is being updated
  std::deque<Ending> endings_;
};

}  // namespace strata
