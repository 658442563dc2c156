// interfaces.h - the tables of this plugin, one file each.
#pragma once

#include "gpu_sim_control.h"
#include "strata/iface/collective.h"
#include "strata/iface/optimizer.h"

namespace gpu_sim {

extern const strata_device_api device_table;
extern const strata_collective_api collective_table;
extern const strata_optimizer_api optimizer_table;
extern const strata_gpu_sim_control_api control_table;

}  // namespace gpu_sim
