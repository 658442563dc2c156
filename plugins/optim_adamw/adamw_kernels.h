// adamw_kernels.h - the kernels of one instruction set, as a table of functions; no std headers (see CMakeLists.txt).
//
// A kernel updates one contiguous slice on the calling thread, which must run with the default floating-point
// environment. Kernels differ in speed only, never in bits.
#pragma once

#include <stdint.h>

namespace strata::adamw {

enum Grad { kGradF32, kGradBf16, kGradF16, kGrads };

// Where the fp32 master lives and what is written as the weight.
enum Form {
  kWholeF32,   // master array, copied to an fp32 weight
  kWholeBf16,  // master array, rounded to a bf16 weight
  kWholeF16,   // master array, rounded to an fp16 weight
  kSplitF32,   // the fp32 weight is the master
  kSplitBf16,  // bf16 weight and array of low 16 bits are the master
  kForms
};

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
