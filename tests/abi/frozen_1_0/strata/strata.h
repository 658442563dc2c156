/* SPDX-License-Identifier: MIT
 *
 * strata/strata.h - the host API: what a training program calls.
 *
 * A program keeps its own forward and backward. It registers its params once, in units (usually one per layer), and
 * then, every step:
 *
 *     strata_fetch(e, unit, NULL);            the unit's weights are whole and readable
 *     strata_param_view(e, param, &t);        ... here
 *     strata_release(e, unit, NULL);          the memory may go back
 *     strata_grad(e, param, &grad, NULL);     hand over a gradient, any number of times
 *     strata_grads_done(e, unit);             the unit's gradients are complete: reduce them
 *     strata_end_backward(e);                 end of one micro-batch
 *     strata_step(e, NULL);                   norm, clip, update; returns while the update runs
 *
 * Conventions
 * - Functions return a strata_status. The text of the last failure on this thread is strata_last_error().
 * - One thread at a time per engine ([control]), any thread. Calls from inside an engine callback, or in a forked
 *   child, return FAILED_PRECONDITION.
 * - Calls marked [collective] are made by all ranks in the same order; each has the manifest's deadline. What
 *   opens, commits, reads and writes tensors, saves and loads ends alike on all of them: with the code of the rank that
 *   failed (of several, the first), and a text that names it and says why.
 * - Structs are zeroed and their struct_size set by the caller (STRATA_INIT does both).
 * - A failed background update makes the engine FAILED: every call but query, load and close returns its error.
 */
#ifndef STRATA_H
#define STRATA_H

#include "strata/host.h"

STRATA_EXTERN_C_BEGIN

#if defined(STRATA_BUILDING_CORE)
#define STRATA_API STRATA_EXPORT
#else
#define STRATA_API
#endif

/* Zeroes *p and sets its struct_size: strata_engine_args a; STRATA_INIT(&a); */
#define STRATA_INIT(p) strata_init_struct((p), (uint32_t)sizeof(*(p)))
STRATA_API void STRATA_CALL strata_init_struct(void* p, uint32_t struct_size);

typedef struct strata_engine strata_engine;
typedef uint32_t strata_unit;  /* 0, 1, 2, ... in the order of strata_add_unit */
typedef uint32_t strata_param; /* 0, 1, 2, ... in the order of strata_add_param */
typedef uint32_t strata_group; /* 0 is the manifest's [optimizer.params] */
#define STRATA_NO_PARAM UINT32_MAX

/* Text of the last failed call on this thread; "" when there was none. Valid until the next call. [any] */
STRATA_API const char* STRATA_CALL strata_last_error(void);
STRATA_API const char* STRATA_CALL strata_status_name(strata_status code); /* "NOT_FOUND" [any] [static] */
STRATA_API const char* STRATA_CALL strata_version(void);                   /* "0.1.0" [any] [static] */

/* ---- opening and closing ------------------------------------------------------------------------------------ */

typedef void(STRATA_CALL* strata_log_fn)(void* ctx, strata_log_level level, const char* domain, const char* text);

/* `bytes`, never 0, of device memory at a multiple of 256 bytes, for work that is enqueued on `stream` from now on;
 * NULL `stream`: for work anywhere. NULL when there is none: the call it was for ends with RESOURCE_EXHAUSTED. */
typedef void*(STRATA_CALL* strata_lend_fn)(void* ctx, uint64_t bytes, const strata_stream* stream);
/* What lend gave comes back. With the stream of the loan: what the engine did with it comes before whatever is enqueued
 * there from now on. With NULL: all of that is over. */
typedef void(STRATA_CALL* strata_take_back_fn)(void* ctx, void* memory, const strata_stream* stream);

/* Device memory out of the host's own allocator; see gradient_memory. Both are called inside strata_grad, strata_grads,
 * strata_grads_done, strata_end_backward, strata_drop_gradients (where there are several ranks: they finish what some
 * of them began), strata_fetch, strata_load and strata_close, on their thread, and must not call the engine. */
typedef struct strata_lender {
  uint32_t struct_size;
  uint32_t abi_minor;
  void* ctx;
  strata_lend_fn lend;
  strata_take_back_fn take_back;
} strata_lender;

typedef struct strata_engine_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char* manifest;         /* path of the TOML file; or */
  const char* manifest_text;    /* its text (relative paths then resolve against the working directory) */
  const char* const* overrides; /* "zero_optimization.stage=2": applied after the file, same checks */
  uint64_t override_count;
  const char* plugin_dir; /* searched last; NULL: plugins/ beside libstrata.so */
  strata_log_fn log;      /* NULL: lines on stderr */
  void* log_ctx;
  const char* job;  /* ranks as threads: a name they share; NULL otherwise */
  uint32_t threads; /* 1: this process's threads are the ranks; job, rank and world say which one this is */
  int32_t rank;     /* used with threads = 1; otherwise the collective finds them in the environment */
  int32_t world;
  int32_t reserved;
  /* [self] until strata_close, or NULL. On a device with streams, memory for gradients is then borrowed here by a
   * step's first gradient and goes back when the fetches after strata_step have made that stream wait for every unit's
   * update; where nothing of a micro-batch stays on the device, already when a fetch in the next one's forward has made
   * it wait for the reductions. A framework can use it for activations in between. "grad" is readable until then. */
  const strata_lender* gradient_memory;
} strata_engine_args;

/* Reads the manifest, loads the plugins, meets the other ranks. Allocates nothing large. On failure *out is NULL and
 * nothing is left behind. [collective] INVALID_ARGUMENT (file:line:column), NOT_FOUND, DEADLINE_EXCEEDED (also where
 * another rank ended before it could meet the others: with a manifest that cannot be read, for one) */
STRATA_API strata_status STRATA_CALL strata_open(const strata_engine_args* args, strata_engine** out);
/* Joins a running update and frees everything; NULL is fine. Does not wait for other ranks. Does nothing when called
 * from inside a callback of this engine. */
STRATA_API void STRATA_CALL strata_close(strata_engine* engine);
/* For a host whose own part of the work failed, before it closes: the engine is FAILED with ABORTED and `text` [call],
 * and those of the other ranks, who else hear only that this one closed, with CANCELLED and "rank N: text". What an
 * engine failed with before stays. INVALID_ARGUMENT */
STRATA_API strata_status STRATA_CALL strata_fail(strata_engine* engine, const char* text);

STRATA_API int32_t STRATA_CALL strata_rank(const strata_engine* engine);  /* [any] */
STRATA_API int32_t STRATA_CALL strata_world(const strata_engine* engine); /* [any] */

/* Where this rank is. The manifest's tensor_model_parallel_size and pipeline_model_parallel_size cut the world into
 * data-parallel groups: rank = (pipeline rank * data-parallel size + data-parallel rank) * tensor size + tensor rank.
 * The ranks of one data-parallel group register the same params, shard them, and make all [collective] calls together;
 * those of the whole world commit, step, save and load together. */
typedef struct strata_ranks {
  uint32_t struct_size;
  uint32_t abi_minor;
  int32_t rank;
  int32_t world;
  int32_t data_parallel_rank;
  int32_t data_parallel_size;
  int32_t tensor_model_parallel_rank;
  int32_t tensor_model_parallel_size;
  int32_t pipeline_model_parallel_rank;
  int32_t pipeline_model_parallel_size;
} strata_ranks;
STRATA_API strata_status STRATA_CALL strata_get_ranks(const strata_engine* engine, strata_ranks* out); /* [any] */

/* ---- registering params --------------------------------------------------------------------------------------- */

/* Settings of one param group; NaN is a value not given: the manifest's. */
typedef struct strata_group_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
} strata_group_args;
STRATA_API strata_status STRATA_CALL strata_add_group(strata_engine* engine, const strata_group_args* args,
                                                      strata_group* out);

/* A unit: params that are fetched together. `name` is unique. Before strata_commit. */
STRATA_API strata_status STRATA_CALL strata_add_unit(strata_engine* engine, const char* name, strata_unit* out);

enum {
  STRATA_PARAM_FROZEN = 1u, /* no gradient, no optimizer state */
  /* For the norm, which counts every value of the model once. A param is taken to be a copy, the same on all ranks of
   * the tensor-parallel group, unless it is this rank's part of one that is split over them. */
  STRATA_PARAM_TENSOR_MODEL_PARALLEL = 2u,
  STRATA_PARAM_SHARED = 4u /* a copy of a param that another pipeline stage counts (a tied embedding) */
};

typedef struct strata_param_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char* name; /* unique */
  const int64_t* shape;
  int32_t ndim;
  strata_dtype dtype; /* F32, BF16 or F16 */
  strata_group group;
  uint32_t flags;
  uint32_t tied;        /* 1: this name shares the storage of param `tied_to` (same shape and dtype) */
  strata_param tied_to; /* fetching this unit brings the owner's unit; gradients add over names; group and FROZEN are
                         * the owner's: 0 here, or the same */
} strata_param_args;
STRATA_API strata_status STRATA_CALL strata_add_param(strata_engine* engine, strata_unit unit,
                                                      const strata_param_args* args, strata_param* out);

/* Ends registration: agrees with the other ranks that all registered the same, plans every byte, prints the plan,
 * refuses what does not fit, allocates. Weights are zero until written. [collective]
 * RESOURCE_EXHAUSTED with the numbers and the key to change; FAILED_PRECONDITION names the rank that differs */
STRATA_API strata_status STRATA_CALL strata_commit(strata_engine* engine);

/* ---- reading and writing whole tensors -------------------------------------------------------------------- */

/* Sets a param to rank `root`'s tensor (CPU memory, F32 or the param's dtype, [call]): the weight, and the
 * optimizer's fp32 master, keep an F32 value at full precision. Moments are kept. Joins the update. Other ranks may
 * pass value NULL. `root` is a data-parallel rank. [collective] */
STRATA_API strata_status STRATA_CALL strata_write_param(strata_engine* engine, strata_param param,
                                                        const strata_tensor* value, int32_t root);
/* Copies a whole array of a param into `out` (CPU memory): "weight" in the param's dtype or F32; "master", "exp_avg",
 * "exp_avg_sq" and "grad" (reduced, unscaled sum; where ranks add up micro-batches themselves, after the last one) in
 * F32. Joins the update. [collective]
 * NOT_FOUND when the param has no such array */
STRATA_API strata_status STRATA_CALL strata_read_param(strata_engine* engine, strata_param param, const char* array,
                                                       const strata_tensor* out);

/* ---- the step ------------------------------------------------------------------------------------------------- */

/* Makes the unit's weights whole on the device. Returns once that work is enqueued on `stream` (NULL: the CPU; the
 * weights are there on return). Waits for nothing but this unit's own update. Nests: each fetch has its release.
 * [collective at stage 3 and after an update at stages 1 and 2] RESOURCE_EXHAUSTED (max_live_parameters) */
STRATA_API strata_status STRATA_CALL strata_fetch(strata_engine* engine, strata_unit unit, const strata_stream* stream);
/* Gives the weights back; views of them end here. With check_weights = true also [collective]: when a rank wrote into
 * them, FAILED_PRECONDITION names it and the param; the old values are back, and the unit is released. */
STRATA_API strata_status STRATA_CALL strata_release(strata_engine* engine, strata_unit unit,
                                                    const strata_stream* stream);
/* Shape, dtype and, while its unit is fetched, data of a param. A released param has its shape, data NULL, and the
 * call returns FAILED_PRECONDITION. The data is read-only: changes go through strata_write_param. out->shape is
 * [self]. [any] between fetch and release */
STRATA_API strata_status STRATA_CALL strata_param_view(strata_engine* engine, strata_param param, strata_tensor* out);
/* The same for the params of a unit, tied names included, in the order they were added: fills at most `capacity` of
 * `out`, whose items lie out->struct_size bytes apart, and sets *count to how many there are. [any] between fetch and
 * release */
STRATA_API strata_status STRATA_CALL strata_unit_views(strata_engine* engine, strata_unit unit, strata_tensor* out,
                                                       uint64_t capacity, uint64_t* count);

/* Adds a gradient of this micro-batch. The tensor has the param's shape; F32, BF16 or F16; device memory. It is
 * read before the call returns (CPU) or on `stream`; with contiguous_gradients = false it must stay until
 * strata_end_backward returns. A gradient that is refused counts as not given: zero, unless it is given again. */
STRATA_API strata_status STRATA_CALL strata_grad(strata_engine* engine, strata_param param, const strata_tensor* grad,
                                                 const strata_stream* stream);
/* strata_grad for several params: grads[i], whose items lie grads->struct_size bytes apart, is params[i]'s. Added in
 * this order, with the same bits as one by one; on a device in few launches. When one of them is refused the call adds
 * none, and all of them count as not given. */
