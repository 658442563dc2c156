// sharded.cc - see sharded.h.
#include "sharded.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>

#include "data.h"

namespace gpt {

void check(strata_status status, const char* what) {
  if (status == STRATA_OK) return;
  throw std::runtime_error(std::string(what) + ": " + strata_status_name(status) + ": " + strata_last_error());
}

namespace {
// A line on stderr, over the progress bar of report.cc.
void STRATA_CALL log_over_bar(void*, strata_log_level level, const char* domain, const char* text) {
  const char* const mark = level >= STRATA_LOG_ERROR ? "error: " : level == STRATA_LOG_WARN ? "warning: " : "";
  std::fputs("\r\033[K", stdout);
  std::fflush(stdout);
  std::fprintf(stderr, "%s: %s%s\n", domain, mark, text);
}
}  // namespace

bool shows_bar() {
  const char* const terminal = std::getenv("TERM");
  return isatty(STDOUT_FILENO) && isatty(STDERR_FILENO) && terminal && std::strcmp(terminal, "dumb") != 0;
}

Engine open_engine(const std::string& manifest, const std::vector<std::string>& settings) {
  std::vector<const char*> overrides;
  for (const std::string& s : settings) overrides.push_back(s.c_str());
  strata_engine_args args;
  STRATA_INIT(&args);
  args.manifest = manifest.c_str();
  args.overrides = overrides.data();
  args.override_count = overrides.size();
  if (shows_bar()) args.log = log_over_bar;
  strata_engine* engine = nullptr;
  check(strata_open(&args, &engine), "opening the engine");
  Engine owner(engine);
  strata_ranks ranks;
  STRATA_INIT(&ranks);
  check(strata_get_ranks(engine, &ranks), "asking for the ranks");
  if (ranks.data_parallel_size == ranks.world) return owner;
  throw std::runtime_error(
      "this program does not split its model: tensor_model_parallel_size and pipeline_model_parallel_size must be 1");
}

std::string setting(strata_engine* engine, const char* key) {
  const char* value = nullptr;
  check(strata_get_setting(engine, key, &value), key);
  return value;
}
int64_t int_setting(strata_engine* engine, const char* key) { return std::stoll(setting(engine, key)); }
double float_setting(strata_engine* engine, const char* key) { return std::stod(setting(engine, key)); }

strata_dtype choose_dtype(strata_engine* engine, const std::string& dtype) {
  if (dtype == "bf16" || (dtype.empty() && setting(engine, "bf16.enabled") == "true")) return STRATA_BF16;
  return STRATA_F32;
}

ShardedModel::ShardedModel(strata_engine* engine, const Config& config, strata_dtype dtype)
    : engine_(engine),
      dtype_(dtype),
      units_(model_units(config)),
      contiguous_gradients_(setting(engine, "zero_optimization.contiguous_gradients") == "true") {
  // Two groups of params: matrices (group 0, as in the manifest) and the norms' gains, which do not decay.
  strata_group_args no_decay;
  STRATA_INIT(&no_decay);
  no_decay.lr = no_decay.beta1 = no_decay.beta2 = no_decay.eps = std::numeric_limits<double>::quiet_NaN();
  no_decay.weight_decay = 0;
  strata_group gains;
  check(strata_add_group(engine_, &no_decay, &gains), "adding the group of norm gains");

  std::map<std::string, strata_param> by_name;
  int64_t largest = 0;
  for (const UnitSpec& spec : units_) {
    strata_unit unit;
    check(strata_add_unit(engine_, spec.name.c_str(), &unit), "adding a unit");
    ids_.emplace_back();
    for (const ParamSpec& p : spec.params) {
      strata_param_args args;
      STRATA_INIT(&args);
      args.name = p.name.c_str();
      args.shape = p.shape.data();
      args.ndim = int32_t(p.shape.size());
      args.dtype = dtype_;
      args.group = p.init_std == 0 ? gains : 0;
      args.tied = p.tied_to.empty() ? 0 : 1;
      if (args.tied) args.tied_to = by_name.at(p.tied_to);
      check(strata_add_param(engine_, unit, &args, &by_name[p.name]), "adding a param");
      ids_.back().push_back(by_name[p.name]);
    }
    largest = std::max(largest, spec.elements());
  }
  check(strata_commit(engine_), "planning the model's memory");
  wide_.resize(size_t(largest));
  gradient_.assign(contiguous_gradients_ ? 1 : units_.size(), std::vector<Real>(size_t(largest)));
}

strata_tensor ShardedModel::tensor(const ParamSpec& spec, void* data, strata_dtype dtype) const {
  strata_tensor t;
  STRATA_INIT(&t);
  t.data = data;
  t.device_type = STRATA_CPU;
  t.dtype = dtype;
  t.ndim = int32_t(spec.shape.size());
  t.shape = spec.shape.data();
  return t;
}

void ShardedModel::initialize(uint64_t seed) {
  std::vector<float> values;
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t i = 0; i < ids_[u].size(); ++i) {
      const ParamSpec& spec = units_[u].params[i];
      if (!spec.tied_to.empty()) continue;
      values.assign(size_t(spec.elements()), 1.0f);
      const bool root = strata_rank(engine_) == 0;  // the other ranks get the values from rank 0
      if (root && spec.init_std != 0) {
        const uint64_t stream = stream_of(spec.name);
        for (size_t k = 0; k < values.size(); ++k) {
          values[k] = float(spec.init_std * random_normal(seed, stream, k));
        }
      }
      const strata_tensor value = tensor(spec, values.data(), STRATA_F32);
      check(strata_write_param(engine_, ids_[u][i], root ? &value : nullptr, 0), "writing initial weights");
    }
  }
}

