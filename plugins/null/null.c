/* null.c - the one symbol a plugin exports, and the list of what it provides.
 *
 * The entry is pure: it starts nothing and returns constants. Instances are opened through the tables. */
#include "null.h"

#include <string.h>

#include "strata/iface/checkpoint.h"
#include "strata/iface/collective.h"
#include "strata/iface/device.h"
#include "strata/iface/offload.h"
#include "strata/iface/optimizer.h"
#include "strata/plugin.h"

static const void* STRATA_CALL get_interface(const char* id) {
  if (strcmp(id, STRATA_DEVICE) == 0) return &null_device;
  if (strcmp(id, STRATA_OFFLOAD) == 0) return &null_offload;
  if (strcmp(id, STRATA_COLLECTIVE) == 0) return &null_collective;
  if (strcmp(id, STRATA_OPTIMIZER) == 0) return &null_optimizer;
  if (strcmp(id, STRATA_CHECKPOINT) == 0) return &null_checkpoint;
  return NULL;
}

static const strata_plugin descriptor = {
    .struct_size = sizeof(strata_plugin),
    .abi_minor = STRATA_ABI_MINOR,
    .id = "null",
    .version = "0.1.0",
    .get_interface = get_interface,
};

const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t host_minor) {
  (void)host_minor; /* this plugin needs nothing that is newer than minor 0 */
  return &descriptor;
}
