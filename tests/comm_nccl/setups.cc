// setups.cc - the tests of conformance_collective on comm_nccl without a GPU: ranks that are threads, NCCL and GPU
// fake.
#include "ranks.h"

namespace strata::test {

std::vector<Setup> all_setups(const std::vector<int>& worlds) {
  std::vector<Setup> setups;
  for (int world : worlds) {
    setups.push_back({STRATA_TEST_PLUGIN_DIR "/comm_nccl_fake.so", true, world,
                      [] { return Options().set("libnccl", FAKE_NCCL).set("deterministic_reduce", true); }});
  }
  return setups;
}

}  // namespace strata::test
