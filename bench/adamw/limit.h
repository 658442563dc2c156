// limit.h - the machine's limit for the optimizer's memory traffic: kernels that move the same bytes and compute
// nothing, in several variants. The bench takes the fastest.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace strata::bench {

// Reads g, p, m, v and writes p, m, v for `count` elements (a multiple of 64), and w where it is not NULL.
// Every pointer is aligned to 64 bytes; g and w are 16-bit arrays where `half` is true.
struct Traffic {
  const void* g;
  float *p, *m, *v;
  uint16_t* w;
  bool half;
};
using MoveFn = void (*)(const Traffic& t, uint64_t begin, uint64_t end);

struct Variant {
  std::string name;
  MoveFn move;
};
// The variants this CPU can run: plain stores, non-temporal stores of w, non-temporal stores of everything.
std::vector<Variant> limit_variants(bool half);

}  // namespace strata::bench
