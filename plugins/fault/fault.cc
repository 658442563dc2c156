// fault.cc - a plugin that stands before another: it passes calls on, and fails, delays, cuts short or holds those that
// its rules name. It also counts calls and bytes, as an independent witness of the core's own counters.
//
// Read in this order: rules.h (what can be asked), shim.h (what happens to a call), fault_offload.cc (a wrapper), then
// registry.h (gates and counters, which a test drives through strata/draft/fault_control.h).
#include <cstring>

#include "interfaces.h"
#include "strata/plugin.h"

namespace strata::fault {

const std::vector<const Interface*>& all_interfaces() {
  static const std::vector<const Interface*> all = {&kDevice, &kOffload, &kCollective, &kOptimizer, &kCheckpoint};
  return all;
}

namespace {

const void* STRATA_CALL get_interface(const char* id) {
  if (std::strcmp(id, STRATA_DEVICE) == 0) return device_table();
  if (std::strcmp(id, STRATA_OFFLOAD) == 0) return &offload_table;
  if (std::strcmp(id, STRATA_COLLECTIVE) == 0) return &collective_table;
  if (std::strcmp(id, STRATA_OPTIMIZER) == 0) return &optimizer_table;
  if (std::strcmp(id, STRATA_CHECKPOINT) == 0) return &checkpoint_table;
  if (std::strcmp(id, STRATA_FAULT_CONTROL) == 0) return &control_table;
  return nullptr;
}

}  // namespace
}  // namespace strata::fault

const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) {
  static const strata_plugin descriptor = {sizeof(descriptor), STRATA_ABI_MINOR, "fault", "0.1.0",
                                           strata::fault::get_interface};
  return &descriptor;
}
