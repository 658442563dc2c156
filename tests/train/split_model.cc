#include "tests/train/split_model.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

namespace strata::test {

namespace {

std::string failure(const char* what) { return std::string(what) + ": " + strata_last_error(); }

double learning_rate(int step) { return 0.01 / step; }

float gradient_of(int step, int micro, int data_rank, size_t param, uint64_t place) {
  return gradient_noise(step, micro, data_rank, param, place);
}

strata_tensor tensor(const LocalParam& p, float* data) {
  strata_tensor t;
  STRATA_INIT(&t);
  t.data = data;
  t.device_type = STRATA_CPU;
  t.dtype = STRATA_F32;
  t.ndim = static_cast<int32_t>(p.shape.size());
  t.shape = p.shape.data();
  return t;
}

// Rows and columns [first, last) of a whole param.
LocalParam part_of(size_t index, const WholeParam& p, int rank, int size) {
  const bool by_rows = p.split == WholeParam::kRows, by_cols = p.split == WholeParam::kCols;
  const int64_t rows = by_rows ? p.rows / size : p.rows, cols = by_cols ? p.cols / size : p.cols;
  const int64_t row0 = by_rows ? rows * rank : 0, col0 = by_cols ? cols * rank : 0;
  LocalParam local;
  local.whole = index;
  local.shape = {rows, cols};
  for (int64_t r = row0; r < row0 + rows; ++r) {
    for (int64_t c = col0; c < col0 + cols; ++c) local.places.push_back(static_cast<uint64_t>(r * p.cols + c));
  }
  return local;
}

}  // namespace

std::vector<WholeParam> whole_model(int stages) {
  std::vector<WholeParam> m;
  m.push_back({"embedding", 64, 48, WholeParam::kRows, 0, stages > 1 ? stages - 1 : -1});
  for (int s = 0; s < stages; ++s) {
    const std::string unit = "stage" + std::to_string(s) + ".";
    m.push_back({unit + "fc1.weight", 128, 48, WholeParam::kRows, s});
    m.push_back({unit + "fc1.bias", 128, 1, WholeParam::kRows, s});
    m.push_back({unit + "fc2.weight", 48, 128, WholeParam::kCols, s});
    m.push_back({unit + "fc2.bias", 48, 1, WholeParam::kNone, s});
    m.push_back({unit + "norm", 48, 1, WholeParam::kNone, s});
  }
  return m;
}

strata_ranks ranks_of(strata_engine* e) {
  strata_ranks ranks;
  STRATA_INIT(&ranks);
  (void)strata_get_ranks(e, &ranks);
  return ranks;
}

std::vector<LocalParam> local_params(const std::vector<WholeParam>& whole, const strata_ranks& r) {
  std::vector<LocalParam> all;
  for (size_t k = 0; k < whole.size(); ++k) {
    const int stage = r.pipeline_model_parallel_rank;
    if (whole[k].stage != stage && whole[k].copy_at != stage) continue;
    all.push_back(part_of(k, whole[k], r.tensor_model_parallel_rank, r.tensor_model_parallel_size));
    all.back().shared = whole[k].stage != stage;
  }
  return all;
}

Trial split_trial(const Cut& cut, int stage, int micro_batches) {
  Trial t;
  t.world = cut.world();
  t.stage = stage;
  t.micro_batches = micro_batches;
  t.overrides = {"tensor_model_parallel_size=" + std::to_string(cut.tensor),
                 "pipeline_model_parallel_size=" + std::to_string(cut.pipeline)};
  if (stage == 3) t.overrides.push_back("zero_optimization.param_persistence_threshold=60");
  return t;
}

void each_rank(int world, const std::function<Trial(int)>& trial_of,
               const std::function<void(int, strata_engine*, const std::string& error)>& body) {
  static std::atomic<int> serial{0};
  const std::string job = "parallel-" + std::to_string(serial++);
  std::vector<std::thread> ranks;
  for (int r = 0; r < world; ++r) {
    ranks.emplace_back([&, r] {
      std::string error;
      strata_engine* e = open_rank(trial_of(r), job, r, &error);
      body(r, e, error);
      strata_close(e);
    });
  }
  for (auto& rank : ranks) rank.join();
}

std::string build_split_model(strata_engine* e, const std::vector<WholeParam>& whole) {
  strata_unit unit;
  for (const char* name : {"embedding", "block"}) {
    if (strata_add_unit(e, name, &unit) != STRATA_OK) return failure("add_unit");
  }
  const std::vector<LocalParam> mine = local_params(whole, ranks_of(e));
  for (const LocalParam& p : mine) {
    const WholeParam& w = whole[p.whole];
    strata_param_args args;
    STRATA_INIT(&args);
    args.name = w.name.c_str();
    args.shape = p.shape.data();
    args.ndim = static_cast<int32_t>(p.shape.size());
    args.dtype = STRATA_F32;
    if (w.split != WholeParam::kNone) args.flags |= STRATA_PARAM_TENSOR_MODEL_PARALLEL;
    if (p.shared) args.flags |= STRATA_PARAM_SHARED;
    strata_param id;
    if (strata_add_param(e, w.name == "embedding" ? 0 : 1, &args, &id) != STRATA_OK) return failure("add_param");
  }
  if (strata_commit(e) != STRATA_OK) return failure("commit");
  for (size_t k = 0; k < mine.size(); ++k) {
    std::vector<float> values;
    for (uint64_t place : mine[k].places) values.push_back(initial_value(mine[k].whole, place));
    const strata_tensor t = tensor(mine[k], values.data());
    if (strata_write_param(e, static_cast<strata_param>(k), &t, 0) != STRATA_OK) return failure("write_param");
  }
  return "";
}

std::string split_backward(strata_engine* e, const std::vector<WholeParam>& whole, int step, int micro_batches,
                           const Poison& poison) {
  const strata_ranks ranks = ranks_of(e);
  const std::vector<LocalParam> mine = local_params(whole, ranks);
  for (int micro = 0; micro < micro_batches; ++micro) {
    for (strata_unit u : {0u, 1u}) {
      if (strata_fetch(e, u, nullptr) != STRATA_OK) return failure("fetch");
      if (strata_release(e, u, nullptr) != STRATA_OK) return failure("release");
    }
    for (size_t k = mine.size(); k-- > 0;) {
      std::vector<float> g;
      for (uint64_t place : mine[k].places) {
        g.push_back(gradient_of(step, micro, ranks.data_parallel_rank, mine[k].whole, place));
      }
      if (poison) poison(mine[k], micro, &g);
      const strata_tensor t = tensor(mine[k], g.data());
      if (strata_grad(e, static_cast<strata_param>(k), &t, nullptr) != STRATA_OK) return failure("grad");
    }
    if (strata_end_backward(e) != STRATA_OK) return failure("end_backward");
  }
  return "";
}

std::string split_step(strata_engine* e, double lr) {
  strata_step_args args;
  STRATA_INIT(&args);
  args.lr = lr;
  return strata_step(e, &args) == STRATA_OK ? "" : failure("step");
}

std::string collect_split(strata_engine* e, const std::vector<WholeParam>& whole, const char* array,
                          std::map<std::string, std::vector<float>>* out) {
  const std::vector<LocalParam> mine = local_params(whole, ranks_of(e));
  for (size_t k = 0; k < mine.size(); ++k) {
    const WholeParam& w = whole[mine[k].whole];
    std::vector<float> values(mine[k].places.size());
    const strata_tensor t = tensor(mine[k], values.data());
    if (strata_read_param(e, static_cast<strata_param>(k), array, &t) != STRATA_OK) return failure("read_param");
    std::vector<float>& all = (*out)[w.name];
    all.resize(static_cast<size_t>(w.numel()), std::nanf(""));
    for (size_t i = 0; i < values.size(); ++i) all[mine[k].places[i]] = values[i];
  }
  return "";
}

void merge(const std::map<std::string, std::vector<float>>& one, std::map<std::string, std::vector<float>>* all) {
  for (const auto& [name, values] : one) {
    std::vector<float>& whole = (*all)[name];
    whole.resize(values.size(), std::nanf(""));
    for (size_t i = 0; i < values.size(); ++i) {
      if (!std::isnan(values[i])) whole[i] = values[i];
    }
  }
}

WholeResult train_whole(const std::vector<WholeParam>& whole, int data, int micro_batches, int steps, double max_norm,
                        const std::vector<int>& skips) {
  WholeResult out;
  std::vector<std::vector<double>> w(whole.size()), m(whole.size()), v(whole.size()), g(whole.size());
  for (size_t k = 0; k < whole.size(); ++k) {
    const auto n = static_cast<uint64_t>(whole[k].numel());
    for (uint64_t i = 0; i < n; ++i) w[k].push_back(initial_value(k, i));
    m[k].resize(n);
    v[k].resize(n);
    g[k].resize(n);
  }
  const double b1 = 0.9, b2 = 0.99;
  int applied = 0;
  for (int step = 1; step <= steps; ++step) {
    double squares = 0;
    for (size_t k = 0; k < whole.size(); ++k) {
      for (uint64_t i = 0; i < g[k].size(); ++i) {
        g[k][i] = 0;
        for (int d = 0; d < data; ++d) {
          for (int micro = 0; micro < micro_batches; ++micro) g[k][i] += gradient_of(step, micro, d, k, i);
        }
        g[k][i] /= data * micro_batches;
        squares += g[k][i] * g[k][i];
      }
    }
    const double norm = std::sqrt(squares), clip = max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
    out.norms.push_back(norm);
    out.clips.push_back(clip);
    if (std::count(skips.begin(), skips.end(), step)) continue;
    ++applied;
    const double lr = learning_rate(step);
    for (size_t k = 0; k < whole.size(); ++k) {
      for (size_t i = 0; i < w[k].size(); ++i) {
        const double x = g[k][i] * clip;
        m[k][i] = b1 * m[k][i] + (1 - b1) * x;
        v[k][i] = b2 * v[k][i] + (1 - b2) * x * x;
        const double mean = m[k][i] / (1 - std::pow(b1, applied)), square = v[k][i] / (1 - std::pow(b2, applied));
        w[k][i] = w[k][i] * (1 - lr * 0.1) - lr * mean / (std::sqrt(square) + 1e-8);
      }
    }
  }
  for (size_t k = 0; k < whole.size(); ++k) out.weights[whole[k].name] = w[k];
  return out;
}

}  // namespace strata::test
