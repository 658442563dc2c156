// kernels.h - the kernels of device_cuda and how they are launched; kernels.cu is compiled by nvcc.
//
// A launch enqueues and returns CUDA's error. Pointers are memory that kernels can reach, at any byte address; what
// stands at a multiple of 16 bytes is moved 16 bytes at a time. Sizes are 64-bit, 0 elements launch nothing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "strata/iface/device.h"

namespace strata::device_cuda {

// Loads every kernel onto the current device. CUDA loads lazily, at a kernel's first launch, and waits there for the
// device to be idle: beside a collective's kernel that spins until a peer comes, for ever.
cudaError_t load_kernels();

cudaError_t launch_cast(void* dst, strata_dtype dst_dtype, const void* src, strata_dtype src_dtype, uint64_t count,
                        strata_rounding rounding, cudaStream_t stream);
cudaError_t launch_accumulate(float* dst, const void* src, strata_dtype src_dtype, uint64_t count, cudaStream_t stream);
// Casts to nearest even and accumulations, in a launch per 64 items. Nothing is allocated: items travel as arguments.
cudaError_t launch_fold(const strata_fold_item* items, uint64_t count, uint64_t stride, cudaStream_t stream);
// `sums` is 8-aligned.
cudaError_t launch_square_sums(double* sums, const void* src, strata_dtype dtype, uint64_t count, cudaStream_t stream);
// Lowers *first, 8-aligned, to the index of the first inf or NaN.
cudaError_t launch_find_nonfinite(uint64_t* first, const void* src, strata_dtype dtype, uint64_t count,
                                  cudaStream_t stream);

}  // namespace strata::device_cuda
