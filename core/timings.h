// timings.h - where the time of a step goes, for wall_clock_breakdown: nanoseconds per part, added by whichever thread
// does the part (Span in trace.h). Parts run beside each other, so they do not add up to the step.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>

namespace strata {

struct Timings {
  std::atomic<uint64_t> fetch_wait{0};  // host thread, in strata_fetch
  std::atomic<uint64_t> fold{0};        // host thread, in strata_grad and completing buckets
  std::atomic<uint64_t> gather{0};      // collective thread, waiting for updates and ranks included
  std::atomic<uint64_t> reduce{0};      // the same, with accumulation and norm partials
  std::atomic<uint64_t> agree{0};       // the same
  std::atomic<uint64_t> update{0};      // update thread, after the norm is known

  // One line with milliseconds per step over `steps` steps, and everything back to zero.
  std::string take(uint64_t steps) {
    std::string line;
    const auto part = [&](const char* name, std::atomic<uint64_t>& ns) {
      const double ms = static_cast<double>(ns.exchange(0)) / 1e6 / static_cast<double>(steps);
      char text[64];
      std::snprintf(text, sizeof(text), "%s%s %.3f ms", line.empty() ? "" : ", ", name, ms);
      line += text;
    };
    part("fetch wait", fetch_wait);
    part("fold", fold);
    part("gather", gather);
    part("reduce", reduce);
    part("agree", agree);
    part("update", update);
    return line;
  }
};

}  // namespace strata
