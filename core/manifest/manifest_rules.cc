#include "core/manifest/manifest_rules.h"

#include "core/manifest/manifest_keys.h"

namespace strata {
namespace {

const std::string kZero = "zero_optimization.";
const std::string kOptimizer = kZero + "offload_optimizer.";
const std::string kParam = kZero + "offload_param.";

struct Rules {
  Settings& s;
  std::vector<ManifestFinding>* errors;
  std::vector<ManifestFinding>* warnings;

  void error(const std::string& key, const std::string& text) {
    errors->push_back({s.origin(key), "`" + key + "` " + text});
  }

  // `key` changes nothing because of what `cause` says. A file's key that an override made idle is only warned about:
  // the file is right as it stands.
  void no_effect(const std::string& key, const std::string& cause, const std::string& why, bool is_error = true) {
    if (!s.is_given(key)) return;
    const auto spelled = s.spelled.find(key);
    const std::string name = spelled == s.spelled.end() ? key : spelled->second;
    const bool by_override = s.is_override(cause) && !s.is_override(key);
    const bool warn = by_override || !s.no_effect_is_error || !is_error;
    (warn ? warnings : errors)
        ->push_back({s.origin(key), "`" + name + "` has no effect: " + why +
                                        (warn ? "" : " (no_effect_keys = \"warn\" lets such keys pass)")});
  }

  std::string stage_is() const {
    return "`zero_optimization.stage` is " + std::to_string(s.zero_optimization.stage) + " (" +
           s.origin(kZero + "stage") + ")";
  }

  void precision() {
    if (s.fp16_enabled)
      error("fp16.enabled",
            "= true is refused: training in float16 needs loss scaling, which is not there yet; "
            "use `bf16.enabled` = true, or keep params in fp32");
  }

  void trace() {
    for (const char* key : {"first_step", "steps", "records"}) {
      if (s.trace.path.empty()) no_effect(std::string("trace.") + key, "trace.path", "there is no `trace.path`");
    }
  }

  void optimizer() {
    const std::string mode = "optimizer.params.adam_w_mode";
    if (s.optimizer.type == "Adam" && !s.is_given(mode)) s.optimizer.adam_w_mode = false;
    if (s.optimizer.type == "AdamW" && !s.optimizer.adam_w_mode)
      error(mode, "= false contradicts `optimizer.type` = \"AdamW\" (" + s.origin("optimizer.type") +
                      "); write type = \"Adam\"");
  }

  void stage_keys() {
    const int64_t stage = s.zero_optimization.stage;
    const auto only_at_3 = {"prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
                            "max_live_parameters", "max_reuse_distance"};
    for (const char* key : only_at_3)
      if (stage < 3) no_effect(kZero + key, kZero + "stage", below_stage_3());
    if (stage < 2)
      no_effect(kZero + "accumulate_locally", kZero + "stage",
                stage_is() + ", and stages 0 and 1 always accumulate locally; remove it or set stage to 2 or 3");
  }

  std::string below_stage_3() const {
    return stage_is() + " and params are sharded only at stage 3; remove it or set stage = 3";
  }

  void offload_param() {
    OffloadParamSettings& p = s.zero_optimization.offload_param;
    if (p.device != OffloadDevice::kNone && s.zero_optimization.stage < 3) {
      no_effect(kParam + "device", kZero + "stage", below_stage_3());
      p.device = OffloadDevice::kNone;  // what remains after a warning must be what happens
      return;                           // the section's other keys would only repeat it
    }
    tier_keys(kParam, p.device, p.nvme_path, {"buffer_count", "buffer_size", "max_in_cpu"});
  }

  void offload_optimizer() {
    OffloadOptimizerSettings& o = s.zero_optimization.offload_optimizer;
    tier_keys(kOptimizer, o.device, o.nvme_path,
              {"buffer_count", "buffer_size", "cpu_state_budget", "fast_init", "pipeline_read", "pipeline_write"});
    device_part(o);
  }

  // Part of an offloaded update on the device.
  void device_part(OffloadOptimizerSettings& o) {
    const std::string origin = " (" + s.origin(kOptimizer + "device") + ")";
    if (o.device == OffloadDevice::kNone) {
      for (const char* key : {"ratio", "device_state_budget", "split_update", "split_share"})
        no_effect(kOptimizer + key, kOptimizer + "device",
                  "`" + kOptimizer + "device` is \"none\"" + origin + ": all of it is on the device");
      o.split_update = false, o.device_state_budget = 0, o.ratio = 1;  // what remains after a warning must happen
    } else if (o.ratio == 0) {
      nothing_offloaded(o);
    } else if (!o.split_update) {
      no_effect(kOptimizer + "split_share", kOptimizer + "split_update", "`" + kOptimizer + "split_update` is false");
    }
    if (!o.uses_device())
      no_effect("plugins.device_optimizer", kOptimizer + "split_update", "the device has no part in the update");
    if (o.device == OffloadDevice::kNvme && o.split_update)
      error(kOptimizer + "split_update", "= true streams state from host memory, and `" + kOptimizer +
                                             "device` is \"nvme\"" + origin + "; use \"cpu\"");
    if (o.device == OffloadDevice::kCpu && o.split_update && !o.pin_memory)
      warnings->push_back({s.origin(kOptimizer + "split_update"),
                           "`" + kOptimizer + "split_update` without `" + kOptimizer +
                               "pin_memory` = true: state is copied through memory that is not page-locked, several "
                               "times slower"});
    if (o.ratio < 1 && o.device_state_budget > 0)
      error(kOptimizer + "ratio", "and `" + kOptimizer +
                                      "device_state_budget` both say what stays on the device; "
                                      "give one");
  }

