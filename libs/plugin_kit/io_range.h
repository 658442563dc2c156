// io_range.h - what every tier refuses of a transfer (strata_io_args), in the same words.
#pragma once

#include "plugin_kit/error.h"
#include "strata/iface/offload.h"

namespace strata::plugin_kit {

// OK when the range lies in a region of so many bytes and there is a buffer for it. Nothing is added to the text: the
// caller says which region.
inline Error check_range(const strata_io_args& io, uint64_t region_bytes) {
  if (io.offset > region_bytes || io.bytes > region_bytes - io.offset) {
    return {STRATA_OUT_OF_RANGE,
            join(io.bytes, " bytes at offset ", io.offset, " of a region of ", region_bytes, " bytes")};
  }
  if (io.bytes > 0 && !io.buffer) return {STRATA_INVALID_ARGUMENT, join(io.bytes, " bytes and a NULL buffer")};
  return {};
}

}  // namespace strata::plugin_kit
