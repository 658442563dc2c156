// strata.cc - the `strata` command: what can be asked of a build and of a manifest without running anything.
//
//   strata check MANIFEST [--set KEY=VALUE ...] [--world N]
//                                      every error and warning of a manifest, its plugins and its batch sizes
//   strata keys [--markdown]           the commented reference manifest, or the table of keys
//   strata plugins [MANIFEST] [-v]     the plugins found beside the library (or as the manifest says)
//   strata bench io PATH... [--json]  what disks give to the NVMe tier, and the settings that get most of it
//   strata version
//
// Exit codes: 0 all is well, 1 the manifest or a plugin is wrong, 2 the command line is.
#include "strata/strata.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdint>
#include <exception>
#include <iostream>

#include "core/manifest/nearest.h"
#include "core/plugins/library_dir.h"
#include "tools/commands.h"
#include "tools/manifest_docs.h"

namespace strata::cli {

int report(const Status& status) {
  if (status.ok()) return 0;
  std::cerr << status.text() << "\n";
  return 1;
}

std::filesystem::path library_dir() { return directory_of(reinterpret_cast<const void*>(&strata_version)); }

namespace {

int keys(bool markdown) {
  std::cout << (markdown ? manifest_key_docs() : reference_manifest());
  return 0;
}

int version() {
  std::cout << strata_version() << "\n";
  return 0;
}

std::vector<std::string> commands_of(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands({})) names.push_back(command->get_name());
  return names;
}

int no_such_command(const std::string& typed, const std::vector<std::string>& names) {
  std::string near = nearest(typed, names), all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  std::cerr << "strata: there is no command \"" << typed << "\"; "
            << (near.empty() ? "there are: " + all : "did you mean \"" + near + "\"?") << "\n";
  return 2;
}

int run(int argc, char** argv) {
  CLI::App app{"Asks a Strata build, or a manifest, without running anything."};
  app.require_subcommand(1);
  app.footer("Exit codes: 0 all is well, 1 the manifest or a plugin is wrong, 2 the command line is.");
  CheckArgs check_args;
  PluginsArgs plugins_args;
  bool markdown = false;
  auto* check_command = app.add_subcommand("check", "every error and warning of a manifest, its plugins included");
  check_command->add_option("manifest", check_args.manifest, "the TOML file")->required();
  check_command->footer(
      "Goes on after an error, so that one run shows all that is wrong. Not known: of a file that is no TOML, "
      "anything\n"
      "else; which keys exclude each other while a value is wrong; which [plugin.NAME] sections have no effect while\n"
      "there is any other error. What only an open plugin knows (ranges of its options, memory, devices, other ranks)\n"
      "shows at strata_open. A directory that is not on this machine is a warning.");
  const CLI::Validator assignment(
      [](const std::string& text) {
        return text.find('=') != std::string::npos ? std::string() : "\"" + text + "\" is not KEY=VALUE";
      },
      "KEY=VALUE");
  check_command->add_option("--set", check_args.overrides, "override a setting; may be repeated")
      ->allow_extra_args(false)
      ->check(assignment);
  check_command
      ->add_option("--world", check_args.world, "number of ranks the batch sizes have to fit; as many as one model has")
      ->check(CLI::Range(int64_t{1}, int64_t{INT32_MAX}));
  auto* keys_command = app.add_subcommand("keys", "the commented reference manifest");
  keys_command->add_flag("--markdown", markdown, "as tables");
  auto* plugins_command = app.add_subcommand("plugins", "the plugins that would be found, each loaded once");
  plugins_command->add_option("manifest", plugins_args.manifest, "whose search path to use");
  plugins_command->add_flag("-v,--verbose", plugins_args.verbose, "with options, their defaults and what they do");
  BenchIoArgs io_args;
  auto* bench_command = app.add_subcommand("bench", "measures this machine");
  bench_command->require_subcommand(1);
  auto* io_command = bench_command->add_subcommand("io", "disks: read, write and mixed, and settings for a manifest");
  io_command->add_option("path", io_args.paths, "a directory on each disk")->required();
  io_command->add_option("--seconds", io_args.seconds, "of each of the 36 measurements of a round")
      ->capture_default_str()
      ->check(CLI::Range(0.01, 60.0));
  io_command->add_option("--rounds", io_args.rounds, "how often a disk is measured; the medians count")
      ->capture_default_str()
      ->check(CLI::Range(3u, 1000u));
  io_command->add_option("--file-mib", io_args.file_mib, "MiB of the file that is written and read")
      ->capture_default_str()
      ->check(CLI::Range(uint64_t{16}, uint64_t{1} << 20));
  io_command->add_flag("--json", io_args.json, "as JSON; tools/plot_io.py draws it");
  app.add_subcommand("version", "of this build");
  app.set_version_flag("--version", strata_version());
  const std::vector<std::string> names = commands_of(app);
  const std::string first = argc > 1 ? argv[1] : "-";
  if (first[0] != '-' && std::count(names.begin(), names.end(), first) == 0) return no_such_command(first, names);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;  // 0: help was asked for
  }
  if (*check_command) return check(check_args);
  if (*keys_command) return keys(markdown);
  if (*plugins_command) return plugins(plugins_args);
  if (*io_command) return bench_io(io_args);
  return version();
}

}  // namespace
}  // namespace strata::cli

int main(int argc, char** argv) {
  try {
    const int code = strata::cli::run(argc, argv);
    if (std::cout.flush()) return code;
    std::cerr << "strata: the output could not be written\n";
  } catch (const std::exception& e) {
    std::cerr << "strata: " << e.what() << "\n";
  }
  return 1;
}
