/* SPDX-License-Identifier: MIT
 *
 * strata/plugin.h - the one symbol a plugin exports.
 *
 * The core reads the plugin's TOML, checks the ELF file, maps it with RTLD_NOW | RTLD_LOCAL, calls the entry and
 * never unmaps it. The entry is pure: no threads, files, network or CUDA, at most a few milliseconds.
 */
#ifndef STRATA_PLUGIN_H
#define STRATA_PLUGIN_H

#include "strata/host.h"

STRATA_EXTERN_C_BEGIN

typedef struct strata_plugin {
  uint32_t struct_size;
  uint32_t abi_minor;  /* the minor this plugin was written for; a host of the same major must serve it */
  const char *id;      /* the name manifests use: "offload_cpu" */
  const char *version; /* semantic version of the plugin */
  /* The table for an interface id ("strata.offload/1"), or NULL. Legal from the entry on. [any] [static] */
  const void *(STRATA_CALL *get_interface)(const char *id);
} strata_plugin;

#define STRATA_PLUGIN_ENTRY "strata_plugin_entry_v1" /* [any] */
typedef const strata_plugin *(STRATA_CALL *strata_plugin_entry_fn)(uint32_t host_minor);

/* Defined by every plugin. Returns a static descriptor, or NULL for a host of this minor. [any] */
STRATA_EXPORT const strata_plugin *STRATA_CALL strata_plugin_entry_v1(uint32_t host_minor);

STRATA_EXTERN_C_END
#endif
