// context.cc - see context.h.
#include "cuda_kit/context.h"

#include <cstdlib>

#include "cuda_kit/error.h"

namespace strata::cuda_kit {

using plugin_kit::join;
using plugin_kit::raise;

namespace {

std::string version_text(int version) { return join(version / 1000, ".", version % 1000 / 10); }

std::string visible_devices() {
  const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
  return list ? join("CUDA_VISIBLE_DEVICES=\"", list, "\"") : "CUDA_VISIBLE_DEVICES is not set";
}

void check_driver() {
  int driver = 0, runtime = 0;
  check(cudaRuntimeGetVersion(&runtime), "version of the CUDA runtime");
  check(cudaDriverGetVersion(&driver), "version of the NVIDIA driver");
  if (driver == 0) {
    raise(STRATA_FAILED_PRECONDITION, "no NVIDIA driver found (libcuda.so.1 cannot be loaded); one that supports CUDA ",
          version_text(runtime), " is needed");
  }
  // Drivers serve every runtime of their own major version.
  if (driver / 1000 < runtime / 1000) {
    raise(STRATA_FAILED_PRECONDITION, "the NVIDIA driver is too old: it supports CUDA ", version_text(driver),
          ", this plugin was built with CUDA ", version_text(runtime));
  }
}

int visible_count() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) {
    raise(STRATA_FAILED_PRECONDITION, "no GPU is visible (", visible_devices(), ")");
  }
  if (error != cudaSuccess) {
    raise(STRATA_FAILED_PRECONDITION, "counting GPUs (", visible_devices(), "): ", describe(error));
  }
  return count;
}

int choose(int64_t device_id, int32_t local_rank, int count) {
  if (device_id < -1) {
    raise(STRATA_INVALID_ARGUMENT, "option device_id = ", device_id, ", it must be a GPU's number or -1 (local rank)");
  }
  const int64_t wanted = device_id >= 0 ? device_id : local_rank;
  if (wanted >= 0 && wanted < count) return static_cast<int>(wanted);
  raise(STRATA_FAILED_PRECONDITION, device_id >= 0 ? "option device_id" : "local rank", " = ", wanted, ", but ", count,
        count == 1 ? " GPU is" : " GPUs are", " visible (", visible_devices(), "); option device_id picks another");
}

void check_generation(int ordinal) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "properties of GPU ", ordinal);
  if (properties.major >= kOldestMajor) return;
  raise(STRATA_FAILED_PRECONDITION, "GPU ", ordinal, " (", properties.name, ") has compute capability ",
        properties.major, ".", properties.minor, ", at least ", kOldestMajor, ".0 is needed");
}

template <class Function>
Function driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), "looking up ", name);
  if (found != cudaDriverEntryPointSuccess) raise(STRATA_FAILED_PRECONDITION, "the NVIDIA driver has no ", name);
  return reinterpret_cast<Function>(function);
}

}  // namespace

Context Context::open(int64_t device_id, int32_t local_rank) {
  check_driver();
  Context context;
  context.ordinal_ = choose(device_id, local_rank, visible_count());
  check_generation(context.ordinal_);
  context.get_current_ = driver_function<GetCurrent>("cuCtxGetCurrent");
  context.set_current_ = driver_function<SetCurrent>("cuCtxSetCurrent");
  CUcontext previous = nullptr;
  context.get_current_(&previous);
  const cudaError_t error = cudaSetDevice(context.ordinal_);
  context.get_current_(&context.handle_);
  context.set_current_(previous);
  check(error, "opening GPU ", context.ordinal_, " (", visible_devices(), ")");
  return context;
}

Context::Scope::Scope(const Context& context) : context_(context) {
  context.get_current_(&previous_);
  if (previous_ != context.handle_) context.set_current_(context.handle_);
}

Context::Scope::~Scope() {
  if (previous_ != context_.handle_) context_.set_current_(previous_);
}

}  // namespace strata::cuda_kit
