#include "tests/train/reference.h"

#include <cmath>
#include <cstring>

namespace strata::test {

namespace {

uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, sizeof(b));
  return b;
}
float from_bits(uint32_t b) {
  float x;
  std::memcpy(&x, &b, sizeof(x));
  return x;
}
// To nearest; ties to even for gradients, away from zero for weights.
float bf16_even(float x) { return from_bits((bits_of(x) + 0x7fffu + ((bits_of(x) >> 16) & 1u)) & 0xffff0000u); }
float bf16_away(float x) { return from_bits((bits_of(x) + 0x8000u) & 0xffff0000u); }

struct State {
  std::vector<double> master, m, v;
  std::vector<float> weight;
  int applied = 0;
};

// The gradient the norm and the update see: sums over names, micro-batches and ranks in fp32, in that order, with the
// roundings contract 9 names. Where full gradients are accumulated, micro-batches come before ranks.
std::vector<float> reduced(const Trial& t, const Model& model, size_t owner, int step, const std::vector<float>& weight,
                           bool* used) {
  const ModelParam& p = model.params[owner];
  const bool local = t.micro_batches > 1 && t.stage < 2;
  const bool narrow = p.dtype == STRATA_BF16 && !local;
  *used = false;
  // One rank's contribution: over names within a micro-batch, or over everything it accumulates.
  auto contribution = [&](int rank, int first, int last, uint64_t i) {
    float sum = 0;
    int parts = 0;
    for (int micro = first; micro < last; ++micro) {
      for (size_t k = model.params.size(); k-- > 0;) {
        const ModelParam& name = model.params[k];
        const bool mine = k == owner || name.tied_to == static_cast<int>(owner);
        if (!mine || (static_cast<uint32_t>(name.unit) == t.skip_unit && step % 2)) continue;
        *used = true;
        const float g = gradient_noise(step, micro, rank, k, i) + weight[i];
        sum = parts++ == 0 ? (narrow ? bf16_even(g) : g) : sum + g;
      }
    }
    return narrow ? bf16_even(sum) : sum;
  };
  std::vector<float> all(p.numel());
  const int rounds = local ? 1 : t.micro_batches;
  for (uint64_t i = 0; i < all.size(); ++i) {
    for (int round = 0; round < rounds; ++round) {
      float over_ranks = 0;
      for (int rank = 0; rank < t.world; ++rank) {
        const float one = local ? contribution(rank, 0, t.micro_batches, i) : contribution(rank, round, round + 1, i);
        over_ranks = rank == 0 ? one : over_ranks + one;
      }
      all[i] = round == 0 ? over_ranks : all[i] + over_ranks;
    }
    if (narrow && t.micro_batches == 1) all[i] = bf16_even(all[i]);
  }
  return all;
}

strata_group_args settings_of(const Trial& t, int step, int group) {
  strata_group_args s = {sizeof(s), 0, group == 1 ? 0.005 : 0.01 / step, 0.9, 0.99, 1e-8, group == 1 ? 0.0 : 0.1};
  if (!t.change_settings) return s;
  const strata_group_args own = step_settings(step)[static_cast<size_t>(group)];
  const auto either = [](double given, double otherwise) { return std::isnan(given) ? otherwise : given; };
  s.lr = either(own.lr, s.lr);
  s.beta1 = either(own.beta1, s.beta1);
  s.beta2 = either(own.beta2, s.beta2);
  s.eps = either(own.eps, s.eps);
  s.weight_decay = either(own.weight_decay, s.weight_decay);
  return s;
}

void update(State& s, const std::vector<float>& g, const ModelParam& p, double scale, const strata_group_args& with) {
  const double lr = with.lr, decay = with.weight_decay, b1 = with.beta1, b2 = with.beta2, eps = with.eps;
  ++s.applied;
  for (size_t i = 0; i < g.size(); ++i) {
    const double x = g[i] * scale;
    s.m[i] = b1 * s.m[i] + (1 - b1) * x;
    s.v[i] = b2 * s.v[i] + (1 - b2) * x * x;
    const double m = s.m[i] / (1 - std::pow(b1, s.applied)), v = s.v[i] / (1 - std::pow(b2, s.applied));
    s.master[i] = s.master[i] * (1 - lr * decay) - lr * m / (std::sqrt(v) + eps);
    const auto w = static_cast<float>(s.master[i]);
    s.weight[i] = p.dtype == STRATA_BF16 ? bf16_away(w) : w;
  }
}

std::vector<float> floats(const std::vector<double>& from) { return {from.begin(), from.end()}; }

}  // namespace

Result reference(const Trial& t) {
  const Model model = odd_model();
  std::vector<State> states(model.params.size());
  for (size_t k = 0; k < states.size(); ++k) {
    const ModelParam& p = model.params[k];
    for (uint64_t i = 0; i < p.numel(); ++i) {
      const float x = initial_value(k, i);
      states[k].master.push_back(x);
      states[k].weight.push_back(p.dtype == STRATA_BF16 ? bf16_away(x) : x);
    }
    states[k].m.resize(p.numel());
    states[k].v.resize(p.numel());
  }
  Result out;
  for (int step = 1; step <= t.steps; ++step) {
    std::vector<std::vector<float>> grads(states.size());
    std::vector<bool> used(model.units.size(), false);
    double squares = 0;
    for (size_t k = 0; k < states.size(); ++k) {
      const ModelParam& p = model.params[k];
      if (p.tied_to >= 0 || p.frozen) continue;
      bool any = false;
      grads[k] = reduced(t, model, k, step, states[k].weight, &any);
      if (any) used[static_cast<size_t>(p.unit)] = true;
      for (double g : grads[k]) squares += g * g;
    }
    const double parts = static_cast<double>(t.world) * t.micro_batches;
    const double norm = std::sqrt(squares) / parts;
    const double clip = t.clip > 0 ? std::min(1.0, t.clip / (norm + 1e-6)) : 1.0;
    out.norms.push_back(norm);
    for (size_t k = 0; k < states.size(); ++k) {
      const ModelParam& p = model.params[k];
      if (p.tied_to >= 0 || p.frozen || !used[static_cast<size_t>(p.unit)]) continue;
      update(states[k], grads[k], p, clip / parts, settings_of(t, step, p.group));
    }
  }
  for (size_t k = 0; k < states.size(); ++k) {
    const ModelParam& p = model.params[k];
    const State& s = states[p.tied_to >= 0 ? static_cast<size_t>(p.tied_to) : k];
    out.weights[p.name] = s.weight;
    if (p.frozen) continue;
    out.master[p.name] = floats(s.master);
    out.exp_avg[p.name] = floats(s.m);
    out.exp_avg_sq[p.name] = floats(s.v);
  }
  return out;
}

}  // namespace strata::test
