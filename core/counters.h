// counters.h - every byte moved, exactly, always on: strata_counters with atomic fields.
//
// Written by the host thread, the collective thread and the update thread; one relaxed add per transfer.
#pragma once

#include <atomic>
#include <cstdint>

#include "strata/strata.h"

namespace strata {

enum TierKind { kDeviceTier = 0, kCpuTier = 1, kNvmeTier = 2 };

struct Counters {
  std::atomic<uint64_t> gather_bytes{0}, gather_calls{0}, reduce_bytes{0}, reduce_calls{0}, agree_bytes{0};
  std::atomic<uint64_t> tier_read[3] = {}, tier_write[3] = {};
  std::atomic<uint64_t> grad_bytes{0}, updated_elements{0}, fetches{0}, prefetch_hits{0}, prefetch_dropped{0};

  strata_counters snapshot() const {
    strata_counters c{};
    c.struct_size = sizeof(c);
    c.gather_bytes = gather_bytes;
    c.gather_calls = gather_calls;
    c.reduce_bytes = reduce_bytes;
    c.reduce_calls = reduce_calls;
    c.agree_bytes = agree_bytes;
    for (int t = 0; t < 3; ++t) {
      c.tier_read[t] = tier_read[t];
      c.tier_write[t] = tier_write[t];
    }
    c.grad_bytes = grad_bytes;
    c.updated_elements = updated_elements;
    c.fetches = fetches;
    c.prefetch_hits = prefetch_hits;
    c.prefetch_dropped = prefetch_dropped;
    return c;
  }
};

// What was counted between two snapshots.
inline strata_counters minus(const strata_counters& now, const strata_counters& then) {
  strata_counters c = now;
  c.gather_bytes -= then.gather_bytes;
  c.gather_calls -= then.gather_calls;
  c.reduce_bytes -= then.reduce_bytes;
  c.reduce_calls -= then.reduce_calls;
  c.agree_bytes -= then.agree_bytes;
  for (int t = 0; t < 3; ++t) {
    c.tier_read[t] -= then.tier_read[t];
    c.tier_write[t] -= then.tier_write[t];
  }
  c.grad_bytes -= then.grad_bytes;
  c.updated_elements -= then.updated_elements;
  c.fetches -= then.fetches;
  c.prefetch_hits -= then.prefetch_hits;
  c.prefetch_dropped -= then.prefetch_dropped;
  return c;
}

inline void add(std::atomic<uint64_t>& counter, uint64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }

}  // namespace strata
