#include "core/plugins/plugins.h"

// Boost.DLL: header-only with the standard filesystem, which wants <vector> included first.
#define BOOST_DLL_USE_STD_FS
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <boost/dll/shared_library.hpp>
#include <cstdlib>
#include <fstream>
#include <set>

#include "core/manifest/manifest.h"
#include "core/manifest/nearest.h"
#include "core/manifest/plugin_toml.h"
#include "core/manifest/toml_doc.h"
#include "core/plugins/elf_preflight.h"
#include "core/plugins/plugin_slots.h"
#include "strata/iface/offload.h"
#include "strata/iface/optimizer.h"

namespace strata {
namespace fs = std::filesystem;

struct PluginSet::Plugin {
  PluginToml toml;
  bool asked = false;  // somebody wanted its options or its tables

  std::vector<PluginOption> values;  // merged; the flat list points into them
  std::vector<strata_option> flat;
  strata_options list{};

  boost::dll::shared_library library;
  const strata_plugin* descriptor = nullptr;      // NULL: not loaded yet
  std::map<std::string, CompletedTable> tables;   // by interface id
  std::map<std::string, const void*> raw_tables;  // interfaces the core does not know, as the plugin gave them
};

namespace {

Status refuse(const PluginToml& toml, const std::string& text) {
  return {STRATA_FAILED_PRECONDITION, "plugin " + toml.id + " (" + toml.library.string() + "): " + text};
}

std::string join(const std::vector<std::string>& words) {
  std::string all;
  for (const std::string& word : words) all += (all.empty() ? "" : ", ") + word;
  return all.empty() ? "nothing" : all;
}

// The loader's own words out of Boost.DLL's text, whose error code is always a wrong one.
std::string loader_text(const std::string& what) {
  const std::string mark = "dlerror system message: ";
  const size_t at = what.find(mark), end = what.rfind(')');
  if (at == std::string::npos || end == std::string::npos) return what;
  return what.substr(at + mark.size(), end - at - mark.size());
}

// A symbol of the library that is code, by the library's own symbol table: calling data would end the process.
bool is_function(const void* symbol) {
  Dl_info info;
  ElfW(Sym)* entry = nullptr;
  if (dladdr1(symbol, &info, reinterpret_cast<void**>(&entry), RTLD_DL_SYMENT) == 0 || !entry) return false;
  const auto type = ELF64_ST_TYPE(entry->st_info);
  return type == STT_FUNC || type == STT_GNU_IFUNC;
}

// What the TOML promises about this host, checked before anything is mapped.
Status check_requirements(const PluginToml& toml) {
  if (toml.abi_major != STRATA_ABI_MAJOR)
    return refuse(toml, "is built for ABI major " + std::to_string(toml.abi_major) + ", this core has " +
                            std::to_string(STRATA_ABI_MAJOR));
  if (toml.min_host_minor > STRATA_ABI_MINOR)
    return refuse(toml, "needs a core of ABI " + std::to_string(STRATA_ABI_MAJOR) + "." +
                            std::to_string(toml.min_host_minor) + " or newer, this one has " +
                            std::to_string(STRATA_ABI_MAJOR) + "." + std::to_string(STRATA_ABI_MINOR));
  for (const std::string& id : toml.host_interfaces) {
    const std::vector<std::string>& have = host_interface_ids();
    if (std::find(have.begin(), have.end(), id) == have.end())
      return refuse(toml, "needs " + id + " from the core, which has " + join(have));
  }
  return Ok();
}

// The library against its own TOML.
Status check_descriptor(const PluginToml& toml, const strata_plugin* d) {
  const size_t frozen = offsetof(strata_plugin, get_interface) + sizeof(d->get_interface);
  if (!d)
    return refuse(toml, "says it cannot serve a core of ABI " + std::to_string(STRATA_ABI_MAJOR) + "." +
                            std::to_string(STRATA_ABI_MINOR) + " (its entry returned NULL)");
  if (d->struct_size < frozen)
    return refuse(toml, "its descriptor has " + std::to_string(d->struct_size) + " bytes, at least " +
                            std::to_string(frozen) + " are needed");
  if (!d->id || !d->version || !d->get_interface)
    return refuse(toml, std::string("its descriptor has no ") + (!d->id        ? "id"
                                                                 : !d->version ? "version"
                                                                               : "get_interface"));
  if (toml.id != d->id) return refuse(toml, "calls itself \"" + printable(d->id) + "\", its TOML \"" + toml.id + "\"");
  if (toml.version != d->version)
    return refuse(toml, "is version " + printable(d->version) + ", its TOML says " + toml.version +
                            ": they are from different builds");
  return Ok();
}

strata_option to_c(const PluginOption& option) {
  strata_option o{};
  o.struct_size = sizeof o;
  o.abi_minor = STRATA_ABI_MINOR;
  o.key = option.key.c_str();
  o.type = static_cast<strata_option_type>(option.value.index()) + STRATA_OPT_BOOL;
  o.s = "";
  if (const auto* b = std::get_if<bool>(&option.value)) o.i = *b ? 1 : 0;
  if (const auto* i = std::get_if<int64_t>(&option.value)) o.i = *i;
  if (const auto* f = std::get_if<double>(&option.value)) o.f = *f;
  if (const auto* s = std::get_if<std::string>(&option.value)) o.s = s->c_str();
  return o;
}

// "./x" is "x". Names are not resolved any further: "a/.." need not be "." where a is a link.
fs::path without_dots(const fs::path& path) {
  fs::path clean;
  for (const fs::path& part : path)
    if (part != ".") clean /= part;
  return clean.empty() ? path : clean;
}

// "\ndid you mean ...?", or what there is.
std::string meant_instead_of(const std::string& name, const std::vector<fs::path>& directories) {
  std::set<std::string> ids, there;
  for (const fs::path& dir : directories) {
    std::error_code error;
    for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error))
      if (const fs::path kind = entry->path().extension(); kind == ".toml" || kind == ".absent")
        (kind == ".toml" ? there : ids).insert(printable(entry->path().stem().string()));
  }
  ids.insert(there.begin(), there.end());
  const std::string near = nearest(name, {ids.begin(), ids.end()});
  if (!near.empty()) return "\ndid you mean " + near + "?";
  return there.empty() ? "" : "\nthere are: " + join({there.begin(), there.end()});
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") ==
                              std::string::npos;
}

}  // namespace

