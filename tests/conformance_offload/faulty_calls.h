// faulty_calls.h - the system calls of libs/io for a test: they work, until the test says otherwise.
//
// Linked into a test, it takes the place of libs/io/calls.cc and ring_calls.cc. Calls are known by the names of their
// tables; "completion" is what io_uring answers to a transfer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace strata::test {

class Faults {
 public:
  void clear();
  // The nth call of this name from now on fails with `error`; only that one, or all from then on.
  void fail(const std::string& call, int nth, int error, bool always = false);
  bool has_fired() const { return fired_; }
  // Calls of this name, no transfers, do not return before clear. `held`: those that have begun, since clear.
  void hold(const std::string& call);
  unsigned held() const { return held_; }
  std::map<std::string, int> counts() const;  // since clear

  std::atomic<bool> short_transfers{false};  // each moves about half
  std::atomic<int> interrupt_every{0};       // each nth transfer ends with EINTR or EAGAIN
  std::atomic<uint64_t> alignment{0};        // direct transfers at other multiples are EINVAL, statx knows nothing
  std::atomic<bool> hang_reads{false}, hang_writes{false};  // such transfers do not end before this is false again
  void hang(bool on) { hang_reads = hang_writes = on; }
  // Transfers that were in such a call since clear, those of them that have ended, and what of these found no memory.
  std::atomic<unsigned> hung{0}, late{0}, lost{0};
  bool have_ended() const { return late > 0 && late == hung; }

  std::atomic<uint64_t> direct_bytes{0};  // moved by pread and pwrite with O_DIRECT, since clear

  // Pieces submitted to io_uring, since clear: in registered memory, and others.
  std::atomic<unsigned> fixed{0}, plain{0};

  // For the tables: the errno of this call, 0 when it works. Returns late where it is held.
  int of(const char* call);
  // The same of a transfer, which may also be interrupted or hang: `was_hung`.
  int of_transfer(const char* call, bool write, bool* was_hung);
  // How much of a transfer happens.
  uint64_t shortened(uint64_t bytes) const;
  uint64_t unit() const { return std::max<uint64_t>(4096, alignment); }  // less never moves

 private:
  mutable std::mutex mutex_;
  std::map<std::string, int> counts_;
  std::string failing_, holding_;
  int nth_ = 0, error_ = 0;
  bool always_ = false;
  std::atomic<bool> fired_{false};
  std::atomic<unsigned> held_{0};
  std::atomic<unsigned> transfers_{0};
};

Faults& faults();

}  // namespace strata::test
