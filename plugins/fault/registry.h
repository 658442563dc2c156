// registry.h - what all fault instances of the process share: gates by name, counters by tag, rank and slot.
//
// The one exception to "no mutable globals", and on purpose: a test drives instances that the core opened and that it
// has no handle of. One mutex guards all; counters and gates are never removed, so references to them stay good.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "strata/draft/fault_control.h"

namespace strata::fault {

struct Counter {
  std::atomic<uint64_t> calls{0}, bytes{0};
};

enum class Waited { kPassed, kTimedOut, kCancelled };

class Registry {
 public:
  static Registry& instance();

  void set_gate(const std::string& name, bool open);
  uint64_t waiting(const std::string& name);
  // Waits until the gate is open, at most until `until`; `cancelled` ends the wait (see wake).
  Waited wait_gate(const std::string& name, std::chrono::steady_clock::time_point until,
                   const std::atomic<bool>& cancelled);
  // Waits until `until`, or until cancelled.
  Waited pause(std::chrono::steady_clock::time_point until, const std::atomic<bool>& cancelled);
  // Makes every wait look at its `cancelled` again.
  void wake();

  Counter& counter(const std::string& tag, int32_t rank, const std::string& interface, const std::string& op);
  // Sum over all counters that match; rank -1 and a bare op match any rank and any interface.
  uint64_t sum(const std::string& tag, int32_t rank, const std::string& op, std::atomic<uint64_t> Counter::*which);

 private:
  struct Gate {
    bool open = false;
    uint64_t waiting = 0;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Gate> gates_;
  std::map<std::tuple<std::string, int32_t, std::string, std::string>, Counter> counters_;
};

// strata.fault.control/1
extern const strata_fault_control_api control_table;

}  // namespace strata::fault
