// gpu_sim.cc - a plugin that behaves like a GPU with NCCL, made of threads: the core's handling of streams is proven
// with it on machines without a GPU.
//
// Reading order: memory (addresses the host cannot read), stream (queues with a thread), gpu (both, and what fails),
// device (strata.device/1), wrapped_comm and collective (strata.collective/1 over another collective),
// optimizer (strata.optimizer/1 over optim_adamw).
#include <cstring>

#include "interfaces.h"
#include "strata/plugin.h"

static const void* STRATA_CALL get_interface(const char* id) {
  if (std::strcmp(id, STRATA_DEVICE) == 0) return &gpu_sim::device_table;
  if (std::strcmp(id, STRATA_COLLECTIVE) == 0) return &gpu_sim::collective_table;
  if (std::strcmp(id, STRATA_OPTIMIZER) == 0) return &gpu_sim::optimizer_table;
  if (std::strcmp(id, STRATA_GPU_SIM_CONTROL) == 0) return &gpu_sim::control_table;
  return nullptr;
}

static const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "gpu_sim", "0.1.0", get_interface};

extern "C" STRATA_EXPORT const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }
