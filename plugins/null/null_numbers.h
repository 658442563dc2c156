/* null_numbers.h - one float of any dtype, read as fp32 and written with rounding. Plain, not fast.
 *
 * A 16-bit format is its number of mantissa bits and its smallest exponent. Rounding scales a magnitude so that the
 * format's step is 1, rounds to a whole number, and adds the exponent on top: a carry out of the mantissa is then a
 * carry into the exponent by itself, and subnormals need no case of their own. Runs in the default floating point
 * environment (see null_device.c). */
#ifndef STRATA_PLUGIN_NULL_NUMBERS_H
#define STRATA_PLUGIN_NULL_NUMBERS_H

#include <math.h>
#include <string.h>

#include "strata/iface/device.h"

typedef struct format16 {
  int mantissa;
  int least_exponent;
  uint32_t infinity, nan;
} format16;

static inline const format16* format_of(strata_dtype dtype) {
  static const format16 bf16 = {7, -126, 0x7F80, 0x7FC0}, f16 = {10, -14, 0x7C00, 0x7E00};
  return dtype == STRATA_BF16 ? &bf16 : &f16;
}

static inline int is_float(strata_dtype dtype) {
  return dtype == STRATA_F32 || dtype == STRATA_BF16 || dtype == STRATA_F16;
}
static inline size_t size_of(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }

static inline float widen(uint16_t bits, const format16* f) {
  const int mantissa = bits & ((1 << f->mantissa) - 1);
  const int exponent = (bits & 0x7FFF) >> f->mantissa;
  float value;
  if ((bits & 0x7FFF) > f->infinity) {
    value = NAN;
  } else if ((bits & 0x7FFF) == f->infinity) {
    value = INFINITY;
  } else if (exponent == 0) {
    value = ldexpf((float)mantissa, f->least_exponent - f->mantissa);
  } else {
    value = ldexpf((float)(mantissa + (1 << f->mantissa)), exponent - 1 + f->least_exponent - f->mantissa);
  }
  return bits & 0x8000 ? -value : value;
}

static inline uint16_t narrow(float value, const format16* f, strata_rounding rounding) {
  const uint32_t sign = signbit(value) ? 0x8000 : 0;
  if (isnan(value)) return (uint16_t)f->nan;
  if (isinf(value)) return (uint16_t)(sign | f->infinity);
  int exponent = 0;
  frexp(value, &exponent); /* 2^(exponent - 1) <= |value| */
  exponent = exponent - 1 > f->least_exponent && value != 0 ? exponent - 1 : f->least_exponent;
  const double steps = ldexp(fabs((double)value), f->mantissa - exponent);
  const double whole = rounding == STRATA_ROUND_EVEN ? nearbyint(steps) : floor(steps + 0.5);
  const uint32_t bits = ((uint32_t)(exponent - f->least_exponent) << f->mantissa) + (uint32_t)whole;
  return (uint16_t)(sign | (bits < f->infinity ? bits : f->infinity));
}

/* Element i of an array at any address. */
static inline float load(const void* array, strata_dtype dtype, uint64_t i) {
  const char* at = (const char*)array + i * size_of(dtype);
  float value;
  uint16_t half;
  if (dtype == STRATA_F32) {
    memcpy(&value, at, 4);
    return value;
  }
  memcpy(&half, at, 2);
  return widen(half, format_of(dtype));
}

static inline void store(void* array, strata_dtype dtype, uint64_t i, float value, strata_rounding rounding) {
  char* at = (char*)array + i * size_of(dtype);
  if (dtype == STRATA_F32) {
    static const uint32_t nan = 0x7FC00000;
    if (isnan(value)) {
      memcpy(at, &nan, 4);
    } else {
      memcpy(at, &value, 4);
    }
    return;
  }
  const uint16_t half = narrow(value, format_of(dtype), rounding);
  memcpy(at, &half, 2);
}

#endif
