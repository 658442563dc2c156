// parallel.h - a range of work cut at fixed places, on the rank's worker threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "strata/host.h"

namespace strata::plugin_kit {

// Calls fn(begin, n) for the parts of [0, total), each `part` long but the last; in one piece where there is one part
// or one thread. `executor` may be NULL. `fn` must not throw.
template <class Fn>
void for_parts(const strata_executor_api* executor, void* ctx, uint64_t total, uint64_t part, const Fn& fn) {
  if (total == 0) return;
  if (!executor || total <= part || executor->threads(ctx) <= 1) {
    fn(uint64_t{0}, total);
    return;
  }
  struct Job {
    const Fn& fn;
    uint64_t total, part;
  } job = {fn, total, part};
  executor->parallel_for(
      ctx, (total + part - 1) / part,
      [](void* arg, uint64_t i) {
        const Job& j = *static_cast<const Job*>(arg);
        j.fn(i * j.part, std::min(j.part, j.total - i * j.part));
      },
      &job);
}

}  // namespace strata::plugin_kit
