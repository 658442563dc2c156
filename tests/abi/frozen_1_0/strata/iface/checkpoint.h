/* SPDX-License-Identifier: MIT
 *
 * strata.checkpoint/1 - sharded save and load, and one consolidated weight file.
 *
 * A checkpoint is a directory <root>/<tag>. Its tensors are cut the way the saving run was sharded: per segment (a
 * flat buffer of one unit) each rank owns the elements [owned_offset, owned_offset + owned_count). Every param says
 * where in which segment it lies, so a load can pick any element range of any param, whatever its own sharding.
 *
 * Saving has two phases, so that nothing incomplete ever carries the final name:
 *   every rank:  write   (own file, under <root>/.<tag>.partial, synced)
 *   the core:    makes sure that every rank's write succeeded
 *   rank 0:      commit  (index file, sync, rename to <root>/<tag>, sync, then `latest`)
 * or           abandon on every rank. kill -9 at any moment loses at most the checkpoint in progress.
 *
 * A tag that is committed already is replaced by the commit: until then a load gets the old checkpoint, afterwards the
 * new one, and whatever ends or fails on the way leaves one of them whole.
 */
#ifndef STRATA_IFACE_CHECKPOINT_H
#define STRATA_IFACE_CHECKPOINT_H

#include "strata/host.h"

STRATA_EXTERN_C_BEGIN

#define STRATA_CHECKPOINT "strata.checkpoint/1"

typedef struct strata_ckpt strata_ckpt;           /* an open plugin instance */
typedef struct strata_ckpt_save strata_ckpt_save; /* a save in progress */
typedef struct strata_ckpt_load strata_ckpt_load; /* an open checkpoint */

#define STRATA_NO_SEGMENT UINT64_MAX

/* One named array over a segment's elements: "weight", "master", "exp_avg", ... Arrays other than "weight" are the
 * optimizer's canonical ones, F32. */
typedef struct strata_ckpt_array {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char* name;
  strata_dtype dtype;
  int32_t reserved;
} strata_ckpt_array;

typedef struct strata_ckpt_segment {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char* name;      /* unique: "layer3/bf16" */
  uint64_t elements;     /* of the whole segment, padding included */
  uint64_t owned_offset; /* what this rank writes; multiples of 2,048 */
  uint64_t owned_count;  /* 0: nothing here */
  const strata_ckpt_array* arrays;
  uint64_t array_count;
  uint64_t array_stride;
} strata_ckpt_segment;

typedef struct strata_ckpt_param {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char* name; /* path of its datasets; any UTF-8 without NUL */
  strata_dtype dtype;
  int32_t ndim;         /* 0: a scalar, one element */
  const int64_t* shape; /* an empty param has a 0 in its shape and no elements */
  uint64_t segment;     /* index into segments; STRATA_NO_SEGMENT for an alias */
  uint64_t offset;      /* first element in the segment */
  const char* alias_of; /* the param whose storage this name shares, or NULL */
} strata_ckpt_param;

/* Copies elements [offset, offset + count) of array `array` of segment `segment` to `dst`. Offsets count from the
 * start of the segment and stay inside what this rank owns. [control]: on the thread that called write. */
typedef strata_status(STRATA_CALL* strata_ckpt_read_fn)(void* ctx, uint64_t segment, uint64_t array, uint64_t offset,
                                                        uint64_t count, void* dst);

typedef struct strata_ckpt_save_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char* root; /* directory that holds checkpoints; write makes it if absent, but not its parent */
  const char* tag;  /* one path component */
  int32_t rank;
  int32_t world;
  const strata_ckpt_segment* segments;
  uint64_t segment_count;
  uint64_t segment_stride;
  const strata_ckpt_param* params;
  uint64_t param_count;
  uint64_t param_stride;
  const strata_option* meta; /* the run's own values (step, stage, manifest text, ...), kept with their types */
  uint64_t meta_count;
  uint64_t meta_stride;
  strata_ckpt_read_fn read;
  void* read_ctx;
} strata_ckpt_save_args;

/* What an open checkpoint holds; everything is [self], valid until load_close. */
typedef struct strata_ckpt_info {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char* tag;
  int32_t world; /* of the run that saved */
  int32_t reserved;
  const strata_ckpt_param* params;
  uint64_t param_count;
  uint64_t param_stride;
  const strata_option* meta;
  uint64_t meta_count;
  uint64_t meta_stride;
} strata_ckpt_info;

