// optim_adamw_cuda.cc - strata.optimizer/1 for Adam and AdamW on an NVIDIA GPU: options, streams, and the table.
//
// The numbers are optim_adamw's, bit for bit: scalars, layouts, checks and the formula are the same code (libs/adamw).
// An instance is fixed at open, so every call but open and close may come from any thread. Work goes to the caller's
// CUDA stream, or to the plugin's own for callers without one.
// A call checks everything before it writes anything: one that fails has left the slice as it was.
#include <cstring>
#include <memory>

#include "adamw/arguments.h"
#include "cuda_kit/context.h"
#include "cuda_kit/error.h"
#include "cuda_kit/stream.h"
#include "kernels.h"
#include "plugin_kit/plugin_kit.h"
#include "strata/iface/device.h"
#include "strata/plugin.h"
#include "update.h"

using namespace strata::adamw;
using strata::cuda_kit::check;
using strata::cuda_kit::Context;
using strata::cuda_kit::Pool;
using strata::cuda_kit::Work;
using strata::plugin_kit::Error;
using strata::plugin_kit::guard;
using strata::plugin_kit::host_interface;
using strata::plugin_kit::join;
using strata::plugin_kit::Options;
using strata::plugin_kit::raise;

struct strata_optim {
  strata_optim(const strata_host* lender, const Context& gpu, const Settings& opened_with)
      : host(lender),
        sync(host_interface<strata_sync_api>(lender, STRATA_HOST_SYNC)),
        context(gpu),
        settings(opened_with),
        pool(gpu.ordinal()) {}
  strata_optim(const strata_optim&) = delete;
  ~strata_optim() {
    if (own) cudaStreamDestroy(own);
  }

  Gpu gpu() { return {context.ordinal(), pool}; }

  const strata_host* host;
  const strata_sync_api* sync;
  Context context;
  Settings settings;
  Pool pool;
  cudaStream_t own = nullptr;  // of callers without a CUDA stream
};

namespace {

template <class Body>
strata_status call(strata_optim* self, const char* what, Body&& body) {
  return guard(self->host, what, [&] {
    const Context::Scope scope(self->context);
    body();
  });
}

// The GPU of the device plugin, where that is one.
int64_t device_of(const strata_open_args& args) {
  const auto* device = static_cast<const strata_device_api*>(args.device);
  if (device == nullptr) return -1;
  strata_device_caps caps{};
  caps.struct_size = sizeof(caps);
  const strata_status code = device->caps(static_cast<strata_device*>(args.device_self), &caps);
  if (code != STRATA_OK) throw Error(code, "");
  return caps.type == STRATA_CUDA ? caps.device_id : -1;
}

strata_status STRATA_CALL adamw_open(const strata_open_args* args, strata_optim** out) {
  const strata_host* host = args->host;
  return guard(host, "optim_adamw_cuda open", [&] {
    const Settings settings = read_settings(args->options, {"device_id", STRATA_OPT_INT});
    int64_t device_id = Options(args->options).integer("device_id", -1);
    if (device_id == -1) device_id = device_of(*args);
    const Context context = Context::open(device_id, args->local_rank);
    const Context::Scope scope(context);
    auto self = std::make_unique<strata_optim>(host, context, settings);
    check(cudaStreamCreateWithFlags(&self->own, cudaStreamNonBlocking), "a stream on GPU ", context.ordinal());
    check(load_kernels(), "loading the kernels");
    if (host->would_log(host->ctx, STRATA_LOG_INFO)) {
      const std::string text = join("updates run on GPU ", context.ordinal(), "; ", describe(settings));
      host->log(host->ctx, STRATA_LOG_INFO, "optim_adamw_cuda", text.c_str());
    }
    *out = self.release();
  });
}

void STRATA_CALL adamw_close(strata_optim* self) {
  const Context context = self->context;  // outlives what it is current for
  const Context::Scope scope(context);
  delete self;
}

strata_status STRATA_CALL adamw_layout(strata_optim* self, strata_dtype weight_dtype, strata_optim_layout* out) {
  return guard(self->host, "optim_adamw_cuda layout", [&] {
    declare_layout(self->settings, weight_dtype, out);
    if (STRATA_HAS(out, strata_optim_layout, memory)) out->memory = STRATA_CUDA;
  });
}

strata_status STRATA_CALL adamw_scalars(strata_optim* self, const strata_optim_group* group, uint64_t step,
                                        float* out) {
  return guard(self->host, "optim_adamw_cuda scalars", [&] { compute_scalars(self->settings, *group, step, out); });
}

Work work_on(strata_optim* self, const strata_optim_args& args) {
  return strata::cuda_kit::work_on(args.stream, self->own, self->context.ordinal());
}

strata_status STRATA_CALL adamw_step(strata_optim* self, const strata_optim_args* args, strata_event* done) {
  return call(self, "optim_adamw_cuda step", [&] {
    if (done != nullptr && self->sync == nullptr) {
      raise(STRATA_FAILED_PRECONDITION, "an event was given, but the host lends no " STRATA_HOST_SYNC " to set it");
    }
    const uint64_t elements = check_step(self->settings, *args);
    const Work work = work_on(self, *args);
    if (elements > 0) enqueue_step(self->gpu(), form_of(self->settings, args->weight_dtype), *args, work.stream);
    if (work.wait) check(cudaStreamSynchronize(work.stream), "waiting for an update");
    if (done == nullptr) return;
    if (work.wait) {
      self->sync->set(done, STRATA_OK, nullptr);
    } else {
      strata::cuda_kit::set_when_done(work.stream, self->sync, done, "optim_adamw_cuda step");
    }
  });
}

strata_status STRATA_CALL adamw_export(strata_optim* self, const strata_optim_args* args, uint32_t index, float* out) {
  return call(self, "optim_adamw_cuda export_array", [&] {
    const Canonical array = check_copy(self->settings, *args, index, out, false);
    const Work work = work_on(self, *args);
    if (span_at(*args, 0).length == 0) return;
    run_export(self->gpu(), form_of(self->settings, args->weight_dtype), *args, array, out, work.stream);
  });
}

strata_status STRATA_CALL adamw_import(strata_optim* self, const strata_optim_args* args, uint32_t index,
                                       const float* in) {
  return call(self, "optim_adamw_cuda import_array", [&] {
    const Canonical array = check_copy(self->settings, *args, index, in, true);
    const Work work = work_on(self, *args);
    if (span_at(*args, 0).length == 0) return;
    run_import(self->gpu(), form_of(self->settings, args->weight_dtype), *args, array, in, work.stream);
  });
}

const strata_optimizer_api optimizer_table = {sizeof(strata_optimizer_api),
                                              STRATA_ABI_MINOR,
                                              adamw_open,
                                              adamw_close,
                                              adamw_layout,
                                              adamw_scalars,
                                              adamw_step,
                                              adamw_export,
                                              adamw_import};

const void* STRATA_CALL get_interface(const char* id) {
  return id != nullptr && std::strcmp(id, STRATA_OPTIMIZER) == 0 ? &optimizer_table : nullptr;
}

const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "optim_adamw_cuda", "0.1.0", get_interface};

}  // namespace

extern "C" const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }
