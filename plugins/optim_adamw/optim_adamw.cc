// optim_adamw.cc - strata.optimizer/1 for Adam and AdamW in host memory: options, and the table.
//
// An instance is its options and a table of kernels, fixed at open; nothing changes afterwards, so every call but open
// and close may come from any thread, and instances with different modes share nothing. Arithmetic, scalars, layouts
// and the checks of arguments are in libs/adamw, the work over blocks in adamw_cpu.cc. A call checks everything before
// it writes anything: one that fails has left the slice as it was.
#include <cstring>
#include <string>

#include "adamw/arguments.h"
#include "adamw_cpu.h"
#include "plugin_kit/plugin_kit.h"
#include "strata/plugin.h"

using namespace strata::adamw;
using strata::plugin_kit::guard;
using strata::plugin_kit::host_interface;
using strata::plugin_kit::Options;
using strata::plugin_kit::raise;

struct strata_optim {
  const strata_host* host;
  const strata_sync_api* sync;
  Parallel parallel;
  const Kernels* kernels;
  Settings settings;
};

namespace {

Isa choose_isa(const std::string& asked) {
  if (asked == "auto") return best_isa();
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (asked != isa_name(isa)) continue;
    if (cpu_has(isa)) return isa;
    raise(STRATA_FAILED_PRECONDITION,
          "option isa asks for " + asked + ", which this CPU lacks; the widest it has is " + isa_name(best_isa()));
  }
  raise(STRATA_INVALID_ARGUMENT,
        "option isa is \"" + asked + "\", it must be \"auto\", \"scalar\", \"avx2\" or \"avx512\"");
}

void log(const strata_host* host, strata_log_level level, const std::string& text) {
  if (host->would_log(host->ctx, level)) host->log(host->ctx, level, "optim_adamw", text.c_str());
}

strata_status STRATA_CALL adamw_open(const strata_open_args* args, strata_optim** out) {
  const strata_host* host = args->host;
  return guard(host, "optim_adamw: open", [&] {
    const Settings settings = read_settings(args->options, {"isa", STRATA_OPT_STRING});
    const std::string asked = Options(args->options).text("isa", "auto");
    const Isa isa = choose_isa(asked);
    const auto* sync = host_interface<strata_sync_api>(host, STRATA_HOST_SYNC);
    const auto* executor = host_interface<strata_executor_api>(host, STRATA_HOST_EXECUTOR);
    *out = new strata_optim{host, sync, {executor, host->ctx}, kernels_of(isa), settings};
    const uint32_t threads = executor != nullptr ? executor->threads(host->ctx) : 1;
    log(host, STRATA_LOG_INFO,
        std::string("updates run with ") + isa_name(isa) + " (isa = \"" + asked + "\") on " + std::to_string(threads) +
            " threads; " + describe(settings));
    if (executor == nullptr) {
      log(host, STRATA_LOG_WARN, "the host lends no " STRATA_HOST_EXECUTOR ": every update runs on the calling thread");
    }
  });
}

void STRATA_CALL adamw_close(strata_optim* self) { delete self; }

strata_status STRATA_CALL adamw_layout(strata_optim* self, strata_dtype weight_dtype, strata_optim_layout* out) {
  return guard(self->host, "optim_adamw: layout", [&] { declare_layout(self->settings, weight_dtype, out); });
}

strata_status STRATA_CALL adamw_scalars(strata_optim* self, const strata_optim_group* group, uint64_t step,
                                        float* out) {
  return guard(self->host, "optim_adamw: scalars", [&] { compute_scalars(self->settings, *group, step, out); });
}

void check_domain(const strata_optim_args& a) {
  if (a.stream == nullptr || a.stream->domain == STRATA_CPU) return;
  raise(STRATA_UNIMPLEMENTED, "the stream is of device type ", a.stream->domain,
        "; this plugin updates in host memory, on streams of device type 1 (CPU)");
}

strata_status STRATA_CALL adamw_step(strata_optim* self, const strata_optim_args* args, strata_event* done) {
  const strata_status status = guard(self->host, "optim_adamw: step", [&] {
    if (done != nullptr && self->sync == nullptr) {
      raise(STRATA_FAILED_PRECONDITION, "an event was given, but the host lends no " STRATA_HOST_SYNC " to set it");
    }
    check_step(self->settings, *args);
    check_domain(*args);
    const Form form = form_of(self->settings, args->weight_dtype);
    if (args->apply == nullptr || *args->apply != 0) run_step(*self->kernels, self->parallel, form, *args);
  });
  if (status == STRATA_OK && done != nullptr) self->sync->set(done, STRATA_OK, nullptr);
  return status;
}

strata_status STRATA_CALL adamw_export(strata_optim* self, const strata_optim_args* args, uint32_t index, float* out) {
  return guard(self->host, "optim_adamw: export_array", [&] {
    const Canonical array = check_copy(self->settings, *args, index, out, false);
    check_domain(*args);
    run_export(self->parallel, form_of(self->settings, args->weight_dtype), *args, array, out);
  });
}

strata_status STRATA_CALL adamw_import(strata_optim* self, const strata_optim_args* args, uint32_t index,
                                       const float* in) {
  return guard(self->host, "optim_adamw: import_array", [&] {
    const Canonical array = check_copy(self->settings, *args, index, in, true);
    check_domain(*args);
    run_import(self->parallel, form_of(self->settings, args->weight_dtype), *args, array, in);
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

const strata_plugin descriptor = {sizeof(strata_plugin), STRATA_ABI_MINOR, "optim_adamw", "0.1.0", get_interface};

}  // namespace

extern "C" const strata_plugin* STRATA_CALL strata_plugin_entry_v1(uint32_t) { return &descriptor; }
