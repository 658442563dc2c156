// adamw_kernels.h - the kernels of one instruction set, as a table of functions; no std headers (see CMakeLists.txt).
//
// A kernel updates one contiguous slice on the calling thread, which must run with the default floating-point
// environment. Kernels differ in speed only, never in bits.
#pragma once

#include <stdint.h>

#include "adamw/forms.h"

namespace strata::adamw {

struct Slice {
  const void* grad;
  void* weight;
  void* master;  // float for kWhole..., uint16_t for kSplitBf16, unused for kSplitF32
  float* exp_avg;
  float* exp_avg_sq;
  uint64_t count;
  const float* scalars;  // one set, see ScalarIndex
  float grad_scale;
  bool stream;  // write a weight that is never read past the caches
};

using Kernel = void (*)(const Slice& slice);

struct Kernels {
  Kernel run[kGrads][kForms];
};

// nullptr when this build has none for the machine's architecture. The CPU is the caller's to ask.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace strata::adamw
