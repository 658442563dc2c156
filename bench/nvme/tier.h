// tier.h - offload_nvme opened by its ABI, with one region and memory to move it from and to, as the engine has both.
//
// Used by bench_nvme and, through the C functions in tier.cc, by vs_aio.py and two_paths.py. Every failure ends the
// process with its text: a bench that cannot run has no figure.
#pragma once

#include <string>

#include "bench/nvme/limits.h"
#include "core/plugins/host.h"
#include "strata/iface/offload.h"

namespace strata::bench {

class Tier {
 public:
  // `paths` as in the manifest: "/a, /b". The region has kBytes, all of them written once.
  explicit Tier(const std::string& paths, int64_t probe_ms = 500);
  ~Tier();
  Tier(const Tier&) = delete;

  // kBytes, registered, in huge pages.
  char* memory() { return memory_; }
  // `what`: "read", "write", or "mixed", half of either at once. Bytes per second over kBytes.
  double rate(const std::string& what);

 private:
  void move(const std::string& what);

  Host host_;
  const strata_offload_api* api_ = nullptr;
  strata_offload* self_ = nullptr;
  strata_region region_ = 0;
  char* memory_ = nullptr;
};

}  // namespace strata::bench