const Real* const* ShardedModel::fetch(int unit) {
  check(strata_fetch(engine_, strata_unit(unit), nullptr), "fetching a unit");
  weight_pointers_.clear();
  float* room = wide_.data();
  for (strata_param id : ids_[size_t(unit)]) {
    strata_tensor t;
    STRATA_INIT(&t);
    check(strata_param_view(engine_, id, &t), "looking at a param");
    if (t.dtype == STRATA_F32) {
      weight_pointers_.push_back(static_cast<const float*>(t.data));
      continue;
    }
    int64_t count = 1;
    for (int i = 0; i < t.ndim; ++i) count *= t.shape[i];
    const auto* narrow = static_cast<const uint16_t*>(t.data);
    for (int64_t i = 0; i < count; ++i) {  // bf16 is the upper half of fp32
      const uint32_t bits = uint32_t(narrow[i]) << 16;
      std::memcpy(&room[i], &bits, sizeof bits);
    }
    weight_pointers_.push_back(room);
    room += count;
  }
  return weight_pointers_.data();
}

void ShardedModel::release(int unit) { check(strata_release(engine_, strata_unit(unit), nullptr), "releasing a unit"); }

Real* const* ShardedModel::gradients(int unit) {
  gradient_pointers_.clear();
  float* room = gradient_[contiguous_gradients_ ? 0 : size_t(unit)].data();
  for (const ParamSpec& p : units_[size_t(unit)].params) {
    gradient_pointers_.push_back(room);
    room += p.elements();
  }
  return gradient_pointers_.data();
}

void ShardedModel::hand_over(int unit) {
  const UnitSpec& spec = units_[size_t(unit)];
  for (size_t i = 0; i < spec.params.size(); ++i) {
    const strata_tensor gradient = tensor(spec.params[i], gradient_pointers_[i], STRATA_F32);
    check(strata_grad(engine_, ids_[size_t(unit)][i], &gradient, nullptr), "handing over a gradient");
  }
  check(strata_grads_done(engine_, strata_unit(unit)), "finishing a unit's gradients");
}

std::map<std::string, std::vector<float>> ShardedModel::read_all() {
  std::map<std::string, std::vector<float>> all;
  for (size_t u = 0; u < units_.size(); ++u) {
    for (size_t i = 0; i < ids_[u].size(); ++i) {
      const ParamSpec& spec = units_[u].params[i];
      std::vector<float>& values = all[spec.name];
      values.resize(size_t(spec.elements()));
      const strata_tensor out = tensor(spec, values.data(), STRATA_F32);
      check(strata_read_param(engine_, ids_[u][i], "weight", &out), "reading a weight");
    }
  }
  return all;
}

double ShardedModel::gather_bytes(int64_t passes, int64_t threshold, int64_t room) const {
  const double world = strata_world(engine_), size = dtype_ == STRATA_F32 ? 4 : 2;
  double bytes = 0;
  for (const UnitSpec& unit : units_) {
    for (const ParamSpec& p : unit.params) {
      if (!p.tied_to.empty()) continue;
      const int64_t elements = p.elements();
      const bool stays = elements <= threshold && elements <= room;
      if (stays) room -= elements;
      bytes += double(elements) * size * double(stays ? 1 : passes);
    }
  }
  return bytes * (world - 1) / world;
}

}  // namespace gpt
