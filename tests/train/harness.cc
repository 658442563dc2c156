#include "tests/train/harness.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <memory>
#include <sstream>
#include <thread>

namespace strata::test {

uint64_t ModelParam::numel() const {
  uint64_t n = 1;
  for (int64_t d : shape) n *= static_cast<uint64_t>(d);
  return n;
}

Model odd_model() {
  Model m;
  m.units = {"embed", "layer0", "layer1", "layer2", "head"};
  m.params = {
      {"embed.weight", {71, 64}, STRATA_BF16, 0, 0, false, -1},
      {"embed.scale", {}, STRATA_BF16, 0, 1, false, -1},
      {"layer0.weight", {64, 97}, STRATA_BF16, 1, 0, false, -1},
      {"layer0.bias", {97}, STRATA_BF16, 1, 1, false, -1},
      {"layer0.empty", {0, 4}, STRATA_BF16, 1, 0, false, -1},
      {"layer1.weight", {33, 65}, STRATA_BF16, 2, 0, false, -1},
      {"layer1.norm", {33}, STRATA_F32, 2, 1, false, -1},
      {"layer1.frozen", {40, 3}, STRATA_BF16, 2, 0, true, -1},
      {"layer2.weight", {5, 7}, STRATA_BF16, 3, 0, false, -1},
      {"layer2.tiny", {3}, STRATA_BF16, 3, 0, false, -1},
      {"head.bias", {71}, STRATA_F32, 4, 1, false, -1},
      {"head.weight", {71, 64}, STRATA_BF16, 4, 0, false, 0},
  };
  return m;
}

float initial_value(size_t param, uint64_t i) {
  return static_cast<float>(0.05 * std::sin(1.7 * static_cast<double>(param) + 0.37 * static_cast<double>(i)));
}

float gradient_noise(int step, int micro, int rank, size_t param, uint64_t i) {
  const double phase =
      0.61 * static_cast<double>(i % 1009) + 1.3 * static_cast<double>(param) + 2.1 * step + 0.7 * micro + 3.7 * rank;
  return static_cast<float>(0.02 * std::cos(phase));
}

std::array<strata_group_args, 2> step_settings(int step) {
  constexpr uint32_t kSize = sizeof(strata_group_args);
  const double none = std::nan("");
  if (step == 1) return {{{kSize, 0, none, none, none, none, none}, {kSize, 0, none, none, none, none, none}}};
  return {{{kSize, 0, none, 0.95 - 0.1 * (step % 3), 0.999, none, 0.1 * step},
           {kSize, 0, 0.02 / step, none, 0.97, 1e-4, 0.05}}};
}

bool Result::operator==(const Result& o) const {
  auto same = [](const auto& a, const auto& b) {
    if (a.size() != b.size()) return false;
    for (const auto& [name, values] : a) {
      const auto it = b.find(name);
      if (it == b.end() || it->second.size() != values.size()) return false;
      if (!values.empty() && std::memcmp(values.data(), it->second.data(), values.size() * sizeof(float)) != 0)
        return false;
    }
    return true;
  };
  return error == o.error && same(weights, o.weights) && same(master, o.master) && same(exp_avg, o.exp_avg) &&
         same(exp_avg_sq, o.exp_avg_sq) && norms.size() == o.norms.size() &&
         (norms.empty() || std::memcmp(norms.data(), o.norms.data(), norms.size() * sizeof(double)) == 0);
}

std::string manifest_of(const Trial& t) {
  std::ostringstream s;
  s << "train_micro_batch_size_per_gpu = 1\n"
    << "gradient_accumulation_steps = " << t.micro_batches << "\n"
    << "gradient_clipping = " << t.clip << "\n"
    << "deadline_seconds = 20\nthreads = 1\nlog_level = \"warn\"\n";
  if (t.gpu == "gpu_sim") {
    s << "[plugins]\npath = [\"" << STRATA_TEST_PLUGIN_DIR << "\"]\n"
      << "device = \"gpu_sim\"\ncollective = \"gpu_sim\"\n"
      << (t.offload_optimizer == "none" ? "optimizer = \"gpu_sim\"\n" : "")
      << (t.device_updates ? "device_optimizer = \"gpu_sim\"\n" : "")  //
      << "[plugin.gpu_sim]\ndelay_us = " << t.gpu_delay_us << "\n";
  } else if (t.gpu == "device_cuda") {
    s << "[plugins]\ndevice = \"device_cuda\"\n"
      << "collective = \"" << (t.world == 1 ? "comm_local" : "comm_nccl") << "\"\n"
      << (t.offload_optimizer == "none" ? "optimizer = \"optim_adamw_cuda\"\n" : "");
  }
  s << "[optimizer]\ntype = \"AdamW\"\n"
    << "[optimizer.params]\nlr = 0.01\nbetas = [0.9, 0.99]\neps = 1e-8\nweight_decay = 0.1\n"
    << "[zero_optimization]\nstage = " << t.stage << "\n";
  if (t.offload_optimizer != "none") {
    s << "[zero_optimization.offload_optimizer]\ndevice = \"" << t.offload_optimizer << "\"\n";
  }
  if (t.offload_param != "none") s << "[zero_optimization.offload_param]\ndevice = \"" << t.offload_param << "\"\n";
  s << t.manifest_extra;
  return s.str();
}

namespace {
void STRATA_CALL log_of(void* trial, strata_log_level level, const char*, const char* text) {
  if (trial) static_cast<const Trial*>(trial)->log(level, text);
}

std::string failure(const char* what) { return std::string(what) + ": " + strata_last_error(); }

strata_tensor fp32_tensor(const ModelParam& p, float* data) {
  strata_tensor t;
  STRATA_INIT(&t);
  t.data = data;
  t.device_type = STRATA_CPU;
  t.dtype = STRATA_F32;
  t.ndim = static_cast<int32_t>(p.shape.size());
  t.shape = p.shape.data();
  return t;
}

float load_value(const strata_tensor& t, uint64_t i) {
  if (t.dtype == STRATA_F32) return static_cast<const float*>(t.data)[i];
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(t.data)[i]) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
}  // namespace

strata_engine* open_rank(const Trial& t, const std::string& job, int rank, std::string* error,
                         const strata_lender* gradient_memory, strata_status* code) {
  const std::string manifest = manifest_of(t);
  std::vector<const char*> overrides;
  for (const std::string& o : t.overrides) overrides.push_back(o.c_str());
  strata_engine_args args;
  STRATA_INIT(&args);
  args.manifest_text = manifest.c_str();
  args.overrides = overrides.data();
  args.override_count = overrides.size();
  args.plugin_dir = STRATA_PLUGIN_DIR;
  args.log = log_of;
  args.log_ctx = t.log ? const_cast<Trial*>(&t) : nullptr;
  args.job = job.empty() ? nullptr : job.c_str();
  args.threads = !job.empty();
  args.rank = rank;
  args.world = t.world;
  args.gradient_memory = gradient_memory;
  strata_engine* engine = nullptr;
  const strata_status status = strata_open(&args, &engine);
  if (status != STRATA_OK) *error = failure("open");
  if (code) *code = status;
  return engine;
}

std::string build_model(strata_engine* e, const Model& m) {
  strata_group_args group;
  STRATA_INIT(&group);
  group.lr = 0.005;
  group.beta1 = group.beta2 = group.eps = std::nan("");
  group.weight_decay = 0;
  strata_group no_decay = 0;
  if (strata_add_group(e, &group, &no_decay) != STRATA_OK) return failure("add_group");
  for (const std::string& name : m.units) {
    strata_unit unit;
    if (strata_add_unit(e, name.c_str(), &unit) != STRATA_OK) return failure("add_unit");
  }
  for (const ModelParam& p : m.params) {
    strata_param_args args;
    STRATA_INIT(&args);
    args.name = p.name.c_str();
    args.shape = p.shape.data();
    args.ndim = static_cast<int32_t>(p.shape.size());
    args.dtype = p.dtype;
    args.group = static_cast<strata_group>(p.group);
    args.flags = p.frozen ? STRATA_PARAM_FROZEN : 0;
    args.tied = p.tied_to >= 0;
    args.tied_to = p.tied_to >= 0 ? static_cast<strata_param>(p.tied_to) : 0;
    strata_param id;
    if (strata_add_param(e, static_cast<strata_unit>(p.unit), &args, &id) != STRATA_OK) return failure("add_param");
  }
  if (strata_commit(e) != STRATA_OK) return failure("commit");
  for (size_t k = 0; k < m.params.size(); ++k) {
    if (m.params[k].tied_to >= 0) continue;
    std::vector<float> values(m.params[k].numel());
    for (uint64_t i = 0; i < values.size(); ++i) values[i] = initial_value(k, i);
    const strata_tensor t = fp32_tensor(m.params[k], values.data());
    if (strata_write_param(e, static_cast<strata_param>(k), strata_rank(e) == 0 ? &t : nullptr, 0) != STRATA_OK) {
      return failure("write_param");
    }
  }
  return "";
}

namespace {

// A param's gradient: of fetched weights on the CPU, in memory that `values` keeps ...
strata_tensor cpu_gradient(const ModelParam& p, const strata_tensor& weight, std::vector<float>* values) {
  for (uint64_t i = 0; i < values->size(); ++i) (*values)[i] += load_value(weight, i);
  return fp32_tensor(p, values->data());
}

bool is_tied(const Model& m, size_t k) {
  return m.params[k].tied_to >= 0 || std::any_of(m.params.begin(), m.params.end(),
                                                 [k](const ModelParam& p) { return p.tied_to == static_cast<int>(k); });
}

// ... and of all params of a unit, handed over: every other step in one call, where one param comes twice, with zeros
// first, so that whoever does not add them in their order loses the gradient.
std::string give_gradients(strata_engine* e, const Model& m, strata_unit unit, int step, int micro, int rank,
                           std::deque<std::vector<float>>* kept, Gpu* gpu) {
  const bool together = step % 2 == 1;
  std::vector<strata_param> params;
  std::vector<strata_tensor> tensors;
  for (size_t k = 0; k < m.params.size(); ++k) {
    const ModelParam& p = m.params[k];
    if (p.unit != static_cast<int>(unit) || p.frozen) continue;
    strata_tensor view;
    STRATA_INIT(&view);
    if (strata_param_view(e, static_cast<strata_param>(k), &view) != STRATA_OK) return failure("view");
    std::vector<float>& g = kept->emplace_back(p.numel());
    for (uint64_t i = 0; i < g.size(); ++i) g[i] = gradient_noise(step, micro, rank, k, i);
    const strata_tensor t = gpu ? gpu->gradient(view, g) : cpu_gradient(p, view, &g);
    if (together && params.empty() && !is_tied(m, k)) {
      params.push_back(static_cast<strata_param>(k));
      tensors.push_back(gpu ? gpu->zeros(view, p.numel()) : fp32_tensor(p, kept->emplace_back(p.numel()).data()));
    }
    params.push_back(static_cast<strata_param>(k));
    tensors.push_back(t);
  }
  const strata_stream* stream = gpu ? gpu->stream() : nullptr;
  const size_t each = together ? params.size() : 1;
  for (size_t k = 0; k < params.size(); k += each) {
    if (strata_grads(e, &params[k], &tensors[k], each, stream) != STRATA_OK) return failure("grads");
  }
  return "";
}

}  // namespace

std::string micro_batch(strata_engine* e, const Model& m, int step, int micro, int rank, uint32_t skip_unit, Gpu* gpu) {
  const auto units = static_cast<strata_unit>(m.units.size());
  const strata_stream* stream = gpu ? gpu->stream() : nullptr;
  std::deque<std::vector<float>> gradients;  // contiguous_gradients = false: they stay until end_backward
  for (strata_unit u = 0; u < units; ++u) {
    if (u == skip_unit) continue;
    if (strata_fetch(e, u, stream) != STRATA_OK) return failure("fetch");
    if (strata_release(e, u, stream) != STRATA_OK) return failure("release");
  }
  for (strata_unit u = units; u-- > 0;) {
    if (u == skip_unit) continue;
    if (strata_fetch(e, u, stream) != STRATA_OK) return failure("fetch in backward");
    const std::string error = give_gradients(e, m, u, step, micro, rank, &gradients, gpu);
    if (!error.empty()) return error;
    if (strata_release(e, u, stream) != STRATA_OK) return failure("release in backward");
    if (strata_grads_done(e, u) != STRATA_OK) return failure("grads_done");
  }
  return strata_end_backward(e) == STRATA_OK ? "" : failure("end_backward");
}

std::string collect(strata_engine* e, const Model& m, Result* out) {
  for (size_t k = 0; k < m.params.size(); ++k) {
    const ModelParam& p = m.params[k];
    auto read = [&](const char* array, std::vector<float>* values) {
      values->assign(p.numel(), 0);
      const strata_tensor t = fp32_tensor(p, values->data());
      return strata_read_param(e, static_cast<strata_param>(k), array, &t);
    };
    if (read("weight", &out->weights[p.name]) != STRATA_OK) return failure("read weight");
    if (p.frozen) continue;
    if (read("master", &out->master[p.name]) != STRATA_OK) return failure("read master");
    if (read("exp_avg", &out->exp_avg[p.name]) != STRATA_OK) return failure("read exp_avg");
    if (read("exp_avg_sq", &out->exp_avg_sq[p.name]) != STRATA_OK) return failure("read exp_avg_sq");
  }
  return "";
}

namespace {
std::string train(const Trial& t, const Model& m, strata_engine* e, int rank, Gpu* gpu, Result* out) {
  std::string error = build_model(e, m);
  for (int step = 1; error.empty() && step <= t.steps; ++step) {
    for (int micro = 0; error.empty() && micro < t.micro_batches; ++micro) {
      error = micro_batch(e, m, step, micro, rank, step % 2 ? t.skip_unit : UINT32_MAX, gpu);
    }
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = 0.01 / step;
    const auto settings = step_settings(step);
    if (t.change_settings) args.groups = settings.data(), args.group_count = settings.size();
    if (error.empty() && strata_step(e, &args) != STRATA_OK) error = failure("step");
    strata_step_info info;
    STRATA_INIT(&info);
    if (error.empty() && strata_get_step_info(e, &info) != STRATA_OK) error = failure("step_info");
    out->norms.push_back(info.grad_norm);
  }
  if (error.empty()) error = collect(e, m, out);
  out->counters.struct_size = sizeof(out->counters);
  if (error.empty() && strata_get_counters(e, STRATA_COUNT_TOTAL, &out->counters) != STRATA_OK)
    error = failure("counters");
  return error;
}
}  // namespace

Result run(const Trial& t) {
  static std::atomic<int> serial{0};
  const std::string job = "train-" + std::to_string(serial++);
  const Model& model = t.model;
  std::vector<Result> results(static_cast<size_t>(t.world));
  std::vector<std::thread> ranks;
  for (int r = 0; r < t.world; ++r) {
    ranks.emplace_back([&, r] {
      Result& mine = results[static_cast<size_t>(r)];
      std::unique_ptr<Gpu> gpu;
      if (!t.gpu.empty()) gpu = std::make_unique<Gpu>(t.gpu, job, r, t.world, t.gpu_delay_us);
      strata_engine* engine = open_rank(t, job, r, &mine.error, gpu && t.lend ? gpu->lender() : nullptr);
      if (engine && t.body) t.body(r, engine);
      if (engine && t.gpu_body) t.gpu_body(r, engine, gpu.get());
      if (engine && !t.body && !t.gpu_body) mine.error = train(t, model, engine, r, gpu.get(), &mine);
      if (gpu) gpu->wait();
      strata_close(engine);
      if (gpu) mine.loans = gpu->loans();
      gpu.reset();
    });
  }
  for (auto& thread : ranks) thread.join();
  for (int r = 1; r < t.world; ++r) {
    const Result& other = results[static_cast<size_t>(r)];
    if (results[0].error.empty() && !other.error.empty())
      results[0].error = "rank " + std::to_string(r) + ": " + other.error;
    if (results[0].error.empty() && !(other == results[0]))
      results[0].error = "ranks 0 and " + std::to_string(r) + " ended with different numbers";
  }
  return results[0];
}

}  // namespace strata::test
