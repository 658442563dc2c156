// reference.h - what each collective must give, computed the slow and plain way.
//
// Inputs are a function of (seed, rank, item, index), so every rank can compute every other rank's input and, from
// those, its own expected output. Conversions go through exact arithmetic in double, not through the plugin's bit work.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "strata/types.h"

namespace strata::test {

uint64_t element_size(strata_dtype dtype);

// `count` elements of one rank's input. About one in eight is an arbitrary bit pattern: NaNs, infinities, subnormals.
std::vector<uint8_t> make_input(uint64_t seed, int rank, uint64_t count, strata_dtype dtype);

// Sum over ranks, in rank order from rank 0's value, rounded once to out_dtype.
std::vector<uint8_t> reference_sum(const std::vector<std::vector<uint8_t>>& inputs, strata_dtype in_dtype,
                                   strata_dtype out_dtype);

float to_float(const uint8_t* element, strata_dtype dtype);
void from_float(float value, strata_dtype dtype, uint8_t* element);

// "" when the bytes are equal, else the first difference.
std::string same_bytes(const void* got, const std::vector<uint8_t>& want, const std::string& what);

}  // namespace strata::test
