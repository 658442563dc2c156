// plugin_toml.h - reads <id>.toml, what a plugin says about itself before anything of it is mapped.
//
// Strict: an unknown key, a wrong type, a missing required key, a manifest_version from the future are errors with
// file, line and column. Paths in it are relative to the TOML's own directory.
//
//   manifest_version = 1, id, name, version, license, optional publisher and url
//   [abi] major, min_host_minor    [library] path    [provides] interfaces    optional [requires] host
//   [options.KEY] type = "bool|int|float|string", default, doc
#pragma once

#include <filesystem>
#include <string>
#include <variant>
#include <vector>

#include "core/manifest/settings.h"
#include "core/status.h"

namespace strata {

inline constexpr int64_t kPluginManifestVersion = 1;

// One [options.KEY] table.
struct PluginOptionSpec {
  std::string key;
  strata_option_type type = STRATA_OPT_BOOL;
  std::variant<bool, int64_t, double, std::string> value;  // the default
  std::string doc;
};

struct PluginToml {
  std::filesystem::path file;
  std::string id, name, version, license;
  int64_t abi_major = 0, min_host_minor = 0;
  std::filesystem::path library;             // absolute or relative to the process, ready to open
  std::vector<std::string> interfaces;       // [provides] interfaces
  std::vector<std::string> host_interfaces;  // [requires] host
  std::vector<PluginOptionSpec> options;

  const PluginOptionSpec* find_option(const std::string& key) const;
};

// All errors of the file, one a line.
Status read_plugin_toml(const std::filesystem::path& file, PluginToml* out);
// The same from memory; `file` is where the text would lie.
Status parse_plugin_toml(const std::string& text, const std::filesystem::path& file, PluginToml* out);

// A plugin's options for one run: its defaults, replaced by what [plugin.<id>] gives. Whole floats are taken for ints.
// All errors, one a line: unknown key with the nearest one, wrong type.
Status merge_plugin_options(const PluginToml& plugin, const std::vector<PluginOption>& given,
                            std::vector<PluginOption>* out);

}  // namespace strata
