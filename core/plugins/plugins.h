// plugins.h - finds, checks and loads the plugins of one engine, and hands out their interface tables.
//
// A plugin is a library beside its <id>.toml. The TOML is read and the ELF file is checked before anything is mapped:
// a truncated library would otherwise kill the process, not fail the load. A plugin nobody asked for is never mapped.
// A library is mapped with RTLD_NOW | RTLD_LOCAL and never unmapped.
//
// Search order for a plugin id, first hit wins; a hit that cannot be used is an error, never skipped:
//   1. the directories of [plugins] path, relative to the manifest
//   2. STRATA_PLUGIN_PATH (colon separated absolute paths; ignored when the process runs with raised privileges)
//   3. the `plugins` directory beside the library or program (given by the caller)
// A name with a '/' is a path to the plugin's TOML, relative to the manifest, and is not searched for. The working
// directory is never searched. Errors list every path tried and why it was not taken; a build that leaves a plugin out
// puts NAME.absent where NAME.toml would be, with the reason as its first line.
//
// Tables come out complete: every required slot is checked, optional slots hold a default, so no caller tests for
// NULL. A table longer than the one known here is cut: its tail is not looked at.
//
// One PluginSet per engine; the core has no global list. Calls from any thread, one at a time inside (a mutex).
// Tables and option lists live as long as the PluginSet; destroy it after every instance is closed.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/manifest/settings.h"
#include "core/plugins/host.h"
#include "core/status.h"
#include "strata/plugin.h"

namespace strata {

// Where to look, in order. `from_settings` reads the manifest's part and the environment.
struct PluginSearch {
  std::filesystem::path manifest_dir = ".";        // base of names with a '/'
  std::vector<std::filesystem::path> directories;  // all others, in order
  std::vector<std::string> ignored;                // what was not searched and why, for errors

  // [plugins] path, the environment, then library_dir/plugins. An empty library_dir adds nothing.
  static PluginSearch from_settings(const Settings& settings, const std::filesystem::path& library_dir);
};

struct PluginInfo {
  std::string id, name, version;
  std::filesystem::path toml, library;
  uint32_t abi_minor = 0;               // min(plugin's, host's): what both sides speak
  std::vector<std::string> interfaces;  // handed out so far
};

// What NAME.absent says; "" when it is not there.
std::string why_not_built(const std::filesystem::path& absent);

class PluginSet final : public PluginFinder {
 public:
  PluginSet(PluginSearch search, std::map<std::string, std::vector<PluginOption>> options);
  ~PluginSet() override;
  PluginSet(const PluginSet&) = delete;

  // Loads `name` if need be. `interface_id` must be among [provides] of its TOML.
  Status find(const std::string& name, const std::string& interface_id, const void** table) override;
  // The options of [plugin.<id>], checked against the plugin's TOML, defaults filled in. Maps nothing.
  Status options(const std::string& name, const strata_options** out) override;

  template <class Api>
  Status find(const std::string& name, const std::string& interface_id, const Api** table) {
    const void* found = nullptr;
    STRATA_RETURN_IF_ERROR(find(name, interface_id, &found));
    *table = static_cast<const Api*>(found);
    return Ok();
  }

  // Checks [plugins] path, the plugins given by path, and every [plugin.NAME] section of the manifest, without mapping
  // anything: all errors, one a line. NAME is a plugin's id.
  Status check_options(const Settings& settings);
  // A manifest key that is an option of whatever plugin serves an interface ("pin_memory" of the offload tier): it goes
  // to every plugin of that interface that declares the option. `from` is the key, `given` whether the user wrote it.
  void preset(const std::string& interface_id, PluginOption option, const std::string& from, bool given);
  // An error for every [plugin.NAME] section that no plugin was asked about, and for every given preset that no plugin
  // took: call it when all instances are open.
  Status check_all_used() const;

  // The plugins loaded so far, in load order.
  std::vector<PluginInfo> describe() const;
  // One line per plugin loaded since the last call, for the log.
  std::vector<std::string> take_log_lines();

 private:
  struct Plugin;
  Status locate(const std::string& name, Plugin** out);
  Status find_toml(const std::string& name, std::filesystem::path* toml) const;
  Status fill_options(Plugin* plugin);
  Status add_presets(const Plugin& plugin, std::vector<PluginOption>* options);
  Status load(Plugin* plugin);

  struct Preset {
    std::string interface_id;
    PluginOption option;
    std::string from;
    bool given = false, taken = false;
  };

  PluginSearch search_;
  std::map<std::string, std::vector<PluginOption>> given_options_;  // by plugin id
  std::vector<Preset> presets_;
  mutable std::mutex mutex_;
  std::map<std::string, std::unique_ptr<Plugin>> plugins_;  // by TOML path
  std::vector<Plugin*> loaded_;                             // in load order
  std::vector<std::string> log_lines_;
};

// Presets of all manifest keys that are the business of a plugin, whichever serves the role.
void preset_options(const Settings& settings, PluginSet* plugins);

}  // namespace strata
