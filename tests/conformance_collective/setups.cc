// setups.cc - the plugins that the tests of this folder run with, and how.
#include <algorithm>

#include "ranks.h"

namespace strata::test {

std::vector<Setup> all_setups(const std::vector<int>& worlds) {
  std::vector<Setup> setups;
  std::vector<std::string> plugins = {"comm_local"};
  if (!plugin_from_outside().empty()) plugins.push_back(plugin_from_outside());
  for (const std::string& plugin : plugins) {
    for (bool threads : {true, false}) {
      for (int world : worlds) setups.push_back({plugin, threads, world});
    }
  }
  if (std::count(worlds.begin(), worlds.end(), 1)) setups.push_back({"null", true, 1});  // it serves no other world
  return setups;
}

}  // namespace strata::test
