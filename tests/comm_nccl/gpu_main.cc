// gpu_main.cc - main of the tests that need two GPUs: without them the program says so and ends with 77, "skipped". The
// GPUs are counted by their device files, because a process that has used CUDA cannot fork ranks that do.
#include <gtest/gtest.h>

#include <cstdio>

#include "gpus.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (const int gpus = strata::test::gpus_here(); gpus < 2) {
    std::printf("skipped: 2 GPUs are needed, this machine has %d\n", gpus);
    return 77;
  }
  return RUN_ALL_TESTS();
}
