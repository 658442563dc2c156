// adamw_scalars.cc - see adamw_scalars.h. Nothing is remembered between calls: beta^step is a power of the step number,
// never a running product, so any number of sub-groups, a step number set by a load, and a beta changed in mid-run
// all give what one update over everything would.
#include "adamw_scalars.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "adamw_ref.h"

namespace strata::adamw {
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

bool check(const strata_optim_group& g, uint64_t step, std::string* error) {
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
    if (r.ok) continue;
    *error = std::string("AdamW: ") + r.name + " is " + number(r.value) + ", it must be " + r.rule;
    return false;
  }
  if (step == 0) *error = "AdamW: step is 0, the first update is step 1";
  return step != 0;
}

// The coefficient of `toward` in adamw_ref.h.
double move(double beta) { return beta > 0.5 ? 1 - beta : -beta; }

}  // namespace

bool compute_scalars(const strata_optim_group& group, uint64_t step, bool decoupled, float* out, std::string* error) {
  if (!check(group, step, error)) return false;
  const double t = static_cast<double>(step);
  const double correction1 = 1 - std::pow(group.beta1, t);
  const double root2 = std::sqrt(1 - std::pow(group.beta2, t));
  double exact[STRATA_OPTIM_SCALARS] = {};
  exact[kMove1] = move(group.beta1);
  exact[kMove2] = move(group.beta2);
  exact[kStepSize] = group.lr * root2 / correction1;
  exact[kEpsHat] = group.eps * root2;
  exact[kDecay] = decoupled ? group.lr * group.weight_decay : 0;
  exact[kL2] = decoupled ? 0 : group.weight_decay;
  for (uint32_t i = 0; i < STRATA_OPTIM_SCALARS; ++i) {
    out[i] = static_cast<float>(exact[i]);
    // Beyond fp32's range a setting would become inf, and a tiny eps no eps at all, which makes 0/0 of a zero gradient.
    const bool eps_lost = i == kEpsHat && out[i] == 0 && exact[i] != 0;
    if (std::isfinite(out[i]) && !eps_lost) continue;
    *error = "AdamW: lr " + number(group.lr) + ", eps " + number(group.eps) + ", weight_decay " +
             number(group.weight_decay) + ", beta1 " + number(group.beta1) + ", beta2 " + number(group.beta2) +
             " at step " + std::to_string(step) + " need the fp32 scalar " + number(exact[i]) +
             ", which is out of its range";
    std::fill(out, out + STRATA_OPTIM_SCALARS, 0.0f);
    return false;
  }
  return true;
}

}  // namespace strata::adamw
