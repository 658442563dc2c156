// scalars.cc - the fp32 scalars of one step (settings.h). Nothing is remembered between calls: beta^step is a power of
// the step number, never a running product, so any number of sub-groups, a step number set by a load, and a beta
// changed in mid-run all give what one update over everything would.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "adamw/formula.h"
#include "adamw/settings.h"
#include "numbers/float_environment.h"
#include "plugin_kit/error.h"

namespace strata::adamw {

using plugin_kit::raise;

namespace {

// The settings are checked one by one, so that the text can name the first bad one.
struct Range {
  const char* name;
  double value;
  bool ok;
  const char* rule;
};

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

void check(const strata_optim_group& g, uint64_t step) {
  const auto not_negative = [](double x) { return std::isfinite(x) && x >= 0; };
  const auto beta = [](double x) { return x >= 0 && x < 1; };
  const Range ranges[] = {
      {"lr", g.lr, not_negative(g.lr), "finite and at least 0"},
      {"beta1", g.beta1, beta(g.beta1), "at least 0 and below 1"},
      {"beta2", g.beta2, beta(g.beta2), "at least 0 and below 1"},
      {"eps", g.eps, not_negative(g.eps), "finite and at least 0"},
      {"weight_decay", g.weight_decay, not_negative(g.weight_decay), "finite and at least 0"},
  };
  for (const Range& r : ranges) {
    if (!r.ok) raise(STRATA_INVALID_ARGUMENT, "AdamW: ", r.name, " is ", number(r.value), ", it must be ", r.rule);
  }
  if (step == 0) raise(STRATA_INVALID_ARGUMENT, "AdamW: step is 0, the first update is step 1");
}

// The coefficient of `toward` in formula.h.
double move(double beta) { return beta > 0.5 ? 1 - beta : -beta; }

}  // namespace

void compute_scalars(const Settings& settings, const strata_optim_group& group, uint64_t step, float* out) {
  if (!STRATA_HAS(&group, strata_optim_group, weight_decay)) {
    raise(STRATA_INVALID_ARGUMENT, "struct_size of strata_optim_group is ", group.struct_size, ", too small");
  }
  const numbers::FloatEnvironment environment;
  check(group, step);
  const double t = static_cast<double>(step);
  const double correction1 = 1 - std::pow(group.beta1, t);
  const double root2 = std::sqrt(1 - std::pow(group.beta2, t));
  double exact[STRATA_OPTIM_SCALARS] = {};
  exact[kMove1] = move(group.beta1);
  exact[kMove2] = move(group.beta2);
  exact[kStepSize] = group.lr * root2 / correction1;
  exact[kEpsHat] = group.eps * root2;
  exact[kDecay] = settings.decoupled ? group.lr * group.weight_decay : 0;
  exact[kL2] = settings.decoupled ? 0 : group.weight_decay;
  for (uint32_t i = 0; i < STRATA_OPTIM_SCALARS; ++i) {
    out[i] = static_cast<float>(exact[i]);
    // Beyond fp32's range a setting would become inf, and a tiny eps no eps at all, which makes 0/0 of a zero gradient.
    const bool eps_lost = i == kEpsHat && out[i] == 0 && exact[i] != 0;
    if (std::isfinite(out[i]) && !eps_lost) continue;
    std::fill(out, out + STRATA_OPTIM_SCALARS, 0.0f);
    raise(STRATA_INVALID_ARGUMENT, "AdamW: lr ", number(group.lr), ", eps ", number(group.eps), ", weight_decay ",
          number(group.weight_decay), ", beta1 ", number(group.beta1), ", beta2 ", number(group.beta2), " at step ",
          step, " need the fp32 scalar ", number(exact[i]), ", which is out of its range");
  }
}

}  // namespace strata::adamw
