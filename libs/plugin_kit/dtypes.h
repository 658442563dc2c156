// dtypes.h - sizes and names of the element types.
#pragma once

#include <cstdint>

#include "strata/types.h"

namespace strata::plugin_kit {

// Bytes of an element; 0 for a dtype this plugin does not know.
inline uint64_t size_of(strata_dtype dtype) {
  static constexpr uint64_t sizes[] = {0, 4, 2, 2, 1, 2, 8, 8};
  return dtype >= 0 && dtype <= STRATA_F64 ? sizes[dtype] : 0;
}

inline const char* dtype_name(strata_dtype dtype) {
  static constexpr const char* names[] = {"unknown", "f32", "bf16", "f16", "u8", "u16", "i64", "f64"};
  return names[size_of(dtype) ? dtype : 0];
}

// The types that training computes with.
inline bool is_float(strata_dtype dtype) { return dtype == STRATA_F32 || dtype == STRATA_BF16 || dtype == STRATA_F16; }

}  // namespace strata::plugin_kit
