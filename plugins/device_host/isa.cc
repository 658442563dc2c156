// isa.cc - chooses the kernels: compiled without any instruction set flags, so that it runs everywhere.
#include <cstring>

#include "kernels.h"

namespace strata::device_host {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

const Kernels* select_kernels(const char* isa) {
  const bool any = std::strcmp(isa, "auto") == 0;
#if defined(__x86_64__)
  if ((any || std::strcmp(isa, "avx512") == 0) && has_avx512()) return avx512_kernels();
  if ((any || std::strcmp(isa, "avx2") == 0) && has_avx2()) return avx2_kernels();
#endif
  if (any || std::strcmp(isa, "scalar") == 0) return scalar_kernels();
  return nullptr;
}

}  // namespace strata::device_host