STRATA_API strata_status STRATA_CALL strata_grads(strata_engine* engine, const strata_param* params,
                                                  const strata_tensor* grads, uint64_t count,
                                                  const strata_stream* stream);
/* This rank will add no more gradients to the unit in this micro-batch: reduce when its turn comes. Optional while
 * unreduced gradients fit into reduce_bucket_size: strata_end_backward does it for every unit left. */
STRATA_API strata_status STRATA_CALL strata_grads_done(strata_engine* engine, strata_unit unit);
/* Ends the micro-batch on this rank. [collective] */
STRATA_API strata_status STRATA_CALL strata_end_backward(strata_engine* engine);
/* Throws away every gradient given since the last strata_step: the next one is of the first micro-batch again. For a
 * backward that ended in an error. Ranks may be at different places of the step, but all of them call it: reductions
 * that some ranks began are ended, and waited for, first. Fetched units stay fetched.
 * One case cannot be dropped from different places: units came in the same order in the steps before and in another one
 * now, and of those declared done more than reduce_bucket_size waited for their turn. What ranks sent out of turn then
 * differs, and all of them get the error that names it. [collective] */
STRATA_API strata_status STRATA_CALL strata_drop_gradients(strata_engine* engine);

typedef struct strata_step_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  double lr;              /* of group 0 and of groups that gave none; NaN: the manifest's */
  const double* group_lr; /* one per group, group 0 first, NaN entries as above; NULL: none */
  uint64_t group_count;   /* of group_lr and of groups: the number of groups */
  double max_norm;        /* clip to this norm, the same on all ranks; 0 or NaN: the manifest's gradient_clipping,
                           * INFINITY: do not clip */
  double loss;            /* for the line of steps_per_print: this rank's, 0: not given */
  uint64_t tokens;        /* the same: of this rank in this step; every step, or none */
  const char* note;       /* the same: ends the line; NULL: nothing */
  /* Settings for this step alone, one item per group, group 0 first, groups->struct_size bytes apart. A NaN takes what
   * the group has; an lr here goes before group_lr, which goes before the group's own, which goes before lr. NULL:
   * none. The same on all ranks. */
  const strata_group_args* groups;
} strata_step_args;
/* One optimizer step over gradient_accumulation_steps finished micro-batches. Returns when the update is under way.
 * `args` NULL: the manifest's learning rate. [collective]
 * FAILED_PRECONDITION when micro-batches are missing (a second step without gradients included) */
STRATA_API strata_status STRATA_CALL strata_step(strata_engine* engine, const strata_step_args* args);
/* Waits until no update is running, and returns its error if it had one. */
STRATA_API strata_status STRATA_CALL strata_wait(strata_engine* engine);

typedef struct strata_step_info {
  uint32_t struct_size;
  uint32_t abi_minor;
  uint64_t steps;         /* calls of strata_step that returned OK */
  uint64_t applied_steps; /* of those, updates that were applied */
  uint64_t skipped_steps; /* and skipped, because the gradient was not finite */
  double grad_norm;       /* of the last step: of the mean gradient, before clipping; inf or NaN as it is */
  double clip_factor;     /* min(1, max_norm / (norm + 1e-6)); 1 when clipping is off */
  uint32_t was_applied;   /* of the last step */
  uint32_t reserved;
} strata_step_info;
/* Waits for the last step's norm only. */
STRATA_API strata_status STRATA_CALL strata_get_step_info(strata_engine* engine, strata_step_info* out);

/* ---- what is going on ----------------------------------------------------------------------------------------- */

/* Exact bytes moved, always on. Tiers: 0 device, 1 cpu, 2 nvme. Collective bytes are what this rank receives
 * from others: (world - 1) x its share for gathers and reductions. */
