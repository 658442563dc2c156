// host_sums.h - fp32 sums over micro-batches that lie in host memory alone, beside a device that reduces gradients.
//
// What a micro-batch's reduction brought is copied, in pieces, into a ring of page-locked memory; a thread of its own
// waits for each copy and puts it into the sum: the first micro-batch is widened, the others are added, and with the
// last one each block of the sum is squared for the norm, while it is in the caches. That is the device's arithmetic in
// the device's order, so where a sum lies changes no bit. Pieces are taken in in the order of their reductions.
//
// The ring is bounded: where the sums are that far behind, the collective thread waits. A failure ends everything that
// comes after it, and is found by the collective thread, which tells the engine and the other ranks.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "core/layout.h"
#include "core/plan.h"
#include "core/stream.h"

namespace strata {

class HostSums {
 public:
  // `host`: a device of host memory, open if there are such sums. The thread is bound to `cpus`.
  HostSums(const Layout& layout, const Device& device, const Device& host, Trace& trace, const std::vector<int>& cpus)
      : layout_(layout), device_(device), host_(host), trace_(trace), cpus_(cpus) {}
  // Copies under way are done by then; what was not added yet is not.
  ~HostSums();

  // `sizes`: bytes that each reduction of a micro-batch brings.
  static void add_to(Plan* plan, const std::vector<uint64_t>& sizes);
  Status allocate(const std::vector<uint64_t>& sizes);

  struct Addend {
    uint32_t unit;
    const char* from;  // device memory, which may be written to behind the copy
    strata_dtype dtype;
    uint64_t count;  // a multiple of kShardElements
    float* sum;
    bool is_first;
    double* squares;  // of each norm block of the sum; NULL: there is more to come
  };
  // Copies on `stream`. `patience` bounds the wait for room in the ring. Collective thread.
  Status add(const Addend& all, const strata_stream* stream, std::chrono::nanoseconds patience);
  // Until all sums are what was added. Collective thread, or while it has nothing to do; `row`: the caller's.
  Status wait(TraceRow& row, std::chrono::nanoseconds patience) const;

 private:
  // 160 MiB in all: what a few layers bring, which the collective thread may be ahead of the device. Pieces that come
  // together are added together: waking the workers for each costs a tenth of the time.
  static constexpr uint64_t kSlots = 40, kSlotBytes = 4 << 20, kTogether = 8;
  struct Ring {
    uint64_t slots = 0, slot_bytes = 0;
    uint64_t bytes() const { return slots * slot_bytes; }
  };
  static Ring ring_for(const std::vector<uint64_t>& sizes);
  struct Piece {
    Addend addend;  // from: in the ring
    Marker copied;
    Work done;
    uint64_t step;  // in the trace
  };
  Status add_piece(Addend piece, const strata_stream* stream, std::chrono::nanoseconds patience);
  void work();
  std::vector<Piece> next_pieces();
  Status take_in(const std::vector<Piece>& pieces);

  const Layout& layout_;
  const Device& device_;
  const Device& host_;
  Trace& trace_;
  const std::vector<int> cpus_;
  Ring ring_;
  Memory memory_;
  std::vector<Work> slots_;  // the end of each slot's last piece
  uint64_t next_ = 0;
  Work last_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Piece> pieces_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace strata
