/* old_tier.c - a RAM tier as somebody wrote it for release 1.0 and never touched again.
 *
 * Compiled against tests/abi/frozen_1_0, not against abi/: that is the point. old_host.c runs a training step on it in
 * the present libstrata.so. It is not addressable, so every byte goes through read and write, and it uses what a
 * plugin of 1.0 can use: options, log, fail, and the host's events.
 *
 * Threads: alloc and free come one at a time; read and write touch only their own region. */
#include <stdlib.h>
#include <string.h>

#include "strata/iface/offload.h"
#include "strata/plugin.h"

typedef struct region {
  struct region* next;
  uint64_t bytes;
  char data[];
} region;

struct strata_offload {
  const strata_host* host;
  const strata_sync_api* sync;
  region* regions;
  uint64_t used;
  uint64_t budget;
};

static strata_status STRATA_CALL tier_open(const strata_open_args* args, strata_offload** out) {
  const strata_host* host = args->host;
  strata_offload* self = calloc(1, sizeof *self);
  if (!self) return host->fail(host->ctx, STRATA_RESOURCE_EXHAUSTED, "old_tier: out of memory");
  self->host = host;
  self->sync = host->get_interface(host->ctx, STRATA_HOST_SYNC);
  for (uint64_t k = 0; k < args->options->count; ++k) {
    const strata_option* o = (const void*)((const char*)args->options->items + k * args->options->stride);
    if (strcmp(o->key, "budget_bytes") == 0) self->budget = (uint64_t)o->i;
  }
  host->log(host->ctx, STRATA_LOG_INFO, "old_tier", "open");
  *out = self;
  return STRATA_OK;
}

static void STRATA_CALL tier_close(strata_offload* self) {
  while (self->regions) {
    region* r = self->regions;
    self->regions = r->next;
    free(r);
  }
  free(self);
}

static strata_status STRATA_CALL tier_caps(strata_offload* self, strata_offload_caps* out) {
  out->io_alignment = 1;
  out->max_inflight = 1;
  out->budget_bytes = self->budget;
  out->used_bytes = self->used;
  return STRATA_OK;
}

static strata_status STRATA_CALL tier_alloc(strata_offload* self, uint64_t bytes, const char* label,
                                            strata_region* out) {
  region* r = self->used + bytes <= self->budget ? calloc(1, sizeof *r + bytes) : NULL;
  if (!r) return self->host->fail(self->host->ctx, STRATA_RESOURCE_EXHAUSTED, label);
  r->bytes = bytes;
  r->next = self->regions;
  self->regions = r;
  self->used += bytes;
  *out = (strata_region)(uintptr_t)r;
  return STRATA_OK;
}

static void STRATA_CALL tier_free(strata_offload* self, strata_region id) {
  region** link = &self->regions;
  while (*link && (strata_region)(uintptr_t)*link != id) link = &(*link)->next;
  region* r = *link;
  if (!r) return;
  *link = r->next;
  self->used -= r->bytes;
  free(r);
}

static strata_status transfer(strata_offload* self, const strata_io_args* io, strata_event* done, int write) {
  region* r = (region*)(uintptr_t)io->region;
  if (io->offset > r->bytes || io->bytes > r->bytes - io->offset) {
    return self->host->fail(self->host->ctx, STRATA_OUT_OF_RANGE, "old_tier: outside the region");
  }
  if (io->bytes > 0 && write) memcpy(r->data + io->offset, io->buffer, io->bytes);
  if (io->bytes > 0 && !write) memcpy(io->buffer, r->data + io->offset, io->bytes);
  if (done) self->sync->set(done, STRATA_OK, NULL);
  return STRATA_OK;
}

static strata_status STRATA_CALL tier_read(strata_offload* self, const strata_io_args* args, strata_event* done) {
  return transfer(self, args, done, 0);
}

static strata_status STRATA_CALL tier_write(strata_offload* self, const strata_io_args* args, strata_event* done) {
  return transfer(self, args, done, 1);
}

static const strata_offload_api tier = {
    .struct_size = sizeof(strata_offload_api),
    .abi_minor = STRATA_ABI_MINOR,
    .open = tier_open,
    .close = tier_close,
    .caps = tier_caps,
    .alloc = tier_alloc,
    .free = tier_free,
    .read = tier_read,
    .write = tier_write,
};

static const void* STRATA_CALL get_interface(const char* id) { return strcmp(id, STRATA_OFFLOAD) == 0 ? &tier : NULL; }

static const strata_plugin descriptor = {
    .struct_size = sizeof(strata_plugin),
    .abi_minor = STRATA_ABI_MINOR,
    .id = "old_tier",
    .version = "1.0.0",
    .get_interface = get_interface,
};

const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t host_minor) {
  (void)host_minor;
  return &descriptor;
}
