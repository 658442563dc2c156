// host_device.h - marks a function that the host's compiler and nvcc both compile, from one source.
#pragma once

#if defined(__CUDACC__)
#define STRATA_HOST_DEVICE __host__ __device__
#else
#define STRATA_HOST_DEVICE
#endif
