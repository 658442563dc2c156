/* SPDX-License-Identifier: MIT
 *
 * strata.device/1 - memory, streams and the few kernels the core needs, on the device where weights are used.
 *
 * device_host does all of it with plain memory and threads, so the core needs no GPU to run.
 * Every operation takes a stream; on the CPU domain it is done when the call returns, elsewhere it is enqueued.
 * Arithmetic rules (the same bits on every device): no FMA contraction, no flush to zero; a NaN result is stored
 * as 0x7FC00000 (F32), 0x7FC0 (BF16), 0x7E00 (F16) or 0x7FF8000000000000 (the fp64 sums).
 */
#ifndef STRATA_IFACE_DEVICE_H
#define STRATA_IFACE_DEVICE_H

#include "strata/host.h"

STRATA_EXTERN_C_BEGIN

#define STRATA_DEVICE "strata.device/1"

typedef struct strata_device strata_device;
typedef struct strata_marker strata_marker; /* a point in a stream's work; the device's event, under a free name */

/* Elements per block of `square_sums`; shards are multiples of it, so that no block crosses an owner. */
#define STRATA_NORM_BLOCK 2048u

enum { STRATA_DEVICE_HOST_COHERENT = 1u }; /* device and host memory are the same: no copies between tiers */

typedef int32_t strata_rounding;
enum {
  STRATA_ROUND_EVEN = 0, /* to nearest, ties to even: gradients, wire */
  STRATA_ROUND_AWAY = 1  /* to nearest, ties away from zero: weights */
};

typedef struct strata_device_caps {
  uint32_t struct_size;
  uint32_t abi_minor;
  strata_device_type type;
  int32_t device_id;
  uint32_t flags;
  uint32_t alignment; /* of every alloc, at least 256 */
  uint64_t total_bytes;
  uint64_t free_bytes; /* at the call */
} strata_device_caps;

/* One piece of `fold`: dst = src, rounded to nearest even, as `cast` does it, or dst += src as `accumulate` does; and,
 * where `squares` is not NULL, of what dst is then what `square_sums` gives, in memory that is right for that. */
typedef struct strata_fold_item {
  uint32_t struct_size;
  uint32_t abi_minor;
  void* dst;
  const void* src;
  uint64_t count;
  strata_dtype dst_dtype; /* F32 when adding */
  strata_dtype src_dtype;
  uint32_t adds; /* 1: dst += src */
  uint32_t reserved;
  double* squares; /* one a block; then `count` is a multiple of STRATA_NORM_BLOCK */
} strata_fold_item;

