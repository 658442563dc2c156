// sample.cc - writes one checkpoint (tag "t", 2 ranks) and one weight file into a directory, for tests of other
// readers.
//
// Content follows Model::bits: the low bits of element * 2654435761 + segment * 977 + array * 131.
// Besides the ordinary model it has "all": 65,536 bf16 elements whose bit patterns are a permutation of all there are
// (the factor is odd): zeros, subnormals, infinities and NaNs included.
//   checkpoint_sample DIRECTORY
#include <cstdio>

#include "tests/conformance_checkpoint/model.h"

int main(int argc, char** argv) {
  using namespace strata::test;
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY\n", argv[0]);
    return 2;
  }
  Model m = ordinary_model();
  const auto all = m.segment("all/bf16", {{"weight", STRATA_BF16}});
  m.param(all, "all", {65536});
  m.shard(2);
  const bool ok = save(m, argv[1], "t") == STRATA_OK && export_file(m, argv[1], "weights.safetensors") == STRATA_OK;
  return ok ? 0 : 1;
}
