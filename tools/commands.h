// commands.h - the commands of `strata` that look at plugins and disks: what they are asked, and what they answer.
//
// Each prints its findings on stdout and its errors on stderr, and returns the program's exit code: 0, or 1 when the
// manifest or a plugin is wrong.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "core/status.h"

namespace strata::cli {

struct CheckArgs {
  std::string manifest;
  std::vector<std::string> overrides;  // KEY=VALUE
  int64_t world = 0;                   // 0: the ranks of one model
};
// Everything strata_open would refuse that can be told without opening a plugin or meeting other ranks.
int check(const CheckArgs& args);

struct PluginsArgs {
  std::string manifest;  // whose search path to use; "": that of a manifest without [plugins]
  bool verbose = false;  // with options
};
// Every plugin of the search path, each loaded as a run would.
int plugins(const PluginsArgs& args);

struct BenchIoArgs {
  std::vector<std::string> paths;
  double seconds = 0.1;     // of each measurement
  unsigned rounds = 5;      // of all measurements
  uint64_t file_mib = 512;  // of the file that is moved
  bool json = false;
};
// What the disks behind these directories give, and the settings that go with it.
int bench_io(const BenchIoArgs& args);

// Prints what went wrong, if anything did; the exit code.
int report(const Status& status);
// Where libstrata.so lies: the rule for plugins is the same for this program as for a host that links the library.
std::filesystem::path library_dir();
// Names that a library exports beside strata_plugin_entry_v1.
std::vector<std::string> extra_exports(const std::filesystem::path& library);

}  // namespace strata::cli
