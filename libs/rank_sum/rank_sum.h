// rank_sum.h - the two loops of a collective that touch data: copy, and the sum of several ranks' elements.
//
// sum() widens every input to fp32, adds in the order of `in` starting from in[0] itself (not from 0.0, so that -0.0
// stays -0.0), and rounds once to the output type, to nearest even; any NaN is stored as 0x7FC00000, 0x7FC0 or 0x7E00.
// Scalar, AVX2 and AVX-512 forms are the same C++ compiled three times: no contraction, no reassociation, hence the
// same bits. The caller's floating-point mode (FTZ, DAZ, rounding) is put aside for the call.
//
// `stream`: write past the caches. Right for outputs larger than the caches: the plain form reads every output line
// before it writes it (measured: 1.6 x slower for a copy of 32 MiB, 1.7 x for a sum).
#pragma once

#include <cstdint>

#include "strata/types.h"

namespace strata::rank_sum {

enum class Isa { kScalar, kAvx2, kAvx512 };

Isa best_isa();
bool isa_runs_here(Isa isa);
const char* isa_name(Isa isa);

// Elements are F32, BF16 or F16. Inputs and output are aligned to their elements. `out` may be one of the inputs when
// the dtypes are the same.
void sum(Isa isa, const void* const* in, int inputs, strata_dtype in_dtype, void* out, strata_dtype out_dtype,
         uint64_t count, bool stream);
void copy(void* out, const void* in, uint64_t bytes, bool stream);

}  // namespace strata::rank_sum