typedef struct strata_device_api {
  uint32_t struct_size;
  uint32_t abi_minor;

  /* Required. Opens the device of this rank. On failure nothing is leaked and close is not called. [control] */
  strata_status(STRATA_CALL* open)(const strata_open_args* args, strata_device** out);
  /* Required. Frees everything still allocated. Cannot fail. [control] */
  void(STRATA_CALL* close)(strata_device* self);
  /* Required. [any][open] */
  strata_status(STRATA_CALL* caps)(strata_device* self, strata_device_caps* out);

  /* Required. Uninitialised device memory, aligned to caps.alignment; bytes 0 gives NULL and STRATA_OK.
   * RESOURCE_EXHAUSTED names bytes wanted and free. [any][open] may block */
  strata_status(STRATA_CALL* alloc)(strata_device* self, uint64_t bytes, void** out);
  void(STRATA_CALL* free)(strata_device* self, void* ptr); /* Required. NULL is ignored. [any][open] */
  /* Optional (default: UNIMPLEMENTED, the caller uses plain memory and says so). Page-locked host memory,
   * 4096-aligned; free as above. [any][open] may block */
  strata_status(STRATA_CALL* alloc_pinned)(strata_device* self, uint64_t bytes, void** out);
  void(STRATA_CALL* free_pinned)(strata_device* self, void* ptr);

  /* Required. dst and src may be device or host memory and do not overlap. [any][open] [event: stream] */
  strata_status(STRATA_CALL* copy)(strata_device* self, void* dst, const void* src, uint64_t bytes,
                                   const strata_stream* stream);
  /* Required. Sets every byte to `value`. [any][open] */
  strata_status(STRATA_CALL* fill)(strata_device* self, void* dst, uint8_t value, uint64_t bytes,
                                   const strata_stream* stream);
  /* Required. dst[i] = round(src[i]) between F32, BF16 and F16; equal dtypes copy (NaN made canonical).
   * dst == src is allowed for equal sizes. [any][open] */
  strata_status(STRATA_CALL* cast)(strata_device* self, void* dst, strata_dtype dst_dtype, const void* src,
                                   strata_dtype src_dtype, uint64_t count, strata_rounding rounding,
                                   const strata_stream* stream);
  /* Required. dst[i] += src[i] in fp32; dst is F32, src any float dtype. [any][open] */
  strata_status(STRATA_CALL* accumulate)(strata_device* self, float* dst, const void* src, strata_dtype src_dtype,
                                         uint64_t count, const strata_stream* stream);
  /* Required. Sum of squares of each block of STRATA_NORM_BLOCK elements into sums[block] (fp64, host-readable when
   * the stream is done; in memory of alloc_pinned where there is such, else the call may wait for the stream). Within
   * a block: s[i] = x[i]^2 exactly in fp64, then for stride 1024, 512, ..., 1: s[i] = s[i] + s[i + stride] for
   * i < stride; sums[block] = s[0]. `count` is a multiple of the block. [any][open] */
  strata_status(STRATA_CALL* square_sums)(strata_device* self, const void* src, strata_dtype dtype, uint64_t count,
                                          double* sums, const strata_stream* stream);
  /* Required. Index of the first element that is inf or NaN, or -1. Waits for the stream. [any][open] */
  strata_status(STRATA_CALL* find_nonfinite)(strata_device* self, const void* src, strata_dtype dtype, uint64_t count,
                                             int64_t* index, const strata_stream* stream);

  /* Optional: a device of the CPU domain leaves them out (default: a CPU stream, nothing to do). [any][open] */
  strata_status(STRATA_CALL* stream_create)(strata_device* self, int32_t priority, strata_stream* out);
  void(STRATA_CALL* stream_destroy)(strata_device* self, strata_stream* stream);
  /* Blocks the calling thread until all work of the stream is done. [any][open] */
  strata_status(STRATA_CALL* stream_wait_host)(strata_device* self, const strata_stream* stream);
  /* Sets `event` (with the device's error, if any) once everything enqueued on `stream` so far is done. [any][open] */
  strata_status(STRATA_CALL* stream_record)(strata_device* self, const strata_stream* stream, strata_event* event);

  /* Optional, together with the stream calls (default: NULL, every point is reached). A marker is made once and
   * recorded many times; before the first time it is reached. [any][open] */
  strata_status(STRATA_CALL* marker_create)(strata_device* self, strata_marker** out);
  void(STRATA_CALL* marker_destroy)(strata_device* self, strata_marker* marker); /* NULL is ignored. [any][open] */
  /* The marker now stands behind everything enqueued on `stream` so far. [any][open], one caller at a
   * time per marker */
  strata_status(STRATA_CALL* marker_record)(strata_device* self, strata_marker* marker, const strata_stream* stream);
  /* Makes `stream` wait, on the device, for the point the marker stands at. [any][open] */
  strata_status(STRATA_CALL* stream_wait_marker)(strata_device* self, const strata_stream* stream,
                                                 strata_marker* marker);
  /* Blocks the calling thread until that point is reached; the device's error, if any. [any][open] blocks */
  strata_status(STRATA_CALL* marker_wait_host)(strata_device* self, strata_marker* marker);

  /* Optional (default: UNIMPLEMENTED, the caller makes calls per item). Many casts and accumulations in one go, and
   * sums of squares of their results while the caches have them, with their bits. No item writes what another one reads
   * or writes. `items` lie `stride` bytes apart. [any][open] items [call] */
  strata_status(STRATA_CALL* fold)(strata_device* self, const strata_fold_item* items, uint64_t count, uint32_t stride,
                                   const strata_stream* stream);

  /* Optional, together (default: UNIMPLEMENTED). A marker that keeps the device's time of when it is reached; otherwise
   * as one of marker_create. [any][open] */
  strata_status(STRATA_CALL* marker_create_timed)(strata_device* self, strata_marker** out);
  /* Nanoseconds from when timed marker `from` was reached to when `to` was, AGAIN while one of them is not. Both were
   * recorded; they may be the same. [any][open] does not block */
  strata_status(STRATA_CALL* marker_elapsed)(strata_device* self, strata_marker* from, strata_marker* to, int64_t* ns);
} strata_device_api;

STRATA_EXTERN_C_END
#endif
