/* null_optimizer.c - strata.optimizer/1 that updates nothing: no state, and weights stay as they are.
 *
 * The weight itself is what a checkpoint gets as "master": export widens it to fp32, import rounds it back, to nearest
 * with ties away from zero, as the header asks of every optimizer.
 *
 * Threads: an instance is constant after open, so anything may run at once. */
#include <fenv.h>
#include <stdlib.h>
#include <string.h>

#include "null.h"
#include "null_numbers.h"
#include "strata/iface/optimizer.h"

struct strata_optim {
  const strata_host* host;
};

static strata_status STRATA_CALL optim_open(const strata_open_args* args, strata_optim** out) {
  strata_optim* self = calloc(1, sizeof *self);
  if (!self) return null_fail(args->host, STRATA_RESOURCE_EXHAUSTED, "null optimizer: out of memory");
  self->host = args->host;
  *out = self;
  return STRATA_OK;
}

static void STRATA_CALL optim_close(strata_optim* self) { free(self); }

static strata_status STRATA_CALL optim_layout(strata_optim* self, strata_dtype weight_dtype, strata_optim_layout* out) {
  if (!is_float(weight_dtype)) {
    return null_fail(self->host, STRATA_UNIMPLEMENTED, "null optimizer: weights of dtype %d", (int)weight_dtype);
  }
  out->flags = STRATA_OPTIM_WEIGHT_IS_STATE;
  out->array_count = 0;
  out->canonical_count = 1;
  out->canonical[0] = "master";
  return STRATA_OK;
}

static strata_status STRATA_CALL optim_scalars(strata_optim* self, const strata_optim_group* group, uint64_t step,
                                               float* out) {
  (void)self, (void)group, (void)step;
  memset(out, 0, STRATA_OPTIM_SCALARS * sizeof *out);
  return STRATA_OK;
}

static strata_status STRATA_CALL optim_step(strata_optim* self, const strata_optim_args* args, strata_event* done) {
  (void)args;
  return null_done(self->host, done);
}

/* Moves elements [offset, offset + length) of the weight to `out` or, when that is NULL, from `in`. */
static strata_status move_master(strata_optim* self, const strata_optim_args* args, uint32_t index, float* out,
                                 const float* in) {
  if (index != 0 || args->span_count == 0 || !is_float(args->weight_dtype)) {
    return null_fail(
        self->host, STRATA_INVALID_ARGUMENT,
        "null optimizer: canonical array %u of %llu spans and weight dtype %d; only array 0 (master) exists",
        (unsigned)index, (unsigned long long)args->span_count, (int)args->weight_dtype);
  }
  const uint64_t offset = args->spans[0].offset, length = args->spans[0].length;
  fenv_t environment;
  fegetenv(&environment);
  fesetenv(FE_DFL_ENV);
  for (uint64_t i = 0; i < length; ++i) {
    if (out) {
      out[i] = load(args->weight, args->weight_dtype, offset + i);
    } else {
      store(args->weight, args->weight_dtype, offset + i, in[i], STRATA_ROUND_AWAY);
    }
  }
  fesetenv(&environment);
  return STRATA_OK;
}

static strata_status STRATA_CALL optim_export(strata_optim* self, const strata_optim_args* args, uint32_t index,
                                              float* out) {
  return move_master(self, args, index, out, NULL);
}

static strata_status STRATA_CALL optim_import(strata_optim* self, const strata_optim_args* args, uint32_t index,
                                              const float* in) {
  return move_master(self, args, index, NULL, in);
}

const strata_optimizer_api null_optimizer = {
    .struct_size = sizeof(strata_optimizer_api),
    .abi_minor = STRATA_ABI_MINOR,
    .open = optim_open,
    .close = optim_close,
    .layout = optim_layout,
    .scalars = optim_scalars,
    .step = optim_step,
    .export_array = optim_export,
    .import_array = optim_import,
};
