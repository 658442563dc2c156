// error.h - a CUDA error as an Error of plugin_kit: what was being done, with its numbers, and CUDA's name and words.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "plugin_kit/error.h"

namespace strata::cuda_kit {

// "cudaErrorIllegalAddress (an illegal memory access was encountered)"
inline std::string describe(cudaError_t error) {
  return plugin_kit::join(cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
}

inline strata_status status_of(cudaError_t error) {
  return error == cudaSuccess                 ? STRATA_OK
         : error == cudaErrorMemoryAllocation ? STRATA_RESOURCE_EXHAUSTED
                                              : STRATA_INTERNAL;
}

// check(cudaEventRecord(event, stream), "event on stream ", stream): throws an Error when the call failed.
template <class... Parts>
void check(cudaError_t error, const Parts&... doing) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // reported here; the next launch must not report it again
  plugin_kit::raise(status_of(error), doing..., ": ", describe(error));
}

}  // namespace strata::cuda_kit
