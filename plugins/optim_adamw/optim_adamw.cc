// optim_adamw.cc - strata.optimizer/1 for Adam and AdamW: options, layout, checks of arguments, and the table.
//
// An instance is its options and a table of kernels, fixed at open; nothing changes afterwards, so every call but open
// and close may come from any thread, and instances with different modes share nothing. The arithmetic is in
// adamw_ref.h, the scalars in adamw_scalars.cc, the work over blocks in adamw_cpu.cc.
// A call checks everything before it writes anything: one that fails has left the slice as it was.
#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "adamw_cpu.h"
#include "adamw_scalars.h"
#include "strata/plugin.h"

using namespace strata::adamw;

struct strata_optim {
  const strata_host* host;
  const strata_sync_api* sync;
  Parallel parallel;
  const Kernels* kernels;
  Isa isa;
  bool split;
  bool decoupled;
};

namespace {

struct Failure {
  strata_status code;
  std::string text;
};
[[noreturn]] void fail(strata_status code, const std::string& text) { throw Failure{code, text}; }
[[noreturn]] void invalid(const std::string& text) { fail(STRATA_INVALID_ARGUMENT, text); }

// Runs the body of a slot; what it throws becomes a status with a text.
template <class Body>
strata_status slot(const strata_host* host, const char* what, Body body) noexcept {
  try {
    body();
    return STRATA_OK;
  } catch (const Failure& f) {
    return host->fail(host->ctx, f.code, (std::string("optim_adamw: ") + what + ": " + f.text).c_str());
  } catch (const std::bad_alloc&) {
    return host->fail(host->ctx, STRATA_RESOURCE_EXHAUSTED, "optim_adamw: memory is out");
  } catch (...) {
    return host->fail(host->ctx, STRATA_INTERNAL, "optim_adamw: unexpected exception");
  }
}

std::string dtype_name(strata_dtype dtype) {
  if (dtype == STRATA_F32) return "F32";
  if (dtype == STRATA_BF16) return "BF16";
  if (dtype == STRATA_F16) return "F16";
  return "dtype " + std::to_string(dtype);
}
bool is_float(strata_dtype dtype) { return dtype == STRATA_F32 || dtype == STRATA_BF16 || dtype == STRATA_F16; }

// --- open -------------------------------------------------------------------------------------------------------

struct Settings {
  std::string layout = "whole";
  std::string isa = "auto";
  bool decoupled = true;
};

void read_option(const strata_option& o, Settings* s) {
  const std::string key = o.key != nullptr ? o.key : "";
  const bool text = key == "layout" || key == "isa";
  if (!text && key != "decoupled") invalid("unknown option '" + key + "'; the options are layout, decoupled, isa");
  if (o.type != (text ? STRATA_OPT_STRING : STRATA_OPT_BOOL) || (text && o.s == nullptr)) {
    invalid("option " + key + " must be a " + (text ? "string" : "bool"));
  }
  if (key == "layout") s->layout = o.s;
  if (key == "isa") s->isa = o.s;
  if (key == "decoupled") s->decoupled = o.i != 0;
}

Settings read_settings(const strata_options* options) {
  Settings s;
  for (uint64_t k = 0; options != nullptr && k < options->count; ++k) {
    const char* item = reinterpret_cast<const char*>(options->items) + k * options->stride;
    read_option(*reinterpret_cast<const strata_option*>(item), &s);
  }
  if (s.layout != "whole" && s.layout != "split") {
    invalid("option layout is \"" + s.layout + "\", it must be \"whole\" or \"split\"");
  }
  return s;
}

Isa choose_isa(const std::string& asked) {
  if (asked == "auto") return best_isa();
  for (const Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (asked != isa_name(isa)) continue;
    if (cpu_has(isa)) return isa;
    fail(STRATA_FAILED_PRECONDITION,
         "option isa asks for " + asked + ", which this CPU lacks; the widest it has is " + isa_name(best_isa()));
  }
  invalid("option isa is \"" + asked + "\", it must be \"auto\", \"scalar\", \"avx2\" or \"avx512\"");
}

void log(const strata_host* host, strata_log_level level, const std::string& text) {
  if (host->would_log(host->ctx, level)) host->log(host->ctx, level, "optim_adamw", text.c_str());
}

strata_status STRATA_CALL adamw_open(const strata_open_args* args, strata_optim** out) {
  const strata_host* host = args->host;
  return slot(host, "open", [&] {
    const Settings s = read_settings(args->options);
    const Isa isa = choose_isa(s.isa);
    const auto* sync = static_cast<const strata_sync_api*>(host->get_interface(host->ctx, STRATA_HOST_SYNC));
    const auto* executor =
        static_cast<const strata_executor_api*>(host->get_interface(host->ctx, STRATA_HOST_EXECUTOR));
    *out = new strata_optim{host, sync, {executor, host->ctx}, kernels_of(isa), isa, s.layout == "split", s.decoupled};
    const uint32_t threads = executor != nullptr ? executor->threads(host->ctx) : 1;
    log(host, STRATA_LOG_INFO,
        std::string("updates run with ") + isa_name(isa) + " (isa = \"" + s.isa + "\") on " + std::to_string(threads) +
            " threads; layout " + s.layout + ", " +
            (s.decoupled ? "decoupled decay (AdamW)" : "decay in the gradient (Adam with L2)"));
    if (executor == nullptr) {
      log(host, STRATA_LOG_WARN, "the host lends no " STRATA_HOST_EXECUTOR ": every update runs on the calling thread");
    }
  });
}

void STRATA_CALL adamw_close(strata_optim* self) { delete self; }

// --- layout -----------------------------------------------------------------------------------------------------

Form form_of(const strata_optim& self, strata_dtype weight_dtype) {
  if (!is_float(weight_dtype)) invalid("weights are F32, BF16 or F16, not " + dtype_name(weight_dtype));
  if (!self.split) return weight_dtype == STRATA_F32 ? kWholeF32 : weight_dtype == STRATA_BF16 ? kWholeBf16 : kWholeF16;
  if (weight_dtype == STRATA_F32) return kSplitF32;
  if (weight_dtype == STRATA_BF16) return kSplitBf16;
  fail(STRATA_UNIMPLEMENTED,
       "layout = \"split\" keeps an fp32 master as the upper and lower 16 bits of one number, and an F16 weight is not "
       "the upper 16 bits of anything; use layout = \"whole\" (12 B per element) or BF16 weights");
}

strata_status STRATA_CALL adamw_layout(strata_optim* self, strata_dtype weight_dtype, strata_optim_layout* out) {
  return slot(self->host, "layout", [&] {
    if (!STRATA_HAS(out, strata_optim_layout, canonical)) {
      invalid("struct_size of strata_optim_layout is " + std::to_string(out->struct_size) + ", at least " +
              std::to_string(sizeof(strata_optim_layout)) + " bytes are needed");
    }
    const Form form = form_of(*self, weight_dtype);
    out->flags = is_split(form) ? STRATA_OPTIM_WEIGHT_IS_STATE : 0;
    out->array_count = 0;
    const auto add = [out](const char* name, strata_dtype dtype, uint32_t bytes) {
      out->arrays[out->array_count++] = {sizeof(strata_optim_array), STRATA_ABI_MINOR, name, dtype, bytes};
    };
    if (!is_split(form)) add("master", STRATA_F32, 4);
    if (form == kSplitBf16) add("master_low", STRATA_U16, 2);
    add("exp_avg", STRATA_F32, 4);
    add("exp_avg_sq", STRATA_F32, 4);
    out->canonical_count = kCanonicals;
    out->canonical[kMaster] = "master";
    out->canonical[kExpAvg] = "exp_avg";
    out->canonical[kExpAvgSq] = "exp_avg_sq";
  });
}

// --- scalars ----------------------------------------------------------------------------------------------------

strata_status STRATA_CALL adamw_scalars(strata_optim* self, const strata_optim_group* group, uint64_t step,
                                        float* out) {
  return slot(self->host, "scalars", [&] {
    if (!STRATA_HAS(group, strata_optim_group, weight_decay)) {
      invalid("struct_size of strata_optim_group is " + std::to_string(group->struct_size) + ", too small");
    }
    const FloatEnvironment environment;
    std::string error;
    if (!compute_scalars(*group, step, self->decoupled, out, &error)) invalid(error);
  });
}

// --- step, export, import ---------------------------------------------------------------------------------------

std::string describe(uint64_t k, const strata_optim_span& s) {
  return "span " + std::to_string(k) + " {offset " + std::to_string(s.offset) + ", length " + std::to_string(s.length) +
         ", scalar_set " + std::to_string(s.scalar_set) + "}";
}

// The end of the spans in elements; each is checked on the way.
uint64_t check_spans(const strata_optim_args& a, bool scalars) {
  if (a.span_count > 0 && (a.spans == nullptr || a.span_stride < sizeof(strata_optim_span))) {
    invalid(std::to_string(a.span_count) + " spans need an address and a stride of at least " +
            std::to_string(sizeof(strata_optim_span)) + " bytes, the stride is " + std::to_string(a.span_stride));
  }
  uint64_t end = 0;
  for (uint64_t k = 0; k < a.span_count; ++k) {
    const strata_optim_span& s = span_at(a, k);
    if (s.length > UINT64_MAX / 8 || s.offset > UINT64_MAX / 8 - s.length)
      invalid(describe(k, s) + " is beyond memory");
    if (scalars && s.scalar_set >= a.scalar_sets) {
      invalid(describe(k, s) + " names a set of scalars that is not there; there are " + std::to_string(a.scalar_sets));
    }
    if (s.length > 0) end = std::max(end, s.offset + s.length);
  }
  return end;
}

void check_pointers(const strata_optim& self, const strata_optim_args& a, bool weight) {
  const uint32_t arrays = form_of(self, a.weight_dtype) == kSplitF32 ? 2 : 3;
  if (weight && a.weight == nullptr) invalid("weight is NULL");
  if (a.state == nullptr) invalid("state is NULL");
  for (uint32_t k = 0; k < arrays; ++k) {
    if (a.state[k] == nullptr)
      invalid("state array " + std::to_string(k) + " of " + std::to_string(arrays) + " is NULL");
  }
}

// A weight may be written over exactly the gradient it comes from, but not over any other.
void check_overlap(const strata_optim& self, const strata_optim_args& a, uint64_t end) {
  const uint64_t grad_bytes = element_bytes(a.grad_dtype), weight_bytes = element_bytes(a.weight_dtype);
  const auto grad = reinterpret_cast<uintptr_t>(a.grad), weight = reinterpret_cast<uintptr_t>(a.weight);
  if (grad >= weight + end * weight_bytes || weight >= grad + end * grad_bytes) return;
  if (self.split) invalid("gradient and weight overlap; with layout = \"split\" the weight is read as well as written");
  if (grad == weight && grad_bytes == weight_bytes) return;
  invalid("gradient (" + dtype_name(a.grad_dtype) + ") and weight (" + dtype_name(a.weight_dtype) +
          ") overlap without being the same elements");
}

void check_common(const strata_optim_args& a) {
  if (!STRATA_HAS(&a, strata_optim_args, stream)) {
    invalid("struct_size of strata_optim_args is " + std::to_string(a.struct_size) + ", too small");
  }
  if (a.stream != nullptr && a.stream->domain != STRATA_CPU) {
    fail(STRATA_UNIMPLEMENTED, "the stream is of device type " + std::to_string(a.stream->domain) +
                                   "; this build updates in host memory, on streams of device type 1 (CPU)");
  }
}

void check_step(const strata_optim& self, const strata_optim_args& a) {
  check_common(a);
  form_of(self, a.weight_dtype);
  if (!is_float(a.grad_dtype)) invalid("gradients are F32, BF16 or F16, not " + dtype_name(a.grad_dtype));
  const uint64_t end = check_spans(a, true);
  if (end == 0) return;
  check_pointers(self, a, true);
  if (a.grad == nullptr) invalid("grad is NULL");
  if (a.scalars == nullptr) invalid("scalars is NULL");
  if (a.grad_scale == nullptr) invalid("grad_scale is NULL");
  check_overlap(self, a, end);
}

strata_status STRATA_CALL adamw_step(strata_optim* self, const strata_optim_args* args, strata_event* done) {
  const strata_status status = slot(self->host, "step", [&] {
    if (done != nullptr && self->sync == nullptr) {
      fail(STRATA_FAILED_PRECONDITION, "an event was given, but the host lends no " STRATA_HOST_SYNC " to set it");
    }
    check_step(*self, *args);
    const Form form = form_of(*self, args->weight_dtype);
    if (args->apply == nullptr || *args->apply != 0) run_step(*self->kernels, self->parallel, form, *args);
  });
  if (status == STRATA_OK && done != nullptr) self->sync->set(done, STRATA_OK, nullptr);
  return status;
}

Canonical check_copy(const strata_optim& self, const strata_optim_args& a, uint32_t index, const void* other,
                     bool import) {
  check_common(a);
  if (index >= kCanonicals) {
    fail(STRATA_OUT_OF_RANGE, "canonical array " + std::to_string(index) + " of " + std::to_string(kCanonicals));
  }
  if (a.span_count < 1) invalid("one span must say which elements");
  const Canonical array = static_cast<Canonical>(index);
  const bool weight = array == kMaster && (import || is_split(form_of(self, a.weight_dtype)));
  if (check_spans(a, false) == 0) return array;
  check_pointers(self, a, weight);
  if (other == nullptr) invalid("the canonical array is NULL");
  return array;
}

strata_status STRATA_CALL adamw_export(strata_optim* self, const strata_optim_args* args, uint32_t index, float* out) {
  return slot(self->host, "export_array", [&] {
    const Canonical array = check_copy(*self, *args, index, out, false);
    run_export(self->parallel, form_of(*self, args->weight_dtype), *args, array, out);
  });
}

strata_status STRATA_CALL adamw_import(strata_optim* self, const strata_optim_args* args, uint32_t index,
                                       const float* in) {
  return slot(self->host, "import_array", [&] {
    const Canonical array = check_copy(*self, *args, index, in, true);
    run_import(self->parallel, form_of(*self, args->weight_dtype), *args, array, in);
  });
}

// --- the plugin -------------------------------------------------------------------------------------------------

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
