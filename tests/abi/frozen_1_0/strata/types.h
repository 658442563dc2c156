/* SPDX-License-Identifier: MIT
 *
 * strata/types.h - the small types both sides share: dtypes, tensors, streams, options.
 */
#ifndef STRATA_TYPES_H
#define STRATA_TYPES_H

#include "strata/abi.h"

/* Element types. Numbers never change meaning. */
typedef int32_t strata_dtype;
enum {
  STRATA_F32 = 1,  /* IEEE binary32 */
  STRATA_BF16 = 2, /* bfloat16: upper half of binary32 */
  STRATA_F16 = 3,  /* IEEE binary16 */
  STRATA_U8 = 4,
  STRATA_U16 = 5, /* raw 16 bits: the low half of a split fp32 master */
  STRATA_I64 = 6,
  STRATA_F64 = 7
};

/* Where a pointer can be read: DLPack's DLDeviceType numbers. */
typedef int32_t strata_device_type;
enum { STRATA_CPU = 1, STRATA_CUDA = 2, STRATA_CUDA_HOST = 3 };

/* A view of memory somebody else owns. Contiguous, row-major. No alignment is implied. */
typedef struct strata_tensor {
  uint32_t struct_size;
  uint32_t abi_minor;
  void *data;
  strata_device_type device_type;
  int32_t device_id;
  strata_dtype dtype;
  int32_t ndim;
  const int64_t *shape; /* ndim entries */
} strata_tensor;

/* A queue of device work. domain STRATA_CPU: work is done when the call returns and `native` is NULL.
 * domain STRATA_CUDA: `native` is a CUstream and never NULL (legacy default stream: CU_STREAM_LEGACY, 0x1). */
typedef struct strata_stream {
  uint32_t struct_size;
  uint32_t abi_minor;
  strata_device_type domain;
  int32_t device_id;
  void *native;
} strata_stream;

/* A promise of completion that carries its error. Implemented by the host, reference counted, opaque.
 * See strata_sync_api in host.h. */
typedef struct strata_event strata_event;

/* One setting of a plugin, already checked against the plugin's TOML. */
typedef int32_t strata_option_type;
enum { STRATA_OPT_BOOL = 1, STRATA_OPT_INT = 2, STRATA_OPT_FLOAT = 3, STRATA_OPT_STRING = 4 };

typedef struct strata_option {
  uint32_t struct_size;
  uint32_t abi_minor;
  const char *key; /* UTF-8, NUL-terminated */
  strata_option_type type;
  int32_t reserved;
  int64_t i;     /* BOOL (0 or 1) and INT */
  double f;      /* FLOAT */
  const char *s; /* STRING */
} strata_option;

/* A list of options; element k is at (const char *)items + k * stride. */
typedef struct strata_options {
  uint32_t struct_size;
  uint32_t abi_minor;
  const strata_option *items;
  uint64_t count;
  uint64_t stride;
} strata_options;

#endif