  std::string ratio_is_0() const {
    return "`" + kOptimizer + "ratio` is 0 (" + s.origin(kOptimizer + "ratio") + "): the device keeps all of the state";
  }

  void nothing_offloaded(OffloadOptimizerSettings& o) {
    for (const char* key : {"split_update", "split_share"})
      no_effect(kOptimizer + key, kOptimizer + "ratio", ratio_is_0());
    if (o.device == OffloadDevice::kNvme)
      no_effect(kOptimizer + "cpu_state_budget", kOptimizer + "ratio", ratio_is_0());
    o.split_update = false, o.cpu_state_budget = 0;
  }

  // Gradients of several micro-batches are added up in host memory where state is offloaded from a device.
  void host_device() {
    const ZeroSettings& z = s.zero_optimization;
    const std::string key = "plugins.host_device", local = ": gradients are not added up in host memory";
    if (z.offload_optimizer.device == OffloadDevice::kNone)
      no_effect(key, kOptimizer + "device", "`" + kOptimizer + "device` is \"none\"" + local);
    else if (z.offload_optimizer.ratio == 0)
      no_effect(key, kOptimizer + "ratio", ratio_is_0());
    else if (z.stage < 2)
      no_effect(key, kZero + "stage", stage_is() + local);
    else if (z.accumulate_locally)
      no_effect(key, kZero + "accumulate_locally", "`" + kZero + "accumulate_locally` is true" + local);
    else if (s.gradient_accumulation_steps == 1)
      no_effect(key, "gradient_accumulation_steps", "`gradient_accumulation_steps` is 1" + local);
  }

  void one_nvme_path() {
    const OffloadOptimizerSettings& o = s.zero_optimization.offload_optimizer;
    const OffloadParamSettings& p = s.zero_optimization.offload_param;
    if (o.device != OffloadDevice::kNvme || p.device != OffloadDevice::kNvme || o.nvme_path == p.nvme_path) return;
    error(kParam + "nvme_path", "= \"" + p.nvme_path + "\" and `" + kOptimizer + "nvme_path` = \"" + o.nvme_path +
                                    "\" differ: one tier serves both; name all disks in both, as \"/a, /b\"");
  }

  // A plugin chosen for a tier that holds nothing. Call it after offload_param, which may have emptied one.
  void tier_plugins() {
    const ZeroSettings& zero = s.zero_optimization;
    for (const auto& [device, word] : {std::pair{OffloadDevice::kCpu, "cpu"}, {OffloadDevice::kNvme, "nvme"}}) {
      if (zero.offload_optimizer.device == device || zero.offload_param.device == device) continue;
      if (device == OffloadDevice::kCpu && zero.keeps_in_memory()) continue;
      std::string cause = kOptimizer + "device";
      if (s.is_given(kParam + "device") && !s.is_override(cause))
        cause = s.is_override(kParam + "device") ? kParam + "device" : kZero + "stage";
      no_effect(std::string("plugins.offload_") + word, cause,
                "neither `" + kOptimizer + "device` nor `" + kParam + "device` is \"" + word + "\"");
    }
  }

  // Keys of a disk may stand beside another device: then one word, `device`, moves the state.
  void tier_keys(const std::string& section, OffloadDevice device, const std::string& nvme_path,
                 const std::vector<std::string>& nvme_keys) {
    const std::string at = "`" + section + "device` is ";
    const std::string origin = " (" + s.origin(section + "device") + ")";
    if (device == OffloadDevice::kNone) no_effect(section + "pin_memory", section + "device", at + "\"none\"" + origin);
    if (device == OffloadDevice::kNvme) {
      if (nvme_path.empty()) error(section + "device", "= \"nvme\" needs `" + section + "nvme_path`, a directory");
      return;
    }
    const std::string is = at + (device == OffloadDevice::kCpu ? "\"cpu\"" : "\"none\"") + origin + ", not \"nvme\"";
    no_effect(section + "nvme_path", section + "device", is, false);
    for (const std::string& key : nvme_keys) no_effect(section + key, section + "device", is, false);
  }
};

}  // namespace

Status refuse_part_of_host_device(const Settings& settings) {
  const OffloadOptimizerSettings& o = settings.zero_optimization.offload_optimizer;
  std::string lines;
  const auto refuse = [&](bool asks, const char* key, const char* what) {
    const std::string path = kOptimizer + key;
    if (!asks || o.device == OffloadDevice::kNone) return;
    lines += (lines.empty() ? "" : "\n") + settings.named(path) + " = " + value_in_words(settings, path) + " " + what +
             " the device, but `plugins.device` = \"" + settings.plugins.device + "\" (" +
             settings.origin("plugins.device") +
             ") has no memory of its own: the host updates all of the state. Remove the key, or choose a device that " +
             "has, as \"device_cuda\"";
  };
  refuse(o.split_update, "split_update", "copies a share of the state, for its update, into memory of");
  refuse(o.device_state_budget > 0, "device_state_budget", "keeps state that fits in memory of");
  refuse(o.ratio < 1, "ratio", "keeps the rest of the state in memory of");
  return lines.empty() ? Ok() : Status(STRATA_FAILED_PRECONDITION, lines);
}

void apply_manifest_rules(Settings* settings, std::vector<ManifestFinding>* errors,
                          std::vector<ManifestFinding>* warnings) {
  Rules rules{*settings, errors, warnings};
  rules.precision();
  rules.trace();
  rules.optimizer();
  rules.stage_keys();
  rules.offload_optimizer();
  rules.host_device();
  rules.offload_param();
  rules.one_nvme_path();
  rules.tier_plugins();
}

}  // namespace strata
