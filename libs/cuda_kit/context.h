// context.h - the GPU of a rank: found with clear words where there is none, and current during every call.
//
// Nothing here needs libcuda.so to load; the driver is asked for at open. Calls come from threads of the host program,
// which may have another device current, or none: `Scope` makes this one current and puts the old one back. It goes
// through the driver's context rather than cudaSetDevice, because setting the old device back that way would make a
// context on GPU 0 for every rank of the machine.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>

#include "strata/types.h"

namespace strata::cuda_kit {

class Context {
 public:
  // The GPU `device_id`, or that of the local rank where it is -1. Throws FAILED_PRECONDITION: no driver, one that is
  // too old, no GPU visible, fewer than that, or one older than the kernels.
  static Context open(int64_t device_id, int32_t local_rank);

  int ordinal() const { return ordinal_; }

  class Scope {
   public:
    explicit Scope(const Context& context);
    ~Scope();
    Scope(const Scope&) = delete;

   private:
    const Context& context_;
    CUcontext previous_ = nullptr;
  };

 private:
  Context() = default;

  using GetCurrent = CUresult (*)(CUcontext*);
  using SetCurrent = CUresult (*)(CUcontext);
  int ordinal_ = 0;
  CUcontext handle_ = nullptr;
  GetCurrent get_current_ = nullptr;
  SetCurrent set_current_ = nullptr;
};

// Oldest compute capability there are kernels for (cmake/cuda.cmake).
inline constexpr int kOldestMajor = 8;

}  // namespace strata::cuda_kit
