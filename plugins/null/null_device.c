/* null_device.c - strata.device/1 with libc alone: right in every bit, one thread, one number at a time.
 *
 * The arithmetic is not left out, because the core would train on garbage; it is the shortest that keeps the header's
 * rules. The caller may run with flush-to-zero: operations on numbers set the default floating point environment and
 * put the old one back. Slots not in the table are optional, and the host's defaults are right for them.
 *
 * Threads: every call may come from any thread; a mutex guards the list of allocations. */
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "null.h"
#include "null_numbers.h"
#include "strata/iface/device.h"

enum { ALIGNMENT = 256 };

typedef struct block {
  struct block* next;
  void* data;
} block;

struct strata_device {
  const strata_host* host;
  pthread_mutex_t mutex;
  block* blocks;
};

static strata_status STRATA_CALL device_open(const strata_open_args* args, strata_device** out) {
  strata_device* self = calloc(1, sizeof *self);
  if (!self) return null_fail(args->host, STRATA_RESOURCE_EXHAUSTED, "null device: out of memory");
  self->host = args->host;
  pthread_mutex_init(&self->mutex, NULL);
  *out = self;
  return STRATA_OK;
}

static void STRATA_CALL device_close(strata_device* self) {
  for (block* b = self->blocks; b;) {
    block* next = b->next;
    free(b->data);
    free(b);
    b = next;
  }
  pthread_mutex_destroy(&self->mutex);
  free(self);
}

static uint64_t meminfo_bytes(const char* key) {
  unsigned long long kib = 0;
  char line[128];
  FILE* file = fopen("/proc/meminfo", "r");
  while (file && fgets(line, sizeof line, file)) {
    if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), ": %llu", &kib) == 1) break;
  }
  if (file) fclose(file);
  return kib * 1024;
}

static strata_status STRATA_CALL device_caps(strata_device* self, strata_device_caps* out) {
  (void)self;
  out->type = STRATA_CPU;
  out->device_id = 0;
  out->flags = STRATA_DEVICE_HOST_COHERENT;
  out->alignment = ALIGNMENT;
  out->total_bytes = meminfo_bytes("MemTotal");
  out->free_bytes = meminfo_bytes("MemAvailable");
  return STRATA_OK;
}

static strata_status STRATA_CALL device_alloc(strata_device* self, uint64_t bytes, void** out) {
  *out = NULL;
  if (bytes == 0) return STRATA_OK;
  block* b = malloc(sizeof *b);
  void* data = null_aligned(bytes, ALIGNMENT);
  if (!b || !data) {
    free(b);
    free(data);
    return null_fail(self->host, STRATA_RESOURCE_EXHAUSTED, "null device alloc: %llu bytes wanted, %llu free",
                     (unsigned long long)bytes, (unsigned long long)meminfo_bytes("MemAvailable"));
  }
  b->data = data;
  pthread_mutex_lock(&self->mutex);
  b->next = self->blocks;
  self->blocks = b;
  pthread_mutex_unlock(&self->mutex);
  *out = data;
  return STRATA_OK;
}

static void STRATA_CALL device_free(strata_device* self, void* ptr) {
  if (!ptr) return;
  pthread_mutex_lock(&self->mutex);
  block** link = &self->blocks;
  while (*link && (*link)->data != ptr) link = &(*link)->next;
  block* found = *link;
  if (found) *link = found->next;
  pthread_mutex_unlock(&self->mutex);
  if (!found) {
    self->host->log(self->host->ctx, STRATA_LOG_HOST_MISBEHAVING, "null",
                    "device free of a pointer that alloc did not give: ignored");
    return;
  }
  free(found->data);
  free(found);
}

/* INVALID_ARGUMENT for what no operation of this device takes. */
static strata_status check(strata_device* self, const char* what, strata_dtype dtype, const void* a, const void* b,
                           uint64_t count, const strata_stream* stream) {
  if (!is_float(dtype)) {
    return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null device %s: dtype %d is not F32, BF16 or F16", what,
                     (int)dtype);
  }
  if (count > 0 && (!a || !b)) {
    return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null device %s: NULL for %llu elements", what,
                     (unsigned long long)count);
  }
  if (stream && stream->domain != STRATA_CPU) {
    return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null device %s: the stream is not the CPU's", what);
  }
  return STRATA_OK;
}

static strata_status STRATA_CALL device_copy(strata_device* self, void* dst, const void* src, uint64_t bytes,
                                             const strata_stream* stream) {
  strata_status code = check(self, "copy", STRATA_F32, dst, src, bytes, stream);
  if (code == STRATA_OK && bytes > 0) memcpy(dst, src, bytes);
  return code;
}