std::string why_not_built(const fs::path& absent) {
  std::ifstream file(absent);
  std::string why;
  std::getline(file, why);
  return printable(why, 300);
}

PluginSearch PluginSearch::from_settings(const Settings& settings, const fs::path& library_dir) {
  PluginSearch search;
  search.manifest_dir = settings.manifest_dir;
  for (const std::string& dir : settings.plugins.path)
    search.directories.push_back(without_dots(settings.resolve(dir)));
  const char* const environment = secure_getenv("STRATA_PLUGIN_PATH");
  std::string rest = environment ? environment : "";
  while (!rest.empty()) {
    const size_t colon = rest.find(':');
    const std::string dir = rest.substr(0, colon);
    rest = colon == std::string::npos ? "" : rest.substr(colon + 1);
    if (dir.empty()) continue;
    if (dir.front() == '/') {
      search.directories.push_back(dir);
    } else {
      search.ignored.push_back("STRATA_PLUGIN_PATH entry " + dir + ": not searched, it is no absolute path");
    }
  }
  if (!library_dir.empty()) search.directories.push_back(library_dir / "plugins");
  return search;
}

PluginSet::PluginSet(PluginSearch search, std::map<std::string, std::vector<PluginOption>> options)
    : search_(std::move(search)), given_options_(std::move(options)) {}
PluginSet::~PluginSet() = default;

Status PluginSet::find_toml(const std::string& name, fs::path* toml) const {
  std::string tried;
  const bool is_path = name.find('/') != std::string::npos;
  bool is_known = false;
  std::error_code error;
  const auto is_there = [&](fs::path candidate) {
    const fs::path library = fs::path(candidate).replace_extension(".so");
    if (fs::exists(candidate, error)) {
      *toml = std::move(candidate);
      return true;
    }
    tried += "\n  " + candidate.string() + ": " + (error ? error.message() : "no such file");
    if (fs::exists(library, error)) tried += " (" + library.filename().string() + " is there, but not its TOML)";
    const std::string why = why_not_built(candidate.replace_extension(".absent"));
    if (!why.empty()) tried += "; the plugin was not built: " + why;
    is_known = is_known || !why.empty();
    return false;
  };
  if (is_path) {
    fs::path path = without_dots(search_.manifest_dir / name);
    if (path.extension() != ".so" && path.extension() != ".toml") path += ".toml";
    if (is_there(path.replace_extension(".toml"))) return Ok();
  } else if (!is_plain_name(name)) {
    return {STRATA_INVALID_ARGUMENT, "\"" + name + "\" is no plugin id (letters, digits, _ and -) and no path"};
  } else {
    for (const fs::path& dir : search_.directories)
      if (is_there(dir / (name + ".toml"))) return Ok();
  }
  for (const std::string& text : search_.ignored) tried += "\n  " + text;
  return {STRATA_NOT_FOUND, "plugin " + name + " was not found; tried:" + (tried.empty() ? " no directory" : tried) +
                                (is_known || is_path ? "" : meant_instead_of(name, search_.directories))};
}

