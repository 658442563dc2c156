#include "core/registry.h"

#include <boost/locale/utf.hpp>
#include <cmath>
#include <limits>

#include "core/hash.h"

namespace strata {

uint64_t dtype_size(strata_dtype dtype) {
  switch (dtype) {
    case STRATA_U8:
      return 1;
    case STRATA_BF16:
    case STRATA_F16:
    case STRATA_U16:
      return 2;
    case STRATA_F32:
      return 4;
    default:
      return 8;
  }
}

const char* dtype_name(strata_dtype dtype) {
  static const char* const names[] = {"none", "fp32", "bf16", "fp16", "u8", "u16", "i64", "fp64"};
  return dtype >= 0 && dtype <= STRATA_F64 ? names[dtype] : "unknown";
}

std::string shape_text(const int64_t* shape, int32_t ndim) {
  // More than any param has: there need not be that many numbers.
  if (ndim < 0 || ndim > kMostDimensions) return "[" + std::to_string(ndim) + " dimensions]";
  std::string text = "[";
  for (int32_t i = 0; shape && i < ndim; ++i) text += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

bool is_utf8(std::string_view text) {
  using Traits = boost::locale::utf::utf_traits<char>;
  for (const char* at = text.begin(); at != text.end();) {
    if (!boost::locale::utf::is_valid_codepoint(Traits::decode(at, text.end()))) return false;
  }
  return true;
}

Registry::Registry(const OptimizerSettings& defaults) {
  groups.push_back({sizeof(strata_optim_group), STRATA_ABI_MINOR, defaults.lr, defaults.betas[0], defaults.betas[1],
                    defaults.eps, defaults.weight_decay});
  group_has_lr.push_back(false);
}

Status Registry::add_group(const strata_group_args& args, uint32_t* out) {
  groups.push_back(groups[0]);
  set_given(args, &groups.back());
  group_has_lr.push_back(!std::isnan(args.lr));
  *out = static_cast<uint32_t>(groups.size() - 1);
  return Ok();
}

void Registry::drop_group() {
  groups.pop_back();
  group_has_lr.pop_back();
}

void Registry::set_given(const strata_group_args& given, strata_optim_group* group) {
  const auto set = [](double from, double* to) {
    if (!std::isnan(from)) *to = from;
  };
  set(given.lr, &group->lr);
  set(given.beta1, &group->beta1);
  set(given.beta2, &group->beta2);
  set(given.eps, &group->eps);
  set(given.weight_decay, &group->weight_decay);
}

Status Registry::add_unit(const std::string& name, uint32_t* out) {
  if (name.empty()) return {STRATA_INVALID_ARGUMENT, "a unit needs a name"};
  if (!unit_names_.emplace(name, units.size()).second) {
    return {STRATA_ALREADY_EXISTS, "unit \"" + name + "\" is registered already"};
  }
  *out = static_cast<uint32_t>(units.size());
  units.push_back({name, {}});
  return Ok();
}

Status Registry::add_param(uint32_t unit, const strata_param_args& args, uint32_t* out) {
  if (!args.name || !*args.name) return {STRATA_INVALID_ARGUMENT, "a param needs a name"};
  Param p;
  p.name = args.name;
  const std::string who = "param \"" + p.name + "\"";
  if (unit >= units.size()) return {STRATA_INVALID_ARGUMENT, who + ": there is no unit " + std::to_string(unit)};
  if (!is_weight_dtype(args.dtype)) {
    return {STRATA_INVALID_ARGUMENT, who + ": dtype must be fp32, bf16 or fp16, not " + dtype_name(args.dtype)};
  }
  if (args.group >= groups.size()) {
    return {STRATA_INVALID_ARGUMENT,
            who + ": there is no group " + std::to_string(args.group) + ", there are " + std::to_string(groups.size())};
  }
  if (args.ndim < 0 || args.ndim > kMostDimensions || (args.ndim > 0 && !args.shape)) {
    return {STRATA_INVALID_ARGUMENT,
            who + ": shape has " + std::to_string(args.ndim) + " dimensions" +
                (args.shape ? ", at most " + std::to_string(kMostDimensions) : " and is NULL")};
  }
  constexpr uint32_t kFlags = STRATA_PARAM_FROZEN | STRATA_PARAM_TENSOR_MODEL_PARALLEL | STRATA_PARAM_SHARED;
  if (args.flags & ~kFlags) {
    return {STRATA_INVALID_ARGUMENT, who + ": unknown flags " + std::to_string(args.flags)};
  }
  p.numel = 1;
  for (int32_t i = 0; i < args.ndim; ++i) {
    const int64_t d = args.shape[i];
    if (d < 0) return {STRATA_INVALID_ARGUMENT, who + ": dimension " + std::to_string(i) + " is negative"};
    // 2^60 elements keeps every byte count and rounding below 2^63.
    if (d != 0 && p.numel > (1ull << 60) / static_cast<uint64_t>(d)) {
      return {STRATA_INVALID_ARGUMENT, who + ": more than 2^60 elements"};
    }
    p.numel *= static_cast<uint64_t>(d);
    p.shape.push_back(d);
  }
  p.dtype = args.dtype;
  p.group = args.group;
  p.frozen = (args.flags & STRATA_PARAM_FROZEN) != 0;
  p.tensor_model_parallel = (args.flags & STRATA_PARAM_TENSOR_MODEL_PARALLEL) != 0;
  p.shared = (args.flags & STRATA_PARAM_SHARED) != 0;
  p.unit = unit;
  p.owner = static_cast<uint32_t>(params.size());
  if (args.tied > 1) {
    return {STRATA_INVALID_ARGUMENT, who + ": tied is " + std::to_string(args.tied) + ", it must be 0 or 1"};
  }
  if (args.tied) {
    if (args.tied_to >= params.size()) {
      return {STRATA_INVALID_ARGUMENT,
              who + ": tied to param " + std::to_string(args.tied_to) + ", which is not there"};
    }
    const Param& owner = params[params[args.tied_to].owner];
    if (owner.shape != p.shape || owner.dtype != p.dtype) {
      return {STRATA_INVALID_ARGUMENT,
              who + ": shape and dtype must equal those of \"" + owner.name + "\", to which it is tied"};
    }
    const bool flagged = (p.frozen && !owner.frozen) || (p.shared && !owner.shared) ||
                         (p.tensor_model_parallel && !owner.tensor_model_parallel);
    if (flagged || (p.group != 0 && p.group != owner.group)) {
      return {STRATA_INVALID_ARGUMENT, who + ": group and flags are those of \"" + owner.name +
                                           "\", to which it is tied; leave them out here or give the same"};
    }
    p.owner = params[args.tied_to].owner;
    p.frozen = owner.frozen;
    p.group = owner.group;
  }
  if (!param_names_.emplace(p.name, params.size()).second) {
    return {STRATA_ALREADY_EXISTS, who + " is registered already"};
  }
  *out = static_cast<uint32_t>(params.size());
  units[unit].params.push_back(*out);
  params.push_back(std::move(p));
  return Ok();
}

uint64_t Registry::fingerprint() const {
  uint64_t h = fnv1a("", 0);
  auto add = [&h](const void* p, size_t n) { h = fnv1a(p, n, h); };
  for (const auto& g : groups) {
    const double values[] = {g.lr, g.beta1, g.beta2, g.eps, g.weight_decay};
    add(values, sizeof(values));
  }
  for (const auto& u : units) add(u.name.c_str(), u.name.size() + 1);
  for (const auto& p : params) {
    add(p.name.c_str(), p.name.size() + 1);
    add(p.shape.data(), p.shape.size() * sizeof(int64_t));
    const uint32_t rest[] = {static_cast<uint32_t>(p.dtype), p.group, p.frozen, p.unit, p.owner,
                             p.tensor_model_parallel,        p.shared};
    add(rest, sizeof(rest));
  }
  return h;
}

}  // namespace strata
