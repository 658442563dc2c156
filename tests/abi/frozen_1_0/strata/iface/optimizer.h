/* SPDX-License-Identifier: MIT
 *
 * strata.optimizer/1 - the update of a slice of parameters.
 *
 * The optimizer declares what it keeps per element (named arrays); the core stores those bytes in whatever tier the
 * manifest names and hands them back, slice by slice. One `step` call is one pass over one slice: gradient in,
 * state updated, new weight out. All scalars are computed on the host in fp64, once, by `scalars`, and rounded
 * once to fp32: that is what makes every placement give the same bits.
 */
#ifndef STRATA_IFACE_OPTIMIZER_H
#define STRATA_IFACE_OPTIMIZER_H

#include "strata/host.h"

STRATA_EXTERN_C_BEGIN

#define STRATA_OPTIMIZER "strata.optimizer/1"
#define STRATA_OPTIM_MAX_ARRAYS 8u
#define STRATA_OPTIM_SCALARS 16u /* fp32 scalars per set */

typedef struct strata_optim strata_optim;

enum { STRATA_OPTIM_WEIGHT_IS_STATE = 1u }; /* step and export read `weight` as well as write it */

/* One array of state; bytes_per_element 0 does not occur. */
typedef struct strata_optim_array {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char *name; /* [static] "master", "master_low", "exp_avg", "exp_avg_sq" */
  strata_dtype dtype;
  uint32_t bytes_per_element;
} strata_optim_array;

typedef struct strata_optim_layout {
  uint32_t struct_size;
  uint32_t abi_minor;
  uint32_t flags;
  uint32_t array_count;                                /* at most STRATA_OPTIM_MAX_ARRAYS */
  strata_optim_array arrays[STRATA_OPTIM_MAX_ARRAYS];  /* frozen element layout: grows only with a new interface */
  uint32_t canonical_count;                            /* names for export_array / import_array, all F32 */
  uint32_t reserved;
  const char *canonical[STRATA_OPTIM_MAX_ARRAYS];      /* [static] "master" is always [0] */
  strata_device_type memory;                           /* where gradient, weight and state must lie; 0: the host's */
  uint32_t reserved2;
} strata_optim_layout;

/* Settings of one param group for one step, fp64 as the host gave them: [optimizer.params] of the
 * manifest, a group's own values, and the learning rate of the step. */
typedef struct strata_optim_group {
  uint32_t struct_size;
  uint32_t abi_minor;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
} strata_optim_group;

/* Elements [offset, offset + length) of the slice, with scalar set `scalar_set`. */
typedef struct strata_optim_span {
  uint64_t offset;
  uint64_t length;
  uint32_t scalar_set;
  uint32_t reserved;
} strata_optim_span;

typedef struct strata_optim_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  const strata_optim_span *spans; /* [event] element k at (const char *)spans + k * span_stride */
  uint64_t span_count;
  uint64_t span_stride;
  const float *scalars;     /* [event] sets of STRATA_OPTIM_SCALARS, from `scalars` */
  uint64_t scalar_sets;
  const void *grad;         /* [event] slice of the gradient; NULL for import and export */
  strata_dtype grad_dtype;  /* F32, BF16 or F16 */
  strata_dtype weight_dtype;
  void *weight;             /* [event] slice of the weight the model uses */
  void *const *state;       /* [event] one pointer per declared array, in declared order */
  const float *grad_scale;  /* [event] one fp32 factor for every gradient, readable where the update runs */
  const uint32_t *apply;    /* [event] 0: leave everything as it is; NULL means 1 */
  const strata_stream *stream;
} strata_optim_args;

typedef struct strata_optimizer_api {
  uint32_t struct_size;
  uint32_t abi_minor;

  strata_status(STRATA_CALL *open)(const strata_open_args *args, strata_optim **out); /* Required. [control] */
  void(STRATA_CALL *close)(strata_optim *self);                                       /* Required. [control] */

  /* Required. What is kept for weights of this dtype. UNIMPLEMENTED names what cannot be (split master and F16).
   * [any][open] */
  strata_status(STRATA_CALL *layout)(strata_optim *self, strata_dtype weight_dtype, strata_optim_layout *out);

  /* Required. The fp32 scalars of one group at its `step`-th applied update (1 is the first).
   * out has STRATA_OPTIM_SCALARS entries. INVALID_ARGUMENT names the setting. [any][open] */
  strata_status(STRATA_CALL *scalars)(strata_optim *self, const strata_optim_group *group, uint64_t step, float *out);

  /* Required. One pass over the spans. Weights of 16 bits are rounded to nearest, ties away from zero.
   * `done` NULL: returns when done or, on a device's stream, when enqueued (spans, scalars and the array of state
   * pointers are then read already); else set exactly once. [any][open] on disjoint slices */
  strata_status(STRATA_CALL *step)(strata_optim *self, const strata_optim_args *args, strata_event *done);

  /* Required. Canonical array `index` of elements [0, count) of the slice as fp32, out of or into the layout.
   * import_array of "master" also writes `weight`. count = spans[0].length, offset = spans[0].offset. [any][open] */
  strata_status(STRATA_CALL *export_array)(strata_optim *self, const strata_optim_args *args, uint32_t index,
                                           float *out);
  strata_status(STRATA_CALL *import_array)(strata_optim *self, const strata_optim_args *args, uint32_t index,
                                           const float *in);
} strata_optimizer_api;

STRATA_EXTERN_C_END
#endif