Status PluginSet::locate(const std::string& name, Plugin** out) {
  fs::path path;
  STRATA_RETURN_IF_ERROR(find_toml(name, &path));
  std::error_code error;
  const fs::path real = fs::canonical(path, error);
  std::unique_ptr<Plugin>& slot = plugins_[(error ? path : real).string()];
  if (!slot) {
    auto plugin = std::make_unique<Plugin>();
    Status status = read_plugin_toml(path, &plugin->toml).during("plugin " + name);
    if (status.ok() && plugin->toml.id != path.stem())
      status = {STRATA_FAILED_PRECONDITION, "plugin " + name + ": " + path.string() + " has id \"" + plugin->toml.id +
                                                "\"; a plugin's TOML is named after its id"};
    if (!status.ok()) {
      plugins_.erase((error ? path : real).string());
      return status;
    }
    slot = std::move(plugin);
  }
  *out = slot.get();
  return Ok();
}

Status PluginSet::fill_options(Plugin* plugin) {
  if (plugin->list.struct_size != 0) return Ok();
  const auto given = given_options_.find(plugin->toml.id);
  std::vector<PluginOption> all = given == given_options_.end() ? std::vector<PluginOption>{} : given->second;
  STRATA_RETURN_IF_ERROR(add_presets(*plugin, &all));
  STRATA_RETURN_IF_ERROR(merge_plugin_options(plugin->toml, all, &plugin->values));
  for (const PluginOption& value : plugin->values) plugin->flat.push_back(to_c(value));
  plugin->list = {sizeof(strata_options), STRATA_ABI_MINOR, plugin->flat.data(), plugin->flat.size(),
                  sizeof(strata_option)};
  return Ok();
}

Status PluginSet::add_presets(const Plugin& plugin, std::vector<PluginOption>* options) {
  const PluginToml& toml = plugin.toml;
  for (Preset& preset : presets_) {
    const auto& provided = toml.interfaces;
    if (std::find(provided.begin(), provided.end(), preset.interface_id) == provided.end()) continue;
    if (!toml.find_option(preset.option.key)) continue;
    preset.taken = true;
    const auto twice = std::find_if(options->begin(), options->end(),
                                    [&](const PluginOption& o) { return o.key == preset.option.key; });
    if (twice == options->end()) {
      options->push_back(preset.option);
    } else if (preset.given) {
      return {STRATA_INVALID_ARGUMENT, twice->where + ": [plugin." + toml.id + "] " + twice->key + " and " +
                                           preset.from + " (" + preset.option.where + ") say the same thing"};
    }
  }
  return Ok();
}

Status PluginSet::load(Plugin* plugin) {
  if (plugin->descriptor) return Ok();
  const PluginToml& toml = plugin->toml;
  STRATA_RETURN_IF_ERROR(check_requirements(toml));
  STRATA_RETURN_IF_ERROR(elf_preflight(toml.library).during("plugin " + toml.id));

  // RTLD_NODELETE: never unmapped, so that function pointers and thread-local destructors of the plugin stay valid
  // whatever happens to this object.
  namespace dll = boost::dll;
  const auto mode =
      dll::load_mode::rtld_now | dll::load_mode::rtld_local | static_cast<dll::load_mode::type>(RTLD_NODELETE);
  const strata_plugin* descriptor = nullptr;
  try {
    dll::shared_library library(fs::absolute(toml.library), mode);
    if (!library.has(STRATA_PLUGIN_ENTRY))
      return refuse(toml, std::string("exports no ") + STRATA_PLUGIN_ENTRY + ": it is no Strata plugin of ABI major " +
                              std::to_string(STRATA_ABI_MAJOR));
    auto& entry = library.get<const strata_plugin*(uint32_t)>(STRATA_PLUGIN_ENTRY);
    if (!is_function(reinterpret_cast<const void*>(&entry)))
      return refuse(toml, std::string("its ") + STRATA_PLUGIN_ENTRY + " is no function");
    descriptor = entry(STRATA_ABI_MINOR);
    plugin->library = std::move(library);
  } catch (const std::exception& e) {
    return refuse(toml, "cannot be loaded: " + loader_text(e.what()));
  }
  STRATA_RETURN_IF_ERROR(check_descriptor(toml, descriptor));
  plugin->descriptor = descriptor;
  loaded_.push_back(plugin);
  log_lines_.push_back("plugin " + toml.id + " " + toml.version + ", ABI " + std::to_string(STRATA_ABI_MAJOR) + "." +
                       std::to_string(std::min(descriptor->abi_minor, STRATA_ABI_MINOR)) + ", " +
                       join(toml.interfaces) + ", " + toml.library.string());
  return Ok();
}

