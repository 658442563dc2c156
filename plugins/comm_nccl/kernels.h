// kernels.h - launches of the kernels of sums.
#pragma once

#include "gpu.h"

namespace comm_nccl {

// Loads every kernel now rather than at its first launch.
cudaError_t load_sums();
cudaError_t launch_sum(const Parts& parts, strata_dtype in_dtype, void* out, strata_dtype out_dtype, uint64_t count,
                       cudaStream_t stream);

}  // namespace comm_nccl
