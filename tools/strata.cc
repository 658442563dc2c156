// strata.cc - the `strata` command: what can be asked of a build and of a manifest without running anything.
//
//   strata check MANIFEST      every error and warning of a manifest, its plugins' options included
//   strata keys [--markdown]   the commented reference manifest, or the table of keys
//   strata plugins [MANIFEST]  the plugins found beside the library (or as the manifest says): id, version, interfaces
//   strata version
#include <CLI/CLI.hpp>
#include <filesystem>
#include <iostream>

#include "core/library_dir.h"
#include "core/manifest.h"
#include "core/manifest_keys.h"
#include "core/plugin_toml.h"
#include "core/plugins.h"

namespace {

using strata::Status;

int report(const Status& status) {
  if (status.ok()) return 0;
  std::cerr << status.text() << "\n";
  return 1;
}

// bin/ and lib/ lie side by side in a build and in an installation.
std::filesystem::path library_dir() { return std::filesystem::path(strata::this_library_dir()).parent_path() / "lib"; }

int check(const std::string& manifest) {
  strata::Settings settings;
  std::vector<std::string> warnings;
  const Status status = strata::read_manifest(manifest, {}, &settings, &warnings);
  for (const std::string& warning : warnings) std::cout << "warning: " << warning << "\n";
  if (!status.ok()) return report(status);
  strata::PluginSet plugins(strata::PluginSearch::from_settings(settings, library_dir()), settings.plugin_options);
  const Status options = plugins.check_options(settings.plugins);
  if (!options.ok()) return report(options);
  std::cout << manifest << ": no errors\n";
  return 0;
}

int keys(bool markdown) {
  std::cout << (markdown ? strata::manifest_key_docs() : strata::reference_manifest());
  return 0;
}

int plugins(const std::string& manifest) {
  strata::Settings settings = strata::default_settings();
  std::vector<std::string> warnings;
  if (!manifest.empty()) {
    if (int bad = report(strata::read_manifest(manifest, {}, &settings, &warnings))) return bad;
  }
  const auto search = strata::PluginSearch::from_settings(settings, library_dir());
  int failed = 0;
  for (const auto& dir : search.directories) {
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
      if (entry.path().extension() != ".toml") continue;
      strata::PluginToml plugin;
      if (report(strata::read_plugin_toml(entry.path(), &plugin))) {
        failed = 1;
        continue;
      }
      std::cout << plugin.id << " " << plugin.version << "  " << plugin.name << "\n ";
      for (const std::string& id : plugin.interfaces) std::cout << " " << id;
      std::cout << "\n";
    }
    if (error) std::cerr << dir.string() << ": " << error.message() << "\n";
  }
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Asks a Strata build, or a manifest, without running anything."};
  app.require_subcommand(1);
  std::string manifest;
  bool markdown = false;
  auto* check_command = app.add_subcommand("check", "every error and warning of a manifest");
  check_command->add_option("manifest", manifest, "the TOML file")->required();
  auto* keys_command = app.add_subcommand("keys", "the commented reference manifest");
  keys_command->add_flag("--markdown", markdown, "as tables");
  auto* plugins_command = app.add_subcommand("plugins", "the plugins that would be found");
  plugins_command->add_option("manifest", manifest, "whose search path to use");
  auto* version_command = app.add_subcommand("version", "of this build");
  CLI11_PARSE(app, argc, argv);
  if (*check_command) return check(manifest);
  if (*keys_command) return keys(markdown);
  if (*plugins_command) return plugins(manifest);
  if (*version_command) std::cout << STRATA_VERSION << "\n";
  return 0;
}
