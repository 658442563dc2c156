// reference.h - the same training without Strata: unsharded, one process, AdamW in fp64. Written from the contracts
// (design.md 1 and 9), not from the engine.
#pragma once

#include "tests/train/harness.h"

namespace strata::test {

Result reference(const Trial& trial);

}  // namespace strata::test
