// settings.h - how an instance of an AdamW plugin was opened, and what follows from that alone: the arrays it keeps,
// the scalars of a step.
//
// All functions throw strata::plugin_kit::Error, with a text that names the setting. No state; any thread.
#pragma once

#include "adamw/forms.h"
#include "strata/iface/optimizer.h"

namespace strata::adamw {

struct Settings {
  bool split = false;
  bool decoupled = true;
};

// The one option a plugin has beside `layout` and `decoupled`; its value is the plugin's to read and judge.
struct OwnOption {
  const char* key;
  strata_option_type type;
};

Settings read_settings(const strata_options* options, const OwnOption& own);

// For a log line: "layout whole, decoupled decay (AdamW)".
const char* describe(const Settings& settings);

// UNIMPLEMENTED for a split master of F16 weights.
Form form_of(const Settings& settings, strata_dtype weight_dtype);

// strata_optimizer_api::layout.
void declare_layout(const Settings& settings, strata_dtype weight_dtype, strata_optim_layout* out);

// strata_optimizer_api::scalars: fills out[STRATA_OPTIM_SCALARS] by the layout of ScalarIndex. Arithmetic is fp64,
// every scalar is rounded once, and the result depends on the arguments only; scalars.cc.
void compute_scalars(const Settings& settings, const strata_optim_group& group, uint64_t step, float* out);

}  // namespace strata::adamw
