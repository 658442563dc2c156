// fault_optimizer.cc - the wrapper of strata.optimizer/1. A held step with an event has not begun: weights and state
// are as they were until its gate opens.
#include "interfaces.h"

struct strata_optim : strata::fault::Wrapper<strata_optimizer_api, strata_optim> {};

namespace strata::fault {

const Interface kOptimizer = {STRATA_OPTIMIZER,
                              "optimizer",
                              {{"open", true, false},
                               {"close", false, false},
                               {"layout", true, false},
                               {"scalars", true, false},
                               {"step", true, false},
                               {"export_array", true, false},
                               {"import_array", true, false}}};

namespace {

strata_status STRATA_CALL optim_open(const strata_open_args* args, strata_optim** out) {
  return open_wrapper(kOptimizer, args, out);
}
void STRATA_CALL optim_close(strata_optim* self) { close_wrapper(self); }

strata_status STRATA_CALL optim_layout(strata_optim* self, strata_dtype weight_dtype, strata_optim_layout* out) {
  return self->shim.call("layout", 0, [&] { return self->api->layout(self->inner, weight_dtype, out); });
}
strata_status STRATA_CALL optim_scalars(strata_optim* self, const strata_optim_group* group, uint64_t step,
                                        float* out) {
  return self->shim.call("scalars", 0, [&] { return self->api->scalars(self->inner, group, step, out); });
}

uint64_t span_elements(const strata_optim_args* args) {
  uint64_t elements = 0;
  for (uint64_t k = 0; k < args->span_count; ++k) {
    const char* at = reinterpret_cast<const char*>(args->spans) + k * args->span_stride;
    elements += reinterpret_cast<const strata_optim_span*>(at)->length;
  }
  return elements;
}

strata_status STRATA_CALL optim_step(strata_optim* self, const strata_optim_args* args, strata_event* done) {
  // The struct and its stream are the caller's again when this returns; what they point at lasts until done.
  const strata_optim_args copy = *args;
  const strata_stream stream = args->stream ? *args->stream : strata_stream{};
  return self->shim.defer("step", span_elements(args) * plugin_kit::size_of(args->weight_dtype), done,
                          [=](strata_event* event) {
                            strata_optim_args inner_args = copy;
                            if (copy.stream) inner_args.stream = &stream;
                            return self->api->step(self->inner, &inner_args, event);
                          });
}

strata_status STRATA_CALL optim_export(strata_optim* self, const strata_optim_args* args, uint32_t index, float* out) {
  return self->shim.call("export_array", 4 * span_elements(args),
                         [&] { return self->api->export_array(self->inner, args, index, out); });
}
strata_status STRATA_CALL optim_import(strata_optim* self, const strata_optim_args* args, uint32_t index,
                                       const float* in) {
  return self->shim.call("import_array", 4 * span_elements(args),
                         [&] { return self->api->import_array(self->inner, args, index, in); });
}

}  // namespace

const strata_optimizer_api optimizer_table = {
    sizeof(strata_optimizer_api),
    STRATA_ABI_MINOR,
    optim_open,
    optim_close,
    optim_layout,
    optim_scalars,
    optim_step,
    optim_export,
    optim_import,
};

}  // namespace strata::fault
