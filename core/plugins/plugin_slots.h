// plugin_slots.h - which slots of each interface a plugin must fill, and what stands in for the others.
//
// One table by interface id (plugin_slots.cc); to add an interface, add its rows. `complete_table` copies a plugin's
// table into one of exactly the length known here: required slots are checked, optional ones get their default, and a
// tail from a newer header is left behind. What comes out can be called without a test for NULL.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/status.h"

namespace strata {

// An interface table, completed. Aligned for pointers; the first 8 bytes are struct_size and abi_minor.
using CompletedTable = std::unique_ptr<std::max_align_t[]>;

// True when the core has rows for this interface. Others (between two plugins) pass through unchecked.
bool is_known_interface(const std::string& id);

// `plugin` names it in errors. FAILED_PRECONDITION: shorter than the interface ever was, or a required slot is NULL:
// 'plugin x: strata.offload/1 slot "read" is missing'.
Status complete_table(const std::string& plugin, const std::string& interface_id, const void* table,
                      CompletedTable* out);

// What the core's own interfaces towards plugins are: strata.host.sync/1 and the like.
const std::vector<std::string>& host_interface_ids();

}  // namespace strata
