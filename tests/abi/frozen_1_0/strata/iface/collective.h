/* SPDX-License-Identifier: MIT
 *
 * strata.collective/1 - ranks that exchange memory.
 *
 * One thread per rank calls all collectives, in one order. The plugin numbers them; before it moves data it posts
 * (number, operation, tag, bytes) where the other ranks see it, and a difference is an error on every rank that
 * names both sides. No call waits longer than its deadline; the error then names the ranks that are missing.
 *
 * Data is read from and written to memory of `alloc` (memory shared with, or registered for, the other ranks), so
 * that no collective stages a copy. When a call is done, its output is complete and its input may be changed.
 *
 * With a stream of a device's domain (caps.memory) a collective is enqueued there and the call returns; it is done when
 * the stream is. What goes wrong afterwards ends it within its deadline all the same, sets `done` where one was given,
 * and is the answer of every later call, `exchange` included, on every rank.
 */
#ifndef STRATA_IFACE_COLLECTIVE_H
#define STRATA_IFACE_COLLECTIVE_H

#include "strata/host.h"

STRATA_EXTERN_C_BEGIN

#define STRATA_COLLECTIVE "strata.collective/1"

typedef struct strata_comm strata_comm;

enum {
  STRATA_COLL_FIXED_ORDER = 1u, /* sums are added in rank order 0, 1, 2, ... in fp32, whatever the message sizes */
  STRATA_COLL_ANY_MEMORY = 2u,  /* inputs and outputs may be memory the plugin did not allocate */
  STRATA_COLL_ANY_OUTPUT = 4u   /* outputs may be */
};

typedef struct strata_collective_caps {
  uint32_t struct_size;
  uint32_t abi_minor;
  int32_t rank;
  int32_t world;
  int32_t local_rank;
  int32_t local_world;
  uint32_t flags;
  strata_device_type memory; /* device type of memory it works on */
  const char* job;           /* [self] name of the job, for logs and directories */
} strata_collective_caps;

/* One buffer of a grouped call. `count` is in elements:
 *   all_gather      in: count        out: world * count   (in == out + rank * count is allowed)
 *   reduce_scatter  in: world * count  out: count         (rank r gets slice r)
 *   all_reduce      in: count        out: count           (in == out is allowed)
 *   broadcast       in: count (root) out: count           (in == out is allowed)
 *   all_to_all      in: world * count  out: world * count (slice s of rank r lands in slice r of rank s)
 * Reductions are sums: each input is widened to fp32, added in fp32, rounded once to out_dtype (to nearest even).
 * Other operations need in_dtype == out_dtype. count 0 is legal. */
typedef struct strata_coll_item {
  uint32_t struct_size;
  uint32_t abi_minor;
  const void* in; /* [event] */
  void* out;      /* [event] */
  uint64_t count;
  strata_dtype in_dtype;
  strata_dtype out_dtype;
} strata_coll_item;

typedef struct strata_coll_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  const strata_coll_item* items; /* [event] element k at (const char *)items + k * item_stride */
  uint64_t item_count;
  uint64_t item_stride;
  uint64_t tag;      /* what this call is about; must be equal on all ranks */
  const char* label; /* [event] the same in words, for errors: "gather layer3" */
  int32_t root;      /* broadcast only */
  int32_t reserved;
  int64_t deadline_ns;         /* -1: the instance's */
  const strata_stream* stream; /* [call] device plugins enqueue here; NULL on the CPU */
  int64_t* waited_ns;          /* [call] NULL, or where a call that is done at its return may put how much of it passed
                                * before all ranks had come */
} strata_coll_args;

typedef struct strata_collective_api {
  uint32_t struct_size;
  uint32_t abi_minor;

  /* Required. Meets the other ranks, within args->deadline_ns. args->rank -1: rank and world come from the
   * environment (plugin README lists the variables); none set means world 1. [control] blocks */
  strata_status(STRATA_CALL* open)(const strata_open_args* args, strata_comm** out);
  /* Required. Leaves; does not wait for others. Frees all memory. Cannot fail. [control] */
  void(STRATA_CALL* close)(strata_comm* self);
  strata_status(STRATA_CALL* caps)(strata_comm* self, strata_collective_caps* out); /* Required. [any][open] */

  /* Required. Memory collectives can use, 4096-aligned, contents zero. Not a collective call. [control][open] */
  strata_status(STRATA_CALL* alloc)(strata_comm* self, uint64_t bytes, void** out);
  void(STRATA_CALL* free)(strata_comm* self, void* ptr); /* Required. [control][open] */

  /* Required. `done` NULL: returns when the call is done. Otherwise `done` is set exactly once, possibly before the
   * call returns, unless the call itself returns an error. [submit][open]
   * DEADLINE_EXCEEDED (which ranks are missing), FAILED_PRECONDITION (ranks differ), UNAVAILABLE (a rank died),
   * CANCELLED (abort was called). After any error of a collective the instance only answers with it. */
  strata_status(STRATA_CALL* all_gather)(strata_comm* self, const strata_coll_args* args, strata_event* done);
  strata_status(STRATA_CALL* reduce_scatter)(strata_comm* self, const strata_coll_args* args, strata_event* done);
  strata_status(STRATA_CALL* all_reduce)(strata_comm* self, const strata_coll_args* args, strata_event* done);
  strata_status(STRATA_CALL* broadcast)(strata_comm* self, const strata_coll_args* args, strata_event* done);
  strata_status(STRATA_CALL* all_to_all)(strata_comm* self, const strata_coll_args* args, strata_event* done);
  /* Required. Returns when every rank has called it. [submit][open] */
  strata_status(STRATA_CALL* barrier)(strata_comm* self, const strata_coll_args* args);

  /* Required. Makes every collective of this rank, running or later, fail with `code` and tells the other ranks
   * `text`, so that they fail at once instead of at their deadline. [any][open] */
  void(STRATA_CALL* abort)(strata_comm* self, strata_status code, const char* text);

  /* Required. Rank r's `bytes` at `in` arrive at out + r * bytes on every rank: norms, hashes, verdicts; at most 1 MiB
   * each, plain host memory. One of the numbered collectives for order and comparison, but never behind device work.
   * args: tag, label and deadline. [submit][open] blocks */
  strata_status(STRATA_CALL* exchange)(strata_comm* self, const void* in, void* out, uint64_t bytes,
                                       const strata_coll_args* args);

  /* Optional. All ranks call it; those that give the same `colour` get an instance of their own, ranked by `key`, equal
   * keys by their rank here. The instances share one fate: what ends one, an abort included, ends all of them on every
   * rank. One thread per rank calls the collectives of all; one is closed before the one it was split from. Errors name
   * ranks by their number in the instance that was opened. args: tag, label and deadline. [submit][open] blocks */
  strata_status(STRATA_CALL* split)(strata_comm* self, int32_t colour, int32_t key, const strata_coll_args* args,
                                    strata_comm** out);
} strata_collective_api;

STRATA_EXTERN_C_END
#endif
