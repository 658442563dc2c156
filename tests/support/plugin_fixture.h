// plugin_fixture.h - opens one plugin of this build directly by its ABI, with the core's host services around it.
//
// For conformance tests: no manifest, no loader. Options are given in code.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/plugins/host.h"
#include "strata/plugin.h"

namespace strata::test {

// Options for a plugin instance: Options().set("threads", 2).set("path", "/x")
class Options {
 public:
  Options& set(const std::string& key, int64_t value);
  Options& set(const std::string& key, int value) { return set(key, static_cast<int64_t>(value)); }
  Options& set(const std::string& key, bool value);
  Options& set(const std::string& key, double value);
  Options& set(const std::string& key, const std::string& value);
  Options& set(const std::string& key, const char* value) { return set(key, std::string(value)); }
  const strata_options* c();

 private:
  struct Entry {
    std::string key, text;
    strata_option option;
  };
  std::vector<Entry> entries_;
  std::vector<strata_option> flat_;
  strata_options list_{};
};

// The library of STRATA_TEST_PLUGIN, a path, "" when it is not set: conformance tests run on it, too, so that a plugin
// outside this tree is held to the same rules as those inside.
std::string plugin_from_outside();
// What tests are named by: "my_tier" for "my_tier" and for "/home/me/my_tier.so".
std::string plugin_id(const std::string& plugin);

// "", or why no test can open this plugin: its TOML beside the library requires a host interface that tests do not
// lend.
std::string missing_host_interface(const std::string& plugin);

// Loads lib/plugins/<name>.so of this build, or the library at a path (RTLD_NOW | RTLD_LOCAL, never unloaded), and
// returns its table for the interface, or fails the test and returns NULL.
const void* load_interface(const std::string& plugin, const std::string& interface_id);

template <class Api>
const Api* load(const std::string& plugin, const std::string& interface_id) {
  return static_cast<const Api*>(load_interface(plugin, interface_id));
}

// Open arguments of one rank: host services, rank numbers, a 10 s deadline.
struct Rank {
  explicit Rank(int rank = 0, int world = 1, bool threads = true, const std::string& job = "test");
  strata_open_args args(Options* options = nullptr);

  std::vector<std::string> log_lines;  // what plugins logged
  std::string job;
  Host host;
  strata_open_args base{};
};

}  // namespace strata::test
