/* SPDX-License-Identifier: MIT
 *
 * strata.offload/1 - a tier: a place where bytes live while they are not on the device.
 *
 * A tier hands out regions. An addressable tier (RAM) lets the core work in place through `map`; any tier can be
 * read and written in pieces. Sizes are 64-bit. Offsets, sizes and buffers of read and write are multiples of
 * caps.io_alignment.
 */
#ifndef STRATA_IFACE_OFFLOAD_H
#define STRATA_IFACE_OFFLOAD_H

#include "strata/host.h"

STRATA_EXTERN_C_BEGIN

#define STRATA_OFFLOAD "strata.offload/1"

typedef struct strata_offload strata_offload;
typedef uint64_t strata_region; /* 0 is never a region */

enum { STRATA_OFFLOAD_ADDRESSABLE = 1u }; /* map works */
/* Of a region: no device copies from or to it, so that page-locking it would gain nothing. */
enum { STRATA_REGION_HOST_ONLY = 1u };

typedef struct strata_offload_caps {
  uint32_t struct_size;
  uint32_t abi_minor;
  uint32_t flags;
  uint32_t io_alignment; /* power of two; 1 when there is no rule */
  uint32_t max_inflight; /* submits that may be unfinished at once; a further one returns STRATA_AGAIN */
  uint32_t reserved;
  uint64_t budget_bytes; /* regions together never exceed this */
  uint64_t used_bytes;   /* at the call */
  uint64_t pinned_bytes; /* at the call; part of used_bytes */
  /* How long, at the call, at least one transfer was under way since `open`, also one of the tier's own; of several
   * disks the mean over them. 0: the tier does not keep it. */
  uint64_t busy_ns;
  /* What budget_bytes comes from and how it could be more, to go on with in an error: "the limit is what the disks have
   * free: ...; free some". [self]; NULL: the tier does not say. */
  const char* budget_reason;
  /* Host memory that the tier takes for itself beside what it counts as used: buffers, and on top for each begun MiB of
   * regions indexes and checksums. From `open` on they do not change; the host counts them against its memory limit. */
  uint64_t host_bytes;
  uint64_t host_bytes_per_mib;
} strata_offload_caps;

typedef struct strata_io_args {
  uint32_t struct_size;
  uint32_t abi_minor;
  strata_region region;
  uint64_t offset; /* bytes into the region */
  uint64_t bytes;
  void* buffer; /* [event] host memory */
} strata_io_args;

typedef struct strata_offload_api {
  uint32_t struct_size;
  uint32_t abi_minor;

  strata_status(STRATA_CALL* open)(const strata_open_args* args, strata_offload** out); /* Required. [control] */
  void(STRATA_CALL* close)(strata_offload* self); /* Required. Frees all regions. Cannot fail. [control] */
  strata_status(STRATA_CALL* caps)(strata_offload* self, strata_offload_caps* out); /* Required. [any][open] */

  /* Required. A region of `bytes` (more than 0), contents zero. RESOURCE_EXHAUSTED with wanted, used and budget
   * bytes. `label` [call] is used in errors ("layer3 exp_avg"). [control][open] */
  strata_status(STRATA_CALL* alloc)(strata_offload* self, uint64_t bytes, const char* label, strata_region* out);
  void(STRATA_CALL* free)(strata_offload* self, strata_region region); /* Required. [control][open] */

  /* Optional (default: UNIMPLEMENTED). The region's address, valid until it is freed, 4096-aligned. [any][open] */
  strata_status(STRATA_CALL* map)(strata_offload* self, strata_region region, void** out);

  /* Required. Moves bytes between a region and a buffer. All bytes move or the status says what went wrong; a
   * short transfer is never a success. With `done` NULL the call returns when the bytes have moved; otherwise
   * `done` is set exactly once, possibly before the call returns, unless the call itself returns an error. From then
   * on nothing uses the buffer; but with DEADLINE_EXCEEDED a disk may answer later yet: the caller keeps the buffer for
   * good, and uses it no more. Transfers of overlapping ranges are ordered by the caller. [submit][open] OUT_OF_RANGE,
   * DATA_LOSS, AGAIN */
  strata_status(STRATA_CALL* read)(strata_offload* self, const strata_io_args* args, strata_event* done);
  strata_status(STRATA_CALL* write)(strata_offload* self, const strata_io_args* args, strata_event* done);

  /* Optional, both or none (default: nothing is done). Says that reads and writes will use these bytes of host memory
   * [until unregister_memory, or close] again and again, so that the tier may prepare for it. For speed only: a tier
   * that cannot (its system refuses) returns OK, goes on without, and says so once in the log. Address and bytes are
   * multiples of 4096; ranges do not overlap. A transfer may lie inside a range, across its ends, or outside.
   * INVALID_ARGUMENT, ALREADY_EXISTS (overlaps one registered before) [control][open] */
  strata_status(STRATA_CALL* register_memory)(strata_offload* self, void* address, uint64_t bytes);
  /* `address` as it was registered. No transfer of that memory is under way, nor ended with DEADLINE_EXCEEDED.
   * [control][open] */
  void(STRATA_CALL* unregister_memory)(strata_offload* self, void* address);

  /* Optional (default: UNIMPLEMENTED; the caller then calls alloc). As alloc, with what is known of the region's use:
   * STRATA_REGION_*. They are hints, and unknown ones are ignored. [control][open] */
  strata_status(STRATA_CALL* alloc_for)(strata_offload* self, uint64_t bytes, uint32_t flags, const char* label,
                                        strata_region* out);
} strata_offload_api;

STRATA_EXTERN_C_END
#endif
