// optimizer.cc - strata.optimizer/1 on a simulated GPU: optim_adamw's numbers, on streams and in device memory.
//
// With a stream of this GPU a step is enqueued and its call returns; what the header lets go then (spans, scalars, the
// list of state arrays) is copied first. Addresses are looked up when the work runs.
#include "strata/iface/optimizer.h"

#include <vector>

#include "gpu.h"
#include "interfaces.h"
#include "plugin_kit/dtypes.h"

using gpu_sim::Gpu;
using gpu_sim::HostMemory;
using strata::plugin_kit::attempt;
using strata::plugin_kit::Error;
using strata::plugin_kit::guard;
using strata::plugin_kit::host_interface;
using strata::plugin_kit::join;
using strata::plugin_kit::raise;
using strata::plugin_kit::size_of;

struct strata_optim {
  const strata_host* host;
  std::shared_ptr<Gpu> gpu;
  const strata_optimizer_api* api;  // of optim_adamw
  strata_optim* inner;
};

namespace {

// A call's arguments with everything that is the caller's to change copied.
struct Call {
  strata_optim* self;
  strata_optim_args args;
  std::vector<strata_optim_span> spans;
  std::vector<float> scalars;
  std::vector<void*> state;
  std::vector<uint64_t> state_sizes;  // bytes of an element
  uint64_t end = 0;                   // of the spans, in elements

  Call(strata_optim* s, const strata_optim_args& given) : self(s), args(given) {
    for (uint64_t k = 0; k < given.span_count; ++k) {
      const char* at = reinterpret_cast<const char*>(given.spans) + k * given.span_stride;
      spans.push_back(*reinterpret_cast<const strata_optim_span*>(at));
      end = std::max(end, spans.back().offset + spans.back().length);
    }
    scalars.assign(given.scalars, given.scalars + given.scalar_sets * STRATA_OPTIM_SCALARS);
    strata_optim_layout layout{};
    layout.struct_size = sizeof(layout);
    if (const strata_status code = s->api->layout(s->inner, given.weight_dtype, &layout)) throw Error(code, "");
    for (uint32_t a = 0; a < layout.array_count; ++a) {
      state.push_back(given.state[a]);
      state_sizes.push_back(layout.arrays[a].bytes_per_element);
    }
  }

  // Brings the addresses to where this process can use them; throws an Error for one that is no memory of the GPU.
  void resolve() {
    const auto place = [this](const void* p, uint64_t bytes) {
      return bytes > 0 && p ? self->gpu->memory().resolve(p, bytes, HostMemory::kPinned) : nullptr;
    };
    args.spans = spans.data();
    args.span_stride = sizeof(strata_optim_span);
    args.scalars = scalars.data();
    args.grad = place(args.grad, end * (args.grad ? size_of(args.grad_dtype) : 0));
    args.weight = place(args.weight, end * size_of(args.weight_dtype));
    for (size_t a = 0; a < state.size(); ++a) state[a] = place(state[a], end * state_sizes[a]);
    args.state = state.data();
    args.stream = nullptr;
  }
};

strata_status STRATA_CALL optim_open(const strata_open_args* args, strata_optim** out) {
  return guard(args->host, "gpu_sim optimizer open", [&]() -> strata_status {
    auto* plugins = host_interface<strata_plugins_api>(args->host, STRATA_HOST_PLUGINS);
    if (!plugins) raise(STRATA_FAILED_PRECONDITION, "the host has no " STRATA_HOST_PLUGINS);
    strata_open_args inner_args = *args;
    const void* table = nullptr;
    if (auto code = plugins->find(args->host->ctx, "optim_adamw", STRATA_OPTIMIZER, &table)) return code;
    if (auto code = plugins->options(args->host->ctx, "optim_adamw", &inner_args.options)) return code;
    auto* api = static_cast<const strata_optimizer_api*>(table);
    strata_optim* inner = nullptr;
    if (auto code = api->open(&inner_args, &inner)) return code;
    auto gpu = Gpu::attach(args->job ? args->job : "", args->local_rank, gpu_sim::read_settings(args->options));
    *out = new strata_optim{args->host, std::move(gpu), api, inner};
    return STRATA_OK;
  });
}

void STRATA_CALL optim_close(strata_optim* self) {
  self->api->close(self->inner);
  delete self;
}

strata_status STRATA_CALL optim_layout(strata_optim* self, strata_dtype weight_dtype, strata_optim_layout* out) {
  const strata_status code = self->api->layout(self->inner, weight_dtype, out);
  if (code == STRATA_OK) out->memory = STRATA_CUDA;
  return code;
}

strata_status STRATA_CALL optim_scalars(strata_optim* self, const strata_optim_group* group, uint64_t step,
                                        float* out) {
  return self->api->scalars(self->inner, group, step, out);
}

strata_status STRATA_CALL optim_step(strata_optim* self, const strata_optim_args* args, strata_event* done) {
  return guard(self->host, "gpu_sim step", [&]() -> strata_status {
    auto call = std::make_shared<Call>(self, *args);
    const auto work = [call, self] {
      call->resolve();
      if (self->api->step(self->inner, &call->args, nullptr) != STRATA_OK) raise(STRATA_INTERNAL, "optim_adamw failed");
    };
    if (done) raise(STRATA_UNIMPLEMENTED, "steps with a done event");
    if (const auto stream = self->gpu->find_stream(args->stream)) {
      stream->push([gpu = self->gpu.get(), work] {
        if (gpu->failed()) return;
        const Error e = attempt(work);
        if (!e.ok()) gpu->fail({e.code(), join("the work of an earlier step: ", e.text())});
      });
    } else {
      work();
    }
    return STRATA_OK;
  });
}

strata_status STRATA_CALL optim_export(strata_optim* self, const strata_optim_args* args, uint32_t index, float* out) {
  return guard(self->host, "gpu_sim export_array", [&]() -> strata_status {
    Call call(self, *args);
    call.resolve();
    auto* to = self->gpu->memory().resolve(out, call.spans.at(0).length * sizeof(float), HostMemory::kPinned);
    return self->api->export_array(self->inner, &call.args, index, reinterpret_cast<float*>(to));
  });
}

strata_status STRATA_CALL optim_import(strata_optim* self, const strata_optim_args* args, uint32_t index,
                                       const float* in) {
  return guard(self->host, "gpu_sim import_array", [&]() -> strata_status {
    Call call(self, *args);
    call.resolve();
    auto* from = self->gpu->memory().resolve(in, call.spans.at(0).length * sizeof(float), HostMemory::kPinned);
    return self->api->import_array(self->inner, &call.args, index, reinterpret_cast<const float*>(from));
  });
}

}  // namespace

const strata_optimizer_api gpu_sim::optimizer_table = {sizeof(strata_optimizer_api),
                                                       STRATA_ABI_MINOR,
                                                       optim_open,
                                                       optim_close,
                                                       optim_layout,
                                                       optim_scalars,
                                                       optim_step,
                                                       optim_export,
                                                       optim_import};
