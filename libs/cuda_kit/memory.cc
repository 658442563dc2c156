// memory.cc - see memory.h.
#include "cuda_kit/memory.h"

#include "cuda_kit/error.h"

namespace strata::cuda_kit {

using plugin_kit::raise;

Pool::Pool(int ordinal) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = {cudaMemLocationTypeDevice, ordinal};
  check(cudaMemPoolCreate(&pool_, &properties), "making a memory pool on GPU ", ordinal);
  uint64_t keep = UINT64_MAX;
  const cudaError_t error = cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep);
  if (error != cudaSuccess) cudaMemPoolDestroy(pool_);
  check(error, "telling the memory pool of GPU ", ordinal, " to keep freed memory");
}

Pool::~Pool() { cudaMemPoolDestroy(pool_); }

cudaError_t Pool::allocate(void** out, uint64_t bytes, cudaStream_t stream) {
  const cudaError_t error = cudaMallocFromPoolAsync(out, bytes, pool_, stream);
  if (error != cudaSuccess) cudaGetLastError();  // the caller reports it
  return error;
}

uint64_t Pool::slack() const {
  uint64_t reserved = 0, used = 0;
  check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &reserved), "size of the memory pool");
  check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemCurrent, &used), "use of the memory pool");
  return reserved > used ? reserved - used : 0;
}

Scratch::Scratch(Pool& pool, uint64_t bytes, cudaStream_t stream) : pool_(pool), stream_(stream) {
  check(pool.allocate(&data_, bytes, stream), bytes, " bytes of device memory for the length of this call");
}

Scratch::~Scratch() { pool_.release(data_, stream_); }

bool kernels_reach(const void* ptr, int ordinal) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, ptr), "where ", ptr, " lies");
  if (attributes.type == cudaMemoryTypeDevice) return attributes.device == ordinal;
  return attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeManaged;
}

void require_reach(const void* ptr, int ordinal, const char* what, uint64_t alignment) {
  if (!kernels_reach(ptr, ordinal)) {
    raise(STRATA_INVALID_ARGUMENT, what, " at ", ptr, " is neither memory of GPU ", ordinal,
          " nor page-locked host memory");
  }
  if (reinterpret_cast<uintptr_t>(ptr) % alignment != 0) {
    raise(STRATA_INVALID_ARGUMENT, what, " at ", ptr, " is not at a multiple of its ", alignment, "-byte elements");
  }
}

}  // namespace strata::cuda_kit