Status PluginSet::find(const std::string& name, const std::string& interface_id, const void** table) {
  std::lock_guard lock(mutex_);
  Plugin* plugin = nullptr;
  STRATA_RETURN_IF_ERROR(locate(name, &plugin));
  plugin->asked = true;
  const PluginToml& toml = plugin->toml;
  if (std::find(toml.interfaces.begin(), toml.interfaces.end(), interface_id) == toml.interfaces.end())
    return refuse(toml, "provides " + join(toml.interfaces) + ", " + interface_id + " is needed");
  STRATA_RETURN_IF_ERROR(load(plugin));
  if (const auto known = plugin->tables.find(interface_id); known != plugin->tables.end()) {
    *table = known->second.get();
    return Ok();
  }
  const void* raw = plugin->descriptor->get_interface(interface_id.c_str());
  if (!raw) return refuse(toml, "its TOML promises " + interface_id + ", the library has none");
  if (!is_known_interface(interface_id)) {
    *table = plugin->raw_tables[interface_id] = raw;
    return Ok();
  }
  CompletedTable completed;
  STRATA_RETURN_IF_ERROR(complete_table(toml.id, interface_id, raw, &completed));
  *table = completed.get();
  plugin->tables[interface_id] = std::move(completed);
  return Ok();
}

Status PluginSet::options(const std::string& name, const strata_options** out) {
  std::lock_guard lock(mutex_);
  Plugin* plugin = nullptr;
  STRATA_RETURN_IF_ERROR(locate(name, &plugin));
  plugin->asked = true;
  STRATA_RETURN_IF_ERROR(fill_options(plugin));
  *out = &plugin->list;
  return Ok();
}

Status PluginSet::check_options(const Settings& settings) {
  std::lock_guard lock(mutex_);
  std::string lines;
  const auto add = [&](const Status& status) {
    if (!status.ok()) lines += (lines.empty() ? "" : "\n") + status.text();
  };
  const PluginChoices& chosen = settings.plugins;
  for (const std::string& dir : chosen.path) {
    std::error_code error;
    if (!fs::is_directory(settings.resolve(dir), error))
      add({STRATA_NOT_FOUND,
           settings.named("plugins.path") + ": " + without_dots(settings.resolve(dir)).string() + " is no directory"});
  }
  Plugin* plugin = nullptr;
  std::map<std::string, std::string> name_of;  // id -> how the manifest names it, for those given by path
  for (const auto& [role, name] : {std::pair{"device", &chosen.device},
                                   {"host_device", &chosen.host_device},
                                   {"collective", &chosen.collective},
                                   {"offload_cpu", &chosen.offload_cpu},
                                   {"offload_nvme", &chosen.offload_nvme},
                                   {"optimizer", &chosen.optimizer},
                                   {"device_optimizer", &chosen.device_optimizer},
                                   {"checkpoint", &chosen.checkpoint}}) {
    if (name->find('/') == std::string::npos) continue;
    const Status status = locate(*name, &plugin);
    add(status.during(settings.named(std::string("plugins.") + role)));
    if (status.ok()) name_of[plugin->toml.id] = *name;
  }
  for (const auto& [id, given] : given_options_) {
    const auto named = name_of.find(id);
    const Status status = locate(named == name_of.end() ? id : named->second, &plugin);
    const std::string where = given.empty() ? "" : given.front().where + ": ";
    add(status.ok() ? fill_options(plugin) : Status(status.code(), where + "[plugin." + id + "]: " + status.text()));
  }
  return lines.empty() ? Ok() : Status(STRATA_INVALID_ARGUMENT, lines);
}

