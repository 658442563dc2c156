// interfaces.h - the wrapped interfaces: one description and one table each, in the file of its name.
// A new interface is a new file, two lines here, and its line in fault.cc.
#pragma once

#include "plugin_kit/dtypes.h"
#include "shim.h"
#include "strata/iface/checkpoint.h"
#include "strata/iface/collective.h"
#include "strata/iface/device.h"
#include "strata/iface/offload.h"
#include "strata/iface/optimizer.h"

namespace strata::fault {

extern const Interface kDevice, kOffload, kCollective, kOptimizer, kCheckpoint;

const strata_device_api* device_table();
extern const strata_offload_api offload_table;
extern const strata_collective_api collective_table;
extern const strata_optimizer_api optimizer_table;
extern const strata_checkpoint_api checkpoint_table;

}  // namespace strata::fault
