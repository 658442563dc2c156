// lender.h - device memory out of the host's own allocator, borrowed from a step's first gradient until the host's
// stream has waited for what it is used for: a framework uses it for its activations in between. That is the whole
// update, or, where micro-batches leave nothing there, the reductions of each of them.
//
// Host thread. On the stream the loan was made on, what the engine does with the memory comes behind what the framework
// enqueued before, and whatever the framework enqueues after the memory went back comes behind the engine's use.
#pragma once

#include <vector>

#include "core/stream.h"
#include "strata/strata.h"

namespace strata {

class Lender {
 public:
  // `host` NULL: nothing is lent.
  Lender(const Device& device, const strata_lender* host) : device_(device), host_(host) {}
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;
  // Everything enqueued is done by then.
  ~Lender() { give_back(nullptr); }
  explicit operator bool() const { return host_ != nullptr; }
  bool is_holding() const { return holding_; }

  // One block per entry of `bytes`, NULL for 0.
  Status borrow(const std::vector<uint64_t>& bytes, const strata_stream* stream, std::vector<char*>* blocks);
  // The blocks are in order now: later work anywhere may follow this point.
  Status begin(const strata_stream* stream) { return Marker::at_end_of(device_, stream, &begun_); }
  // Work on `stream` comes behind that point.
  Status before(const strata_stream* stream) const;

  // The loan ends when its stream has waited for the update of all `units`, and then for `used`, if that is given.
  void until_fetched(const std::vector<uint32_t>& units, Work used = {});
  // There are new gradients: it does not end now.
  void keep() { awaited_.clear(); }
  // `stream` waits for the update of `unit`. `*ended`: so did the loan. `patience` bounds the wait for the host part of
  // `used`.
  Status note_fetch(uint32_t unit, const strata_stream* stream, std::chrono::nanoseconds patience, bool* ended);

 private:
  void* lend(uint64_t bytes, const strata_stream* stream);
  void give_back(const strata_stream* stream);
  bool is_loan_stream(const strata_stream* stream) const {
    return stream && stream_.domain == stream->domain && stream_.native == stream->native;
  }

  const Device& device_;
  const strata_lender* host_;
  bool holding_ = false;
  std::vector<char*> blocks_;
  strata_stream stream_{};  // of the loan; domain 0: none
  Marker begun_;
  std::vector<uint32_t> awaited_;  // units whose update the stream has not waited for
  Work used_;
};

}  // namespace strata
