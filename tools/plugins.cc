// plugins.cc - `strata plugins`: every plugin of the search path, sorted by id, each loaded as a run would load it.
//
// A plugin that cannot be used is listed with the reason, and makes the exit code 1; one that the build left out is
// listed, too. Of several with one id the first
// of the search order is used by runs; the others are listed as hidden.
#include "core/plugins/plugins.h"

#include <algorithm>
#include <iostream>
#include <map>

#include "core/manifest/manifest.h"
#include "core/manifest/plugin_toml.h"
#include "tools/commands.h"

namespace strata::cli {
namespace {

namespace fs = std::filesystem;

// The plugin was left out once and is built now.
bool is_there(fs::path absent) { return fs::exists(absent.replace_extension(".toml")); }

// The TOML files of the search path, or what stands in their place, by id; those of one id in search order.
std::map<std::string, std::vector<fs::path>> find_all(const PluginSearch& search) {
  std::map<std::string, std::vector<fs::path>> found;
  for (const std::string& text : search.ignored) std::cout << "note: " << text << "\n";
  for (const fs::path& dir : search.directories) {
    std::error_code error;
    for (fs::directory_iterator entry(dir, error), end; !error && entry != end; entry.increment(error))
      if (const fs::path kind = entry->path().extension(); kind == ".toml" || (kind == ".absent" && !is_there(*entry)))
        found[entry->path().stem()].push_back(fs::absolute(entry->path()));
    if (error) std::cout << "note: " << dir.string() << ": " << error.message() << "\n";
  }
  return found;
}

// Reads and loads one plugin, all its interfaces.
Status try_plugin(const PluginSearch& search, const fs::path& file, PluginToml* toml) {
  STRATA_RETURN_IF_ERROR(read_plugin_toml(file, toml));
  PluginSet plugins(search, {});
  for (const std::string& id : toml->interfaces) {
    const void* table = nullptr;
    STRATA_RETURN_IF_ERROR(plugins.find(file.string(), id, &table));
  }
  return Ok();
}

std::string literal(const PluginOptionSpec& option) {
  if (const auto* b = std::get_if<bool>(&option.value)) return *b ? "true" : "false";
  if (const auto* i = std::get_if<int64_t>(&option.value)) return std::to_string(*i);
  if (const auto* s = std::get_if<std::string>(&option.value)) return "\"" + *s + "\"";
  std::ostringstream text;
  text << std::get<double>(option.value);
  return text.str();
}

void print_options(const PluginToml& toml) {
  static const char* const types[] = {"bool", "int", "float", "string"};
  for (const PluginOptionSpec& option : toml.options)
    std::cout << "  option " << option.key << " (" << types[option.value.index()] << ", default " << literal(option)
              << "): " << option.doc << "\n";
  if (toml.options.empty()) std::cout << "  no options\n";
}

void print_exports(const fs::path& library) {
  const std::vector<std::string> names = extra_exports(library);
  if (names.empty()) return;
  std::cout << "  warning: exports " << names.size() << " names beside strata_plugin_entry_v1:";
  for (size_t i = 0; i < std::min<size_t>(names.size(), 3); ++i) std::cout << " " << names[i];
  std::cout << (names.size() > 3 ? " ...\n" : "\n");
}

}  // namespace

int plugins(const PluginsArgs& args) {
  Settings settings = default_settings();
  if (!args.manifest.empty()) {
    if (const int bad = report(read_manifest(args.manifest, {}, &settings, nullptr))) return bad;
  }
  const auto search = PluginSearch::from_settings(settings, library_dir());
  int code = 0;
  for (const auto& [id, files] : find_all(search)) {
    for (const fs::path& file : files) {
      if (file.extension() == ".absent") {
        std::cout << id << "  not built\n  " << why_not_built(file) << "\n";
        continue;
      }
      PluginToml toml;
      const Status status = try_plugin(search, file, &toml);
      if (!status.ok()) {
        std::cout << id << "  broken\n  " << file.string() << "\n  " << status.text() << "\n";
        code = 1;
        continue;
      }
      std::cout << id << " " << toml.version << " ";
      for (const std::string& provided : toml.interfaces) std::cout << " " << provided;
      std::cout << "\n  " << toml.name << "\n  " << toml.library.string() << "\n";
      if (file != files.front()) std::cout << "  hidden by " << files.front().string() << "\n";
      print_exports(toml.library);
      if (args.verbose) print_options(toml);
    }
  }
  return code;
}

}  // namespace strata::cli
