/* null_offload.c - strata.offload/1 that keeps nothing: writes are dropped, reads give zeros.
 *
 * It remembers the size and label of each region, because ranges have to be checked and bytes have to be counted. It
 * is not addressable: there is no memory to point at, and the host's default for `map` says so.
 *
 * Threads: alloc and free come from one caller at a time; caps, read and write may run beside them, so a mutex guards
 * the list. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "null.h"
#include "strata/iface/offload.h"

typedef struct region {
  struct region* next;
  strata_region id;
  uint64_t bytes;
  char label[64];
} region;

struct strata_offload {
  const strata_host* host;
  pthread_mutex_t mutex;
  region* regions;
  strata_region last_id;
  uint64_t used;
};

static strata_status STRATA_CALL offload_open(const strata_open_args* args, strata_offload** out) {
  strata_offload* self = calloc(1, sizeof *self);
  if (!self) return null_fail(args->host, STRATA_RESOURCE_EXHAUSTED, "null offload: out of memory");
  self->host = args->host;
  pthread_mutex_init(&self->mutex, NULL);
  *out = self;
  return STRATA_OK;
}

static void STRATA_CALL offload_close(strata_offload* self) {
  for (region* r = self->regions; r;) {
    region* next = r->next;
    free(r);
    r = next;
  }
  pthread_mutex_destroy(&self->mutex);
  free(self);
}

static strata_status STRATA_CALL offload_caps(strata_offload* self, strata_offload_caps* out) {
  out->flags = 0;
  out->io_alignment = 1;
  out->max_inflight = UINT32_MAX;
  out->budget_bytes = UINT64_MAX;
  pthread_mutex_lock(&self->mutex);
  out->used_bytes = self->used;
  pthread_mutex_unlock(&self->mutex);
  out->pinned_bytes = 0;
  return STRATA_OK;
}

static strata_status STRATA_CALL offload_alloc(strata_offload* self, uint64_t bytes, const char* label,
                                               strata_region* out) {
  if (!label) label = "unnamed";
  if (bytes == 0) return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null offload alloc \"%s\": 0 bytes", label);
  if (bytes > UINT64_MAX - self->used) {
    return null_fail(self->host, STRATA_RESOURCE_EXHAUSTED,
                     "null offload alloc \"%s\": %llu bytes wanted, %llu used, no more than 2^64 - 1 can be counted",
                     label, (unsigned long long)bytes, (unsigned long long)self->used);
  }
  region* r = calloc(1, sizeof *r);
  if (!r) return null_fail(self->host, STRATA_RESOURCE_EXHAUSTED, "null offload alloc \"%s\": out of memory", label);
  snprintf(r->label, sizeof r->label, "%s", label);
  r->bytes = bytes;
  pthread_mutex_lock(&self->mutex);
  r->id = ++self->last_id;
  r->next = self->regions;
  self->regions = r;
  self->used += bytes;
  pthread_mutex_unlock(&self->mutex);
  *out = r->id;
  return STRATA_OK;
}

/* The link that points at region `id`, or at NULL. The mutex is held. */
static region** find(strata_offload* self, strata_region id) {
  region** link = &self->regions;
  while (*link && (*link)->id != id) link = &(*link)->next;
  return link;
}

static void STRATA_CALL offload_free(strata_offload* self, strata_region id) {
  pthread_mutex_lock(&self->mutex);
  region** link = find(self, id);
  region* found = *link;
  if (found) {
    *link = found->next;
    self->used -= found->bytes;
  }
  pthread_mutex_unlock(&self->mutex);
  if (!found) {
    self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "null",
                    "free of a region that is not allocated: ignored");
  }
  free(found);
}

static strata_status check(strata_offload* self, const char* what, const strata_io_args* io) {
  pthread_mutex_lock(&self->mutex);
  const region* found = *find(self, io->region);
  const region r = found ? *found : (region){.bytes = 0};
  pthread_mutex_unlock(&self->mutex);
  if (!found) {
    return null_fail(self->host, STRATA_NOT_FOUND, "null offload %s: no region %llu", what,
                     (unsigned long long)io->region);
  }
  if (io->offset > r.bytes || io->bytes > r.bytes - io->offset) {
    return null_fail(self->host, STRATA_OUT_OF_RANGE,
                     "null offload %s \"%s\": %llu bytes at offset %llu of a region of %llu bytes", what, r.label,
                     (unsigned long long)io->bytes, (unsigned long long)io->offset, (unsigned long long)r.bytes);
  }
  if (io->bytes > 0 && !io->buffer) {
    return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null offload %s \"%s\": a NULL buffer", what, r.label);
  }
  return STRATA_OK;
}

static strata_status STRATA_CALL offload_read(strata_offload* self, const strata_io_args* args, strata_event* done) {
  strata_status code = check(self, "read", args);
  if (code != STRATA_OK) return code;
  if (args->bytes > 0) memset(args->buffer, 0, args->bytes);
  return null_done(self->host, done);
}

static strata_status STRATA_CALL offload_write(strata_offload* self, const strata_io_args* args, strata_event* done) {
  strata_status code = check(self, "write", args);
  return code == STRATA_OK ? null_done(self->host, done) : code;
}

const strata_offload_api null_offload = {
    .struct_size = sizeof(strata_offload_api),
    .abi_minor = STRATA_ABI_MINOR,
    .open = offload_open,
    .close = offload_close,
    .caps = offload_caps,
    .alloc = offload_alloc,
    .free = offload_free,
    .read = offload_read,
    .write = offload_write,
};
