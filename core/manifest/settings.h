// settings.h - everything a training manifest says, as one plain struct.
//
// Filled by read_manifest (manifest.h): defaults come from the key table (manifest_keys.cc), which is also the place
// that documents every key. Names are DeepSpeed's where users know them. A Settings that came out of read_manifest
// has passed every check that needs the file alone; what needs the world size (batch.h), the plugins (plugins.h) or
// the model is checked by the engine.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "strata/host.h"
#include "strata/types.h"

namespace strata {

enum class OffloadDevice { kNone, kCpu, kNvme };

// One line of [plugin.NAME]; checked against that plugin's own TOML by PluginSet.
struct PluginOption {
  std::string key;
  std::variant<bool, int64_t, double, std::string> value;
  std::string where;  // "zero3.toml:12:1", for errors
};

// Which plugin serves which role: an id looked up by the search order of plugins.h, or a path (with a '/').
struct PluginChoices {
  std::string device, host_device, collective, offload_cpu, offload_nvme, optimizer, device_optimizer, checkpoint;
  std::vector<std::string> path;  // extra directories to search, relative to the manifest
};

struct OptimizerSettings {
  std::string type;  // "AdamW" or "Adam", as written
  double lr = 0, eps = 0, weight_decay = 0;
  std::array<double, 2> betas{};
  bool adam_w_mode = false;  // decoupled decay; false: decay is added to the gradient
  std::string state_layout;  // "whole" or "split"
};

struct OffloadOptimizerSettings {
  OffloadDevice device = OffloadDevice::kNone;
  bool pin_memory = false;
  double ratio = 1;                 // of the state that is offloaded; the rest is on the device
  int64_t device_state_budget = 0;  // bytes: state that fits stays on the device
  bool split_update = false;        // the device updates a share of what is offloaded, streaming it
  double split_share = -1;          // that share; below 0: measured
  bool uses_device() const { return split_update || device_state_budget > 0 || ratio < 1; }
  // device = "nvme" only
  std::string nvme_path;  // one or more with commas between, relative to the manifest; see Settings::resolve_list
  int64_t buffer_count = 0;
  int64_t buffer_size = 0;       // elements; 0: chosen by the engine
  int64_t cpu_state_budget = 0;  // bytes: as much of the state stays in host memory
  bool fast_init = false;
  bool pipeline_read = true;
  bool pipeline_write = true;
};

struct OffloadParamSettings {
  OffloadDevice device = OffloadDevice::kNone;
  bool pin_memory = false;
  // device = "nvme" only
  std::string nvme_path;
  int64_t buffer_count = 0;
  int64_t buffer_size = 0;  // elements; 0: chosen by the engine
  int64_t max_in_cpu = 0;   // elements
};

// Sizes are in elements unless said otherwise.
struct ZeroSettings {
  int64_t stage = 0;
  bool overlap_comm = false;
  bool contiguous_gradients = false;
  int64_t reduce_bucket_size = 0;
  int64_t prefetch_bucket_size = 0;
  int64_t param_persistence_threshold = 0;
  int64_t model_persistence_threshold = 0;  // of all params that are kept whole
  int64_t max_live_parameters = 0;
  int64_t max_reuse_distance = 0;
  int64_t sub_group_size = 0;
  bool accumulate_locally = false;
  bool gather_16bit_weights_on_model_save = false;
  OffloadOptimizerSettings offload_optimizer;
  OffloadParamSettings offload_param;
  // Some of what nvme would hold stays in host memory.
  bool keeps_in_memory() const {
    const bool state = offload_optimizer.device == OffloadDevice::kNvme && offload_optimizer.cpu_state_budget > 0;
    return state || (offload_param.device == OffloadDevice::kNvme && offload_param.max_in_cpu > 0);
  }
};

// Which steps are recorded, and where; see core/trace.h.
struct TraceSettings {
  std::string path;  // a directory; "": no trace
  int64_t first_step = 1;
  int64_t steps = 0;  // 0: up to the close
  int64_t records = 0;
};

struct Settings {
  // 0: not given. resolve_batch (batch.h) fills all three once the world size is known.
  int64_t train_batch_size = 0;
  int64_t train_micro_batch_size_per_gpu = 0;
  int64_t gradient_accumulation_steps = 0;

  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;

  int64_t steps_per_print = 0;
  double gradient_clipping = 0;              // 0: off
  strata_dtype communication_data_type = 0;  // 0: the param's own
  bool wall_clock_breakdown = false;
  bool check_weights = false;
  double deadline_seconds = 0;
  int64_t host_memory_limit = 0;  // bytes; 0: the cgroup's limit, else MemTotal
  int64_t threads = 0;            // worker threads per rank; 0: cores / local ranks
  bool bind_threads = true;
  strata_log_level log_level = STRATA_LOG_INFO;
  bool no_effect_is_error = true;  // no_effect_keys = "error"; false: such keys are warnings

  bool bf16_enabled = false;
  bool fp16_enabled = false;  // always false: training with loss scaling is refused

  PluginChoices plugins;
  std::map<std::string, std::vector<PluginOption>> plugin_options;  // [plugin.NAME], by NAME
  OptimizerSettings optimizer;
  ZeroSettings zero_optimization;
  TraceSettings trace;

  // Where the manifest came from: the name used in errors, and the directory relative paths start at.
  std::string manifest_name;
  std::string manifest_dir;  // "." when the manifest was given as text

  // Full path of every key the user gave -> where ("zero3.toml:3:1" or "override"); defaults are not in it.
  std::map<std::string, std::string> given;

  // Those that were given in DeepSpeed's spelling -> that spelling, for errors.
  std::map<std::string, std::string> spelled;

  bool is_given(const std::string& key) const { return given.count(key) != 0; }
  // For errors: "zero3.toml:3:1", or "default".
  std::string origin(const std::string& key) const {
    const auto it = given.find(key);
    return it == given.end() ? "default" : it->second;
  }
  // "train.toml:3:1: `key`", for errors about the value; of a default, without a line.
  std::string named(const std::string& key) const {
    return (is_given(key) ? origin(key) : manifest_name) + ": `" + key + "`";
  }
  bool is_override(const std::string& key) const { return origin(key).rfind("override", 0) == 0; }
  // A path of the manifest as the process must open it.
  std::string resolve(const std::string& path) const {
    return path.empty() || path.front() == '/' ? path : manifest_dir + "/" + path;
  }
  // The same for each of several, with commas between.
  std::vector<std::string> resolve_each(const std::string& paths) const {
    std::vector<std::string> all;
    std::istringstream list(paths);
    for (std::string path; std::getline(list, path, ',');) {
      path.erase(0, path.find_first_not_of(" \t"));
      path.erase(path.find_last_not_of(" \t") + 1);
      if (!path.empty()) all.push_back(resolve(path));
    }
    return all;
  }
  std::string resolve_list(const std::string& paths) const {
    std::string all;
    for (const std::string& path : resolve_each(paths)) all += (all.empty() ? "" : ", ") + path;
    return all;
  }
  // The directory in which that of the trace is made if need be.
  std::string trace_parent() const {
    const std::filesystem::path path = resolve(trace.path);
    return (path.has_filename() ? path : path.parent_path()).parent_path();
  }
};

}  // namespace strata