typedef struct strata_counters {
  uint32_t struct_size;
  uint32_t abi_minor;
  uint64_t gather_bytes; /* weights gathered from other ranks */
  uint64_t gather_calls;
  uint64_t reduce_bytes; /* gradients of other ranks read for this rank's shards */
  uint64_t reduce_calls;
  uint64_t agree_bytes;  /* norms, hashes and other small agreements */
  uint64_t tier_read[3]; /* optimizer state, gradients and weights read from the tier */
  uint64_t tier_write[3];
  uint64_t grad_bytes; /* gradients handed over by the host */
  uint64_t updated_elements;
  uint64_t fetches;
  uint64_t prefetch_hits; /* fetches whose gather had been started before */
  uint64_t prefetch_dropped;
} strata_counters;
typedef int32_t strata_counter_span;
enum {
  STRATA_COUNT_TOTAL = 0,
  STRATA_COUNT_LAST_STEP = 1 /* from one step's last collective to the next one's; waits for the last step's norm */
};
STRATA_API strata_status STRATA_CALL strata_get_counters(strata_engine* engine, strata_counter_span span,
                                                         strata_counters* out);

/* One line of the memory plan. */
typedef struct strata_plan_item {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char* what; /* [self] "weight shards", "optimizer state", ... */
  int32_t tier;     /* 0 device, 1 cpu, 2 nvme */
  uint32_t reserved;
  uint64_t bytes; /* on this rank */
} strata_plan_item;
/* Copies at most `capacity` items, sets *count to how many there are. After strata_commit; one more comes with the
 * first param that gets several gradients in a micro-batch. [any] */
STRATA_API strata_status STRATA_CALL strata_get_plan(strata_engine* engine, strata_plan_item* items, uint64_t capacity,
                                                     uint64_t* count);

/* The device the engine's weights are on. */
typedef struct strata_device_info {
  uint32_t struct_size;
  uint32_t abi_minor;
  strata_device_type type;
  int32_t device_id;
  uint64_t total_bytes;
  uint64_t free_bytes; /* now */
  uint64_t held_bytes; /* by this engine, as its plan says; 0 before strata_commit */
} strata_device_info;
STRATA_API strata_status STRATA_CALL strata_get_device(strata_engine* engine, strata_device_info* out);

/* A value of the run's settings as text, by manifest key ("zero_optimization.stage"), defaults and derived values
 * included. [self] [any] */
STRATA_API strata_status STRATA_CALL strata_get_setting(strata_engine* engine, const char* key, const char** value);

/* Extension interface of the plugin that serves a role ("device", "offload_cpu", "collective", "optimizer",
 * "checkpoint"): its get_interface(id), or NOT_FOUND. [any] [static] */
STRATA_API strata_status STRATA_CALL strata_get_plugin_interface(strata_engine* engine, const char* role,
                                                                 const char* id, const void** table);

/* ---- checkpoints ------------------------------------------------------------------------------------------------ */

/* Saves to <root>/<tag>, atomically; `latest` names it afterwards. A checkpoint that is there is replaced: whenever the
 * run ends, the old or the new one is whole. Makes `root`, but not its parent. Between steps only (no open
 * micro-batch). Joins the update. [collective] ALREADY_EXISTS: what is there is no checkpoint, or has other files in
 * it */
STRATA_API strata_status STRATA_CALL strata_save(strata_engine* engine, const char* root, const char* tag);
/* Loads <root>/<tag> (NULL: what `latest` names), saved at any world size and stage, into the registered params: every
 * param and array must be there. [collective] NOT_FOUND, on all ranks: there is no such checkpoint; with tag NULL, none
 * at all below root, so that a run may start anew. FAILED_PRECONDITION: `latest` names one that is not there, or is
 * missing while there are some (the text names them); only some ranks find it, or ranks opened different ones.
 * DATA_LOSS: a part of it is missing or damaged. INVALID_ARGUMENT: a param or array is not in it, or is of another
 * shape or dtype. UNAVAILABLE: another job replaced it meanwhile */
STRATA_API strata_status STRATA_CALL strata_load(strata_engine* engine, const char* root, const char* tag);
/* Writes every param's weight into one file, without a gather; its directory must be there. [collective]
 * ALREADY_EXISTS: a file is never replaced */
STRATA_API strata_status STRATA_CALL strata_export_weights(strata_engine* engine, const char* path);
/* Values of the host's own that travel with checkpoints ("tokens", "epoch"), UTF-8; NULL removes one; load replaces
 * them. */
STRATA_API strata_status STRATA_CALL strata_set_meta(strata_engine* engine, const char* key, const char* value);
STRATA_API strata_status STRATA_CALL strata_get_meta(strata_engine* engine, const char* key, const char** value);

STRATA_EXTERN_C_END
#endif
