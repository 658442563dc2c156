// arguments.h - what a call's arguments mean, and the checks of them that do not depend on where the update runs.
//
// The checks throw strata::plugin_kit::Error before anything is written. No state; any thread.
#pragma once

#include <string>

#include "adamw/settings.h"

namespace strata::adamw {

// The canonical arrays, in the order `declare_layout` gives them.
enum Canonical { kMaster, kExpAvg, kExpAvgSq, kCanonicals };

constexpr uint64_t element_bytes(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }
std::string dtype_name(strata_dtype dtype);  // "BF16"
Grad grad_of(strata_dtype dtype);

// Element k of the spans of a call.
inline const strata_optim_span& span_at(const strata_optim_args& args, uint64_t k) {
  return *reinterpret_cast<const strata_optim_span*>(reinterpret_cast<const char*>(args.spans) + k * args.span_stride);
}

// A slice's pointers with `offset` elements added. State arrays are in the order of `declare_layout`: what the master
// needs (nothing for kSplitF32), exp_avg, exp_avg_sq.
struct Pointers {
  char* weight;
  void* master;
  float *exp_avg, *exp_avg_sq;
};
Pointers pointers_at(Form form, const strata_optim_args& args, uint64_t offset);

// For `step`; returns the end of the spans in elements. With 0 there is nothing to update, and no pointer was checked.
uint64_t check_step(const Settings& settings, const strata_optim_args& args);

// For `export_array` and `import_array`; `other` is the canonical array's memory.
Canonical check_copy(const Settings& settings, const strata_optim_args& args, uint32_t index, const void* other,
                     bool import);

}  // namespace strata::adamw
