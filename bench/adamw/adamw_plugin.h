// adamw_plugin.h - optim_adamw opened by its ABI, with the core's own host services and worker threads around it.
//
// Used by bench_adamw and, through the C functions at the end, by vs_deepspeed.py. Every failure ends the process with
// its text: a bench that cannot run has no figure.
#pragma once

#include <string>

#include "core/plugins/host.h"
#include "strata/iface/optimizer.h"

namespace strata::bench {

struct AdamwJob {
  strata_dtype grad_dtype, weight_dtype;
  const void* grad;
  void* weight;
  void* state[3];  // in the order of the plugin's layout
  uint64_t count;
};

class AdamwPlugin {
 public:
  // `layout` and `isa` are the plugin's options of these names.
  AdamwPlugin(const std::string& library, const std::string& layout, const std::string& isa, unsigned threads);
  ~AdamwPlugin();
  AdamwPlugin(const AdamwPlugin&) = delete;

  void step(const AdamwJob& job, const strata_optim_group& group, uint64_t step, float grad_scale);
  Executor& executor() { return host_.executor(); }

 private:
  Host host_;
  const strata_optimizer_api* api_;
  strata_optim* self_ = nullptr;
};

}  // namespace strata::bench
