// settings.cc - see settings.h.
#include "adamw/settings.h"

#include <string>

#include "adamw/arguments.h"
#include "plugin_kit/dtypes.h"
#include "plugin_kit/error.h"

namespace strata::adamw {

using plugin_kit::raise;

namespace {

const char* type_name(strata_option_type type) {
  return type == STRATA_OPT_STRING ? "a string" : type == STRATA_OPT_BOOL ? "a bool" : "an integer";
}

void read_option(const strata_option& o, const OwnOption& own, Settings* settings) {
  const std::string key = o.key != nullptr ? o.key : "";
  if (key != "layout" && key != "decoupled" && key != own.key) {
    raise(STRATA_INVALID_ARGUMENT, "unknown option '", key, "'; the options are layout, decoupled, ", own.key);
  }
  const strata_option_type type = key == "layout"      ? strata_option_type{STRATA_OPT_STRING}
                                  : key == "decoupled" ? strata_option_type{STRATA_OPT_BOOL}
                                                       : own.type;
  if (o.type != type || (type == STRATA_OPT_STRING && o.s == nullptr)) {
    raise(STRATA_INVALID_ARGUMENT, "option ", key, " must be ", type_name(type));
  }
  if (key == "decoupled") settings->decoupled = o.i != 0;
  if (key != "layout") return;
  const std::string layout = o.s;
  if (layout != "whole" && layout != "split") {
    raise(STRATA_INVALID_ARGUMENT, "option layout is \"", layout, "\", it must be \"whole\" or \"split\"");
  }
  settings->split = layout == "split";
}

}  // namespace

Settings read_settings(const strata_options* options, const OwnOption& own) {
  Settings settings;
  for (uint64_t k = 0; options != nullptr && k < options->count; ++k) {
    const char* item = reinterpret_cast<const char*>(options->items) + k * options->stride;
    read_option(*reinterpret_cast<const strata_option*>(item), own, &settings);
  }
  return settings;
}

const char* describe(const Settings& s) {
  if (s.split) {
    return s.decoupled ? "layout split, decoupled decay (AdamW)" : "layout split, decay in the gradient (Adam with L2)";
  }
  return s.decoupled ? "layout whole, decoupled decay (AdamW)" : "layout whole, decay in the gradient (Adam with L2)";
}

Form form_of(const Settings& settings, strata_dtype weight_dtype) {
  if (!plugin_kit::is_float(weight_dtype)) {
    raise(STRATA_INVALID_ARGUMENT, "weights are F32, BF16 or F16, not ", dtype_name(weight_dtype));
  }
  if (!settings.split) {
    return weight_dtype == STRATA_F32 ? kWholeF32 : weight_dtype == STRATA_BF16 ? kWholeBf16 : kWholeF16;
  }
  if (weight_dtype == STRATA_F32) return kSplitF32;
  if (weight_dtype == STRATA_BF16) return kSplitBf16;
  raise(
      STRATA_UNIMPLEMENTED,
      "layout = \"split\" keeps an fp32 master as the upper and lower 16 bits of one number, and an F16 weight is not "
      "the upper 16 bits of anything; use layout = \"whole\" (12 B per element) or BF16 weights");
}

void declare_layout(const Settings& settings, strata_dtype weight_dtype, strata_optim_layout* out) {
  if (!STRATA_HAS(out, strata_optim_layout, canonical)) {
    raise(STRATA_INVALID_ARGUMENT, "struct_size of strata_optim_layout is ", out->struct_size, ", at least ",
          sizeof(strata_optim_layout), " bytes are needed");
  }
  const Form form = form_of(settings, weight_dtype);
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
}

}  // namespace strata::adamw
