// describe.h - every JSON text of this plugin: the description in rank and index files, the fingerprint, and the
// safetensors header. The only file pair that knows a JSON library.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model.h"

namespace strata::checkpoint {

// XXH3-64 of what all ranks of a save must agree on. Raises INVALID_ARGUMENT when a text is not UTF-8.
uint64_t fingerprint(const Description& d);

std::string to_json(const Description& d);
// Raises DATA_LOSS with `where` in front when the text is not a description of `format`, or breaks its rules.
Description from_json(const std::string& text, const std::string& format, const std::string& where);

// A param's bytes in the data part of a safetensors file, or bytes that belong to none.
struct TensorSpan {
  const Param* param = nullptr;  // NULL: filler
  uint64_t offset = 0;
  uint64_t bytes = 0;
};
// The header's JSON for spans that are sorted by offset and have no gaps; aliases go to __metadata__.
std::string safetensors_header(const std::vector<TensorSpan>& spans, const std::vector<Param>& params);

}  // namespace strata::checkpoint
