// check.cc - `strata check`: does this manifest, with these plugins and this many ranks, come up?
//
// It asks the classes that strata_open asks, in the same words, and goes on after an error with what could be read, so
// that one run names all errors that do not follow from another. Plugins are loaded, which runs their entry and nothing
// else; no instance is opened. What only an instance knows (ranges of options, memory, other ranks) shows at
// strata_open.
#include <algorithm>
#include <iomanip>
#include <iostream>

#include "core/manifest/batch.h"
#include "core/manifest/manifest.h"
#include "core/manifest/manifest_rules.h"
#include "core/manifest/plugin_toml.h"
#include "core/places.h"
#include "core/plugins/plugins.h"
#include "strata/iface/checkpoint.h"
#include "strata/iface/collective.h"
#include "strata/iface/device.h"
#include "strata/iface/offload.h"
#include "strata/iface/optimizer.h"
#include "tools/commands.h"

namespace strata::cli {
namespace {

enum class Need { kAtStart, kLater, kNever };

struct Role {
  const char* name;  // as in [plugins]
  std::string plugin;
  const char* interface_id;
  Need need;
};

std::vector<Role> roles_of(const Settings& s) {
  const ZeroSettings& zero = s.zero_optimization;
  const auto tier = [&](OffloadDevice device) {
    return zero.offload_optimizer.device == device || zero.offload_param.device == device ? Need::kAtStart
                                                                                          : Need::kNever;
  };
  const bool offloads = zero.offload_optimizer.device != OffloadDevice::kNone;
  const bool adds = zero.stage >= 2 && !zero.accumulate_locally && s.gradient_accumulation_steps > 1;
  const auto where = [](bool used) { return used ? Need::kAtStart : Need::kNever; };
  return {{"collective", s.plugins.collective, STRATA_COLLECTIVE, Need::kAtStart},
          {"device", s.plugins.device, STRATA_DEVICE, Need::kAtStart},
          {"host_device", s.plugins.host_device, STRATA_DEVICE, where(offloads && adds)},
          {"offload_cpu", s.plugins.offload_cpu, STRATA_OFFLOAD, tier(OffloadDevice::kCpu)},
          {"offload_nvme", s.plugins.offload_nvme, STRATA_OFFLOAD, tier(OffloadDevice::kNvme)},
          {"optimizer", s.plugins.optimizer, STRATA_OPTIMIZER, Need::kAtStart},
          {"device_optimizer", s.plugins.device_optimizer, STRATA_OPTIMIZER,
           where(offloads && zero.offload_optimizer.uses_device())},
          {"checkpoint", s.plugins.checkpoint, STRATA_CHECKPOINT, Need::kLater}};
}

// The errors of one check, each once: the options of a plugin are looked at on several occasions.
class Findings {
 public:
  void add(const Status& status, const std::string& prefix = "") {
    if (status.ok() || text_.find(status.text()) != std::string::npos) return;
    text_ += (text_.empty() ? "" : "\n") + prefix + status.text();
  }
  bool empty() const { return text_.empty(); }
  Status status() const { return empty() ? Ok() : Status(STRATA_INVALID_ARGUMENT, text_); }