Status PluginSet::check_all_used() const {
  std::lock_guard lock(mutex_);
  std::string lines;
  for (const auto& [id, given] : given_options_) {
    const bool used = std::any_of(plugins_.begin(), plugins_.end(), [&, id = id](const auto& entry) {
      return entry.second->asked && entry.second->toml.id == id;
    });
    if (!used && !given.empty())
      lines += (lines.empty() ? "" : "\n") + given.front().where + ": [plugin." + id +
               "] has no effect: this run does not use that plugin";
  }
  for (const Preset& preset : presets_) {
    if (preset.given && !preset.taken)
      lines += (lines.empty() ? "" : "\n") + preset.option.where + ": " + preset.from +
               " has no effect: no plugin of this run that serves " + preset.interface_id + " has an option \"" +
               preset.option.key + "\"";
  }
  return lines.empty() ? Ok() : Status(STRATA_INVALID_ARGUMENT, lines);
}

void PluginSet::preset(const std::string& interface_id, PluginOption option, const std::string& from, bool given) {
  std::lock_guard lock(mutex_);
  presets_.push_back({interface_id, std::move(option), from, given});
}

void preset_options(const Settings& settings, PluginSet* plugins) {
  // A default that the user wrote out asks nothing of a plugin that has no such option.
  const auto hand_on = [&](const char* interface_id, const char* option, auto value, auto usual,
                           const std::string& key) {
    plugins->preset(interface_id, {option, value, settings.origin(key)}, key, settings.is_given(key) && value != usual);
  };
  const OptimizerSettings usual = default_settings().optimizer;
  const OptimizerSettings& optimizer = settings.optimizer;
  const std::string params = "optimizer.params.", zero = "zero_optimization.";
  hand_on(STRATA_OPTIMIZER, "layout", optimizer.state_layout, usual.state_layout, params + "state_layout");
  hand_on(STRATA_OPTIMIZER, "decoupled", optimizer.adam_w_mode, usual.adam_w_mode,
          settings.is_given("optimizer.type") && !settings.is_given(params + "adam_w_mode") ? "optimizer.type"
                                                                                            : params + "adam_w_mode");
  // One plugin instance serves both kinds of offload; page-locked memory is asked for when either wants it in its tier.
  // What lies on disk passes through memory that a device with streams has page-locked anyway.
  const OffloadOptimizerSettings& state = settings.zero_optimization.offload_optimizer;
  const OffloadParamSettings& param = settings.zero_optimization.offload_param;
  const bool pin_state = state.pin_memory && state.device == OffloadDevice::kCpu;
  const bool shards_in_memory = param.device == OffloadDevice::kCpu || param.max_in_cpu > 0;
  const bool pin_param = param.pin_memory && param.device != OffloadDevice::kNone && shards_in_memory;
  hand_on(STRATA_OFFLOAD, "pin_memory", pin_state || pin_param, false,
          zero + (pin_param ? "offload_param.pin_memory" : "offload_optimizer.pin_memory"));
  const bool state_on_nvme = state.device == OffloadDevice::kNvme;
  if (!state_on_nvme && param.device != OffloadDevice::kNvme) return;
  const std::string section = zero + (state_on_nvme ? "offload_optimizer." : "offload_param.");
  hand_on(STRATA_OFFLOAD, "nvme_path", settings.resolve_list(state_on_nvme ? state.nvme_path : param.nvme_path),
          std::string(), section + "nvme_path");
  hand_on(STRATA_OFFLOAD, "fast_init", state.fast_init, false, zero + "offload_optimizer.fast_init");
}

std::vector<PluginInfo> PluginSet::describe() const {
  std::lock_guard lock(mutex_);
  std::vector<PluginInfo> all;
  for (const Plugin* plugin : loaded_) {
    PluginInfo info{plugin->toml.id,
                    plugin->toml.name,
                    plugin->toml.version,
                    plugin->toml.file,
                    plugin->toml.library,
                    std::min(plugin->descriptor->abi_minor, STRATA_ABI_MINOR),
                    {}};
    for (const auto& entry : plugin->tables) info.interfaces.push_back(entry.first);
    for (const auto& entry : plugin->raw_tables) info.interfaces.push_back(entry.first);
    all.push_back(std::move(info));
  }
  return all;
}

std::vector<std::string> PluginSet::take_log_lines() {
  std::lock_guard lock(mutex_);
  return std::exchange(log_lines_, {});
}

}  // namespace strata
