/* null.h - what the files of this plugin share: its tables, and the few lines every instance needs. */
#ifndef STRATA_PLUGIN_NULL_H
#define STRATA_PLUGIN_NULL_H

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "strata/host.h"

/* One table per interface, each in the file of its name. */
extern const struct strata_device_api null_device;
extern const struct strata_offload_api null_offload;
extern const struct strata_collective_api null_collective;
extern const struct strata_optimizer_api null_optimizer;
extern const struct strata_checkpoint_api null_checkpoint;

/* Gives the host the reason of a failure, printf style, and returns its code. */
__attribute__((format(printf, 3, 4))) static inline strata_status null_fail(const strata_host* host, strata_status code,
                                                                            const char* format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return host->fail(host->ctx, code, text);
}

/* Ends a call whose work is done: sets the event, if there is one. */
static inline strata_status null_done(const strata_host* host, strata_event* done) {
  if (done) {
    const strata_sync_api* sync = host->get_interface(host->ctx, STRATA_HOST_SYNC);
    sync->set(done, STRATA_OK, NULL);
  }
  return STRATA_OK;
}

/* At least `bytes` of memory at a multiple of `alignment` (a power of two), or NULL. */
static inline void* null_aligned(uint64_t bytes, size_t alignment) {
  if (bytes > PTRDIFF_MAX) return NULL;
  return aligned_alloc(alignment, (bytes + alignment - 1) & ~(alignment - 1)); /* C11: a multiple of the alignment */
}

#endif