 private:
  std::string text_;
};

// What to print about a role, and its errors.
std::string resolve(const Role& role, const Settings& settings, PluginSet* plugins, Findings* findings) {
  if (role.need == Need::kNever) return "not used by this manifest";
  const strata_options* options = nullptr;
  const void* table = nullptr;
  const Status status = plugins->options(role.plugin, &options);
  if (role.need == Need::kLater && status.code() == STRATA_NOT_FOUND)
    return role.plugin + " is not there: this run can start, but neither save nor load";
  const Status found = plugins->find(role.plugin, role.interface_id, &table);
  const std::string key = settings.named(std::string("plugins.") + role.name);
  for (const Status& each : {status, found}) findings->add(each, key + ": ");
  if (!status.ok() || !found.ok()) return role.plugin + ": see the errors";
  for (const PluginInfo& info : plugins->describe())
    if (std::count(info.interfaces.begin(), info.interfaces.end(), role.interface_id) &&
        (info.id == role.plugin || role.plugin.find('/') != std::string::npos))
      return info.id + " " + info.version + ", " + info.library.string();
  return role.plugin;
}

// A plugin that asks the core for other plugins may use sections that no role does.
bool some_plugin_opens_others(const PluginSet& plugins) {
  for (const PluginInfo& info : plugins.describe()) {
    PluginToml toml;
    if (!read_plugin_toml(info.toml, &toml).ok()) continue;
    if (std::count(toml.host_interfaces.begin(), toml.host_interfaces.end(), STRATA_HOST_PLUGINS)) return true;
  }
  return false;
}

// Directories that nobody makes and that are not here. They are for the machines that train to have.
std::vector<std::string> missing_directories(const Settings& s) {
  std::vector<std::string> warnings;
  const auto look = [&](const std::string& key, const std::string& path, const std::string& role) {
    const Status found = find_directory(path);
    if (found.ok()) return;
    warnings.push_back(s.named(key) + ": " + found.text() + "; " + role +
                       " has to be there: strata_open does not make it and refuses to start");
  };
  const ZeroSettings& zero = s.zero_optimization;
  const std::string z = "zero_optimization.", state = z + "offload_optimizer.nvme_path",
                    param = z + "offload_param.nvme_path";
  const bool state_on_disk = zero.offload_optimizer.device == OffloadDevice::kNvme;
  const bool param_on_disk = zero.offload_param.device == OffloadDevice::kNvme;
  const std::string& paths = state_on_disk ? zero.offload_optimizer.nvme_path : zero.offload_param.nvme_path;
  if (state_on_disk || param_on_disk) {
    for (const std::string& path : s.resolve_each(paths)) look(state_on_disk ? state : param, path, "it");
  }
  if (!s.trace.path.empty()) look("trace.path", s.trace_parent(), "the directory it is made in");
  return warnings;
}

// The batch rule can be asked unless one of its numbers was given and could not be read.
bool knows_batch(const Settings& s) {
  return (s.train_batch_size > 0 || !s.is_given("train_batch_size")) &&
         (s.train_micro_batch_size_per_gpu > 0 || !s.is_given("train_micro_batch_size_per_gpu")) &&
         (s.gradient_accumulation_steps > 0 || !s.is_given("gradient_accumulation_steps"));
}

std::string batch_line(const Settings& s, const Places& places) {
  const int ranks = places.data.size;
  return "world " + std::to_string(places.world.size) + ": train_batch_size " + std::to_string(s.train_batch_size) +
         " = " + std::to_string(s.train_micro_batch_size_per_gpu) + " per rank x " +
         std::to_string(s.gradient_accumulation_steps) + " accumulated x " + std::to_string(ranks) +
         (places.parts() == 1 ? "" : " data-parallel") + (ranks == 1 ? " rank" : " ranks") +
         " (--world N checks another)";
}

}  // namespace

int check(const CheckArgs& args) {
  Settings settings;
  std::vector<std::string> warnings;
  Findings findings;
  findings.add(read_manifest(args.manifest, args.overrides, &settings, &warnings));
  const bool is_toml = !settings.manifest_name.empty();
  if (is_toml) {
    for (const std::string& warning : missing_directories(settings)) warnings.push_back(warning);
  }
  for (const std::string& warning : warnings) std::cout << "warning: " << warning << "\n";
  if (is_toml) {
    const std::vector<Role> roles = roles_of(settings);
    PluginSet plugins(PluginSearch::from_settings(settings, library_dir()), settings.plugin_options);
    preset_options(settings, &plugins);
    findings.add(plugins.check_options(settings));
    std::vector<std::string> lines;
    for (const Role& role : roles) lines.push_back(resolve(role, settings, &plugins, &findings));
    // What a device is says an open one, but this one is known.
    if (settings.plugins.device == "device_host") findings.add(refuse_part_of_host_device(settings));
    // After any error, what has no effect may follow from it.
    if (findings.empty() && !some_plugin_opens_others(plugins)) findings.add(plugins.check_all_used());
    const int64_t tensors = settings.tensor_model_parallel_size, stages = settings.pipeline_model_parallel_size;
    const int64_t world = args.world > 0 ? args.world : tensors * stages;
    const std::string where = args.manifest + ": with --world " + std::to_string(world) + ": ";
    Places places;
    const Status cut = Places::find(0, static_cast<int>(world), tensors, stages, &places);
    findings.add(cut, where);
    if (cut.ok() && knows_batch(settings)) findings.add(resolve_batch(places.data.size, &settings), where);

    if (findings.empty()) std::cout << args.manifest << ": no errors\n  " << batch_line(settings, places) << "\n";
    for (size_t i = 0; i < roles.size(); ++i)
      std::cout << "  " << std::left << std::setw(17) << roles[i].name << lines[i] << "\n";
  }
  if (findings.empty()) return 0;
  std::cout.flush();
  report(findings.status());
  std::cerr << args.manifest << ": refused: strata_open would fail on these errors"
            << (is_toml ? "" : "; nothing else could be checked") << "\n";
  return 1;
}

}  // namespace strata::cli
