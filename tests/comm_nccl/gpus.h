// gpus.h - how many GPUs there are, without touching CUDA.
#pragma once

#include <unistd.h>

#include <string>

namespace strata::test {

inline int gpus_here() {
  int count = 0;
  for (int k = 0; k < 64; ++k) count += ::access(("/dev/nvidia" + std::to_string(k)).c_str(), R_OK | W_OK) == 0;
  return count;
}

}  // namespace strata::test
