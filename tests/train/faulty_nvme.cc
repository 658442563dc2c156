// Beside the sources of offload_nvme and calls that obey faulty_calls.h, in a library that a rank loads in its place:
// how the test, which loads it as well, reaches the faults of this copy.
#include "tests/conformance_offload/faulty_calls.h"

extern "C" __attribute__((visibility("default"))) strata::test::Faults* strata_test_faults() {
  return &strata::test::faults();
}
