#include "tests/train_kill/job.h"

#include <cstdio>
#include <filesystem>

namespace strata::test {

namespace fs = std::filesystem;

Model model_on_disk() {
  Model m;
  m.units = {"first", "second", "third", "fourth"};
  for (int unit = 0; unit < 4; ++unit) {
    m.params.push_back({m.units[static_cast<size_t>(unit)] + ".weight", {384, 512}, STRATA_BF16, unit});
    m.params.push_back({m.units[static_cast<size_t>(unit)] + ".bias", {513}, STRATA_BF16, unit, 1});
  }
  return m;
}

Trial trial_on_disk(OnDisk what, const std::string& nvme_path) {
  const std::string state = "zero_optimization.offload_optimizer.", params = "zero_optimization.offload_param.";
  Trial t;
  t.world = 2;
  t.stage = 3;
  t.clip = 0.05;
  t.model = model_on_disk();
  t.overrides = {"zero_optimization.param_persistence_threshold=600", "zero_optimization.sub_group_size=65536",
                 state + "device=nvme", state + "nvme_path=\"" + nvme_path + "\""};
  if (what == OnDisk::kStateAndParams) {
    t.overrides.push_back(params + "device=nvme");
    t.overrides.push_back(params + "nvme_path=\"" + nvme_path + "\"");
    t.overrides.push_back(params + "max_in_cpu=0");
  }
  t.manifest_extra = "[plugin.offload_nvme]\nprobe_ms = 0\nblock_bytes = 65536\n";
  if (what == OnDisk::kStateByThreads) t.manifest_extra += "io = \"threads\"\nqueue_depth = 4\n";
  return t;
}

std::string train_steps(strata_engine* engine, const Trial& trial, int rank, int first, int last) {
  for (int step = first; step <= last; ++step) {
    std::string error = micro_batch(engine, trial.model, step, 0, rank, UINT32_MAX);
    if (!error.empty()) return error;
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = 0.01 / step;
    if (strata_step(engine, &args) != STRATA_OK) return strata_last_error();
  }
  return "";
}

std::string bits_of(strata_engine* engine, const Model& model, std::string* error) {
  Result r;
  *error = collect(engine, model, &r);
  std::string bits;
  for (const auto* arrays : {&r.weights, &r.master, &r.exp_avg, &r.exp_avg_sq}) {
    for (const auto& [name, values] : *arrays) {
      bits += name;
      bits.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    }
  }
  return bits;
}

std::string tag_of(int step) { return "step" + std::to_string(step); }

std::string newest_checkpoint(const std::string& root, int* step) {
  *step = 0;
  for (const auto& entry : fs::directory_iterator(root)) {
    int found = 0;
    if (std::sscanf(entry.path().filename().c_str(), "step%d", &found) == 1 && found > *step) *step = found;
  }
  return *step > 0 ? tag_of(*step) : "";
}

}  // namespace strata::test