typedef struct strata_checkpoint_api {
  uint32_t struct_size;
  uint32_t abi_minor;

  strata_status(STRATA_CALL* open)(const strata_open_args* args, strata_ckpt** out); /* Required. [control] */
  void(STRATA_CALL* close)(strata_ckpt* self);                                       /* Required. [control] */

  /* Required. Writes and syncs this rank's file. On success *out is handed to commit (rank 0) or abandon (all);
   * on failure nothing of this rank remains. [control][open] blocks. RESOURCE_EXHAUSTED before the data is written
   * when the disk is too full; DATA_LOSS; on rank 0 ALREADY_EXISTS when the name is taken by anything that is no
   * checkpoint, or has somebody's files in it: that is never removed. */
  strata_status(STRATA_CALL* write)(strata_ckpt* self, const strata_ckpt_save_args* args, strata_ckpt_save** out);
  /* Required. Rank 0, once every rank's write succeeded: publishes, in place of what was committed under the tag. On
   * other ranks: only frees. Frees `save` in any case. [control][open] blocks. ALREADY_EXISTS as above */
  strata_status(STRATA_CALL* commit)(strata_ckpt* self, strata_ckpt_save* save);
  /* Required. Removes what this rank wrote and frees `save`. Cannot fail. A rank that does not know what became of the
   * others may call it while rank 0 commits: nothing is taken out of that. [control][open] */
  void(STRATA_CALL* abandon)(strata_ckpt* self, strata_ckpt_save* save);

  /* Required. Opens a committed checkpoint; tag NULL: what `latest` names. NOT_FOUND: there is none of that tag; with
   * NULL, no committed checkpoint at all below root, in parts neither: a run starts anew then, and writes over nothing.
   * FAILED_PRECONDITION (NULL): `latest` names one that is not there, or is missing while there are others; the text
   * names them. Checks that every shard is there and whole: DATA_LOSS names the file. UNAVAILABLE, here and from
   * load_read: a save replaced it meanwhile; what was read is of one checkpoint only. [control][open] blocks */
  strata_status(STRATA_CALL* load_open)(strata_ckpt* self, const char* root, const char* tag, strata_ckpt_load** out);
  strata_status(STRATA_CALL* load_info)(strata_ckpt_load* load, strata_ckpt_info* out); /* Required. [control][open] */
  /* Required. Elements [offset, offset + count) of a param's flat data, in the array's own dtype ("weight": the
   * param's; others F32). NOT_FOUND when that array was not saved for this param. [control][open] blocks */
  strata_status(STRATA_CALL* load_read)(strata_ckpt_load* load, uint64_t param, const char* array, uint64_t offset,
                                        uint64_t count, void* dst);
  void(STRATA_CALL* load_close)(strata_ckpt_load* load); /* Required. [control][open] */

  /* Required. One file with every param's "weight" under its name and in its own dtype, written by all ranks at once,
   * each its owned ranges, without a gather: same two phases and the same args (root: the directory, tag: the file
   * name); finish with commit or abandon. A file is never replaced: ALREADY_EXISTS on rank 0. [control][open] blocks
   * Rank 0 lays the file out before the others write into it: the core puts a barrier between the phases.
   * *inout before phase 0 is NULL, or a save that `write` returned, with the same args as there: then the file is a
   * part of that checkpoint, and one commit publishes both. Afterwards it is the save; NULL after an error.
   * phase 0: rank 0 creates and sizes the file; others do nothing. phase 1: every rank writes its ranges and syncs. */
  strata_status(STRATA_CALL* export_weights)(strata_ckpt* self, const strata_ckpt_save_args* args, uint32_t phase,
                                             strata_ckpt_save** inout);

  /* Required. Whether a save may replace what has the name <root>/<tag>: OK where there is nothing, or a checkpoint of
   * this plugin, whole or damaged, and nothing else; else ALREADY_EXISTS, and the text names what. Changes nothing. The
   * core asks for each part before it replaces a model in parts, whose parts it moves itself. [control][open] */
  strata_status(STRATA_CALL* may_replace)(strata_ckpt* self, const char* root, const char* tag);
} strata_checkpoint_api;

STRATA_EXTERN_C_END
#endif
