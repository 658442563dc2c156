// bench_cuda.cc - figures of the CUDA plugins; the last line is JSON.
//
//   bench_cuda adamw_cuda_bits_equal   1 when optim_adamw_cuda gives the bits of optim_adamw
//   bench_cuda cuda_kernels_vs_copy    the slowest kernel against a plain copy on the device, in GB/s
//
// Without a GPU: the reason, "value": null, and exit code 77.
#include <cstdio>

#include "plugins.h"

int main(int argc, char** argv) {
  const std::string name = argc == 2 ? argv[1] : "";
  if (name == "adamw_cuda_bits_equal") return strata::bench::adamw_bits(name);
  if (name == "cuda_kernels_vs_copy") return strata::bench::speed(name);
  std::fprintf(stderr, "usage: %s adamw_cuda_bits_equal|cuda_kernels_vs_copy\n", argv[0]);
  return 2;
}
