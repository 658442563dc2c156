// forms.h - the kinds of slice there is a kernel for; no std headers, it is compiled for wide instruction sets.
#pragma once

#include "numbers/host_device.h"

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

STRATA_HOST_DEVICE constexpr bool is_split(Form form) { return form == kSplitF32 || form == kSplitBf16; }
STRATA_HOST_DEVICE constexpr unsigned weight_bytes(Form form) { return form == kWholeF32 || form == kSplitF32 ? 4 : 2; }

}  // namespace strata::adamw
