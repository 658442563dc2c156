/* null_checkpoint.c - strata.checkpoint/1 that saves nothing: a save succeeds and leaves no trace, so there is never a
 * checkpoint to load.
 *
 * Threads: an instance is constant after open; saves are independent of each other. */
#include <stdlib.h>

#include "null.h"
#include "strata/iface/checkpoint.h"

struct strata_ckpt {
  const strata_host* host;
};

struct strata_ckpt_save {
  char nothing;
};

static strata_status STRATA_CALL ckpt_open(const strata_open_args* args, strata_ckpt** out) {
  strata_ckpt* self = calloc(1, sizeof *self);
  if (!self) return null_fail(args->host, STRATA_RESOURCE_EXHAUSTED, "null checkpoint: out of memory");
  self->host = args->host;
  *out = self;
  return STRATA_OK;
}

static void STRATA_CALL ckpt_close(strata_ckpt* self) { free(self); }

static strata_status new_save(strata_ckpt* self, strata_ckpt_save** out) {
  *out = calloc(1, sizeof **out);
  return *out ? STRATA_OK : null_fail(self->host, STRATA_RESOURCE_EXHAUSTED, "null checkpoint: out of memory");
}

static strata_status STRATA_CALL ckpt_write(strata_ckpt* self, const strata_ckpt_save_args* args,
                                            strata_ckpt_save** out) {
  (void)args;
  return new_save(self, out);
}

static strata_status STRATA_CALL ckpt_commit(strata_ckpt* self, strata_ckpt_save* save) {
  (void)self;
  free(save);
  return STRATA_OK;
}

static void STRATA_CALL ckpt_abandon(strata_ckpt* self, strata_ckpt_save* save) {
  (void)self;
  free(save);
}

static strata_status STRATA_CALL ckpt_load_open(strata_ckpt* self, const char* root, const char* tag,
                                                strata_ckpt_load** out) {
  (void)out;
  return null_fail(self->host, STRATA_NOT_FOUND, "null checkpoint: nothing is ever saved, so not \"%s\" in \"%s\"",
                   tag ? tag : "latest", root ? root : "");
}

/* load_open never succeeds, so nobody holds a handle for these three. */
static strata_status STRATA_CALL ckpt_load_info(strata_ckpt_load* load, strata_ckpt_info* out) {
  (void)load, (void)out;
  return STRATA_NOT_FOUND;
}

static strata_status STRATA_CALL ckpt_load_read(strata_ckpt_load* load, uint64_t param, const char* array,
                                                uint64_t offset, uint64_t count, void* dst) {
  (void)load, (void)param, (void)array, (void)offset, (void)count, (void)dst;
  return STRATA_NOT_FOUND;
}

static void STRATA_CALL ckpt_load_close(strata_ckpt_load* load) { (void)load; }

static strata_status STRATA_CALL ckpt_export_weights(strata_ckpt* self, const strata_ckpt_save_args* args,
                                                     uint32_t phase, strata_ckpt_save** inout) {
  (void)args, (void)phase;
  return *inout ? STRATA_OK : new_save(self, inout); /* a later phase goes on with the first one's */
}

static strata_status STRATA_CALL ckpt_may_replace(strata_ckpt* self, const char* root, const char* tag) {
  (void)self, (void)root, (void)tag;
  return STRATA_OK; /* it leaves nothing that could be in the way */
}

const strata_checkpoint_api null_checkpoint = {
    .struct_size = sizeof(strata_checkpoint_api),
    .abi_minor = STRATA_ABI_MINOR,
    .open = ckpt_open,
    .close = ckpt_close,
    .write = ckpt_write,
    .commit = ckpt_commit,
    .abandon = ckpt_abandon,
    .load_open = ckpt_load_open,
    .load_info = ckpt_load_info,
    .load_read = ckpt_load_read,
    .load_close = ckpt_load_close,
    .export_weights = ckpt_export_weights,
    .may_replace = ckpt_may_replace,
};
