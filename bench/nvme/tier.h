// tier.h - offload_nvme opened by its ABI, with one region and memory to move it from and to, as the engine has both.
//
// Used by bench_nvme, bench_nvme_step and, through the C functions in tier.cc, by Python benches. Every failure ends
// the process with its text: a bench that cannot run has no figure.
#pragma once

#include <string>

#include "bench/nvme/limits.h"
#include "core/plugins/event.h"
#include "core/plugins/host.h"
#include "strata/iface/offload.h"

namespace strata::bench {

constexpr uint64_t kPipelined = uint64_t{1} << 30;

class Tier {
 public:
  // `paths` as in the manifest: "/a, /b". The region has `bytes`, whole kBytes, all of them written once: what lies
  // behind a disk may hold a small one in a cache.
  explicit Tier(const std::string& paths, int64_t probe_ms = 500, uint64_t bytes = kBytes);
  ~Tier();
  Tier(const Tier&) = delete;

  // kBytes, registered, in huge pages.
  char* memory() { return memory_; }
  // Each call moves the next bytes of the region, and from its start again behind its end.
  // `what`: "read", "write", or "mixed", half of either at once. Bytes per second over kBytes.
  double rate(const std::string& what);
  // The transfers of the engine's update at its defaults without the update: as large, as many under way, reads ahead
  // of the piece whose turn it is and writes behind it. Bytes per second over kPipelined read and as many written.
  double pipeline_rate();

 private:
  void move(const std::string& what);
  void transfer(bool write, uint64_t at, char* memory, uint64_t bytes, const Event& done);

  Host host_;
  const strata_offload_api* api_ = nullptr;
  strata_offload* self_ = nullptr;
  strata_region region_ = 0;
  const uint64_t bytes_;  // of the region
  uint64_t next_ = 0;     // where the next call begins
  char* memory_ = nullptr;
};

}  // namespace strata::bench