static strata_status STRATA_CALL device_fill(strata_device* self, void* dst, uint8_t value, uint64_t bytes,
                                             const strata_stream* stream) {
  strata_status code = check(self, "fill", STRATA_F32, dst, dst, bytes, stream);
  if (code == STRATA_OK && bytes > 0) memset(dst, value, bytes);
  return code;
}

static strata_status STRATA_CALL device_cast(strata_device* self, void* dst, strata_dtype dst_dtype, const void* src,
                                             strata_dtype src_dtype, uint64_t count, strata_rounding rounding,
                                             const strata_stream* stream) {
  strata_status code = check(self, "cast", src_dtype, dst, src, count, stream);
  if (code == STRATA_OK) code = check(self, "cast", dst_dtype, dst, src, count, stream);
  if (code != STRATA_OK) return code;
  if (rounding != STRATA_ROUND_EVEN && rounding != STRATA_ROUND_AWAY) {
    return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null device cast: rounding %d is unknown", (int)rounding);
  }
  fenv_t environment;
  fegetenv(&environment);
  fesetenv(FE_DFL_ENV);
  for (uint64_t i = 0; i < count; ++i) store(dst, dst_dtype, i, load(src, src_dtype, i), rounding);
  fesetenv(&environment);
  return STRATA_OK;
}

static strata_status STRATA_CALL device_accumulate(strata_device* self, float* dst, const void* src,
                                                   strata_dtype src_dtype, uint64_t count,
                                                   const strata_stream* stream) {
  strata_status code = check(self, "accumulate", src_dtype, dst, src, count, stream);
  if (code != STRATA_OK) return code;
  fenv_t environment;
  fegetenv(&environment);
  fesetenv(FE_DFL_ENV);
  for (uint64_t i = 0; i < count; ++i) {
    store(dst, STRATA_F32, i, load(dst, STRATA_F32, i) + load(src, src_dtype, i), STRATA_ROUND_EVEN);
  }
  fesetenv(&environment);
  return STRATA_OK;
}

static strata_status STRATA_CALL device_square_sums(strata_device* self, const void* src, strata_dtype dtype,
                                                    uint64_t count, double* sums, const strata_stream* stream) {
  strata_status code = check(self, "square_sums", dtype, src, sums, count, stream);
  if (code != STRATA_OK) return code;
  if (count % STRATA_NORM_BLOCK != 0) {
    return null_fail(self->host, STRATA_INVALID_ARGUMENT, "null device square_sums: %llu is not a multiple of 2048",
                     (unsigned long long)count);
  }
  fenv_t environment;
  fegetenv(&environment);
  fesetenv(FE_DFL_ENV);
  for (uint64_t begin = 0; begin < count; begin += STRATA_NORM_BLOCK) {
    double s[STRATA_NORM_BLOCK];
    for (uint64_t i = 0; i < STRATA_NORM_BLOCK; ++i) {
      const double x = load(src, dtype, begin + i);
      s[i] = x * x;
    }
    for (uint64_t stride = STRATA_NORM_BLOCK / 2; stride >= 1; stride /= 2) {
      for (uint64_t i = 0; i < stride; ++i) s[i] = s[i] + s[i + stride];
    }
    sums[begin / STRATA_NORM_BLOCK] = isnan(s[0]) ? (double)NAN : s[0];
  }
  fesetenv(&environment);
  return STRATA_OK;
}

static strata_status STRATA_CALL device_find_nonfinite(strata_device* self, const void* src, strata_dtype dtype,
                                                       uint64_t count, int64_t* index, const strata_stream* stream) {
  strata_status code = check(self, "find_nonfinite", dtype, src, index, count, stream);
  if (code != STRATA_OK) return code;
  uint64_t i = 0;
  while (i < count && isfinite(load(src, dtype, i))) ++i;
  *index = i < count ? (int64_t)i : -1;
  return STRATA_OK;
}

const strata_device_api null_device = {
    .struct_size = sizeof(strata_device_api),
    .abi_minor = STRATA_ABI_MINOR,
    .open = device_open,
    .close = device_close,
    .caps = device_caps,
    .alloc = device_alloc,
    .free = device_free,
    .copy = device_copy,
    .fill = device_fill,
    .cast = device_cast,
    .accumulate = device_accumulate,
    .square_sums = device_square_sums,
    .find_nonfinite = device_find_nonfinite,
};
