#include "tests/support/plugin_fixture.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "core/manifest/plugin_toml.h"

namespace strata::test {

namespace {
strata_option blank(strata_option_type type) {
  strata_option o{};
  o.struct_size = sizeof(o);
  o.type = type;
  return o;
}

std::filesystem::path library_of(const std::string& plugin) {
  return plugin.find('/') != plugin.npos ? plugin : std::string(STRATA_PLUGIN_DIR) + "/" + plugin + ".so";
}
}  // namespace

Options& Options::set(const std::string& key, int64_t value) {
  strata_option o = blank(STRATA_OPT_INT);
  o.i = value;
  entries_.push_back({key, "", o});
  return *this;
}
Options& Options::set(const std::string& key, bool value) {
  strata_option o = blank(STRATA_OPT_BOOL);
  o.i = value;
  entries_.push_back({key, "", o});
  return *this;
}
Options& Options::set(const std::string& key, double value) {
  strata_option o = blank(STRATA_OPT_FLOAT);
  o.f = value;
  entries_.push_back({key, "", o});
  return *this;
}
Options& Options::set(const std::string& key, const std::string& value) {
  entries_.push_back({key, value, blank(STRATA_OPT_STRING)});
  return *this;
}

const strata_options* Options::c() {
  flat_.clear();
  for (auto& e : entries_) {
    e.option.key = e.key.c_str();
    e.option.s = e.text.c_str();
    flat_.push_back(e.option);
  }
  list_ = {sizeof(list_), STRATA_ABI_MINOR, flat_.data(), flat_.size(), sizeof(strata_option)};
  return &list_;
}

std::string plugin_from_outside() {
  const char* path = std::getenv("STRATA_TEST_PLUGIN");
  return path && *path ? std::filesystem::absolute(path).string() : "";
}

std::string plugin_id(const std::string& plugin) { return std::filesystem::path(plugin).stem().string(); }

std::string missing_host_interface(const std::string& plugin) {
  const std::filesystem::path file = library_of(plugin).replace_extension(".toml");
  if (!std::filesystem::exists(file)) return "";  // a library alone says nothing of what it needs
  PluginToml description;
  const Status status = read_plugin_toml(file, &description);
  EXPECT_TRUE(status.ok()) << status.text();
  const Host host([](strata_log_level, const std::string&, const std::string&) {}, STRATA_LOG_ERROR, 1);
  for (const std::string& id : description.host_interfaces) {
    if (host.c()->get_interface(host.c()->ctx, id.c_str())) continue;
    return plugin_id(plugin) + " requires " + id + " ([requires] host), which these tests do not lend";
  }
  return "";
}

const void* load_interface(const std::string& plugin, const std::string& interface_id) {
  void* library = dlopen(library_of(plugin).c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!library) {
    ADD_FAILURE() << dlerror();
    return nullptr;
  }
  auto entry = reinterpret_cast<strata_plugin_entry_fn>(dlsym(library, STRATA_PLUGIN_ENTRY));
  if (!entry) {
    ADD_FAILURE() << plugin << " exports no " << STRATA_PLUGIN_ENTRY;
    return nullptr;
  }
  const strata_plugin* descriptor = entry(STRATA_ABI_MINOR);
  const void* table = descriptor ? descriptor->get_interface(interface_id.c_str()) : nullptr;
  EXPECT_NE(table, nullptr) << plugin << " has no " << interface_id;
  return table;
}

Rank::Rank(int rank, int world, bool threads, const std::string& job_name)
    : job(job_name),
      host(
          [this](strata_log_level, const std::string& domain, const std::string& text) {
            static std::mutex mutex;
            std::lock_guard lock(mutex);
            log_lines.push_back(domain + ": " + text);
          },
          STRATA_LOG_DEBUG, 2) {
  base.struct_size = sizeof(base);
  base.host = host.c();
  base.job = job.c_str();
  base.rank = base.local_rank = rank;
  base.world = base.local_world = world;
  base.threads = threads ? 1 : 0;
  base.deadline_ns = 10'000'000'000;
}

strata_open_args Rank::args(Options* options) {
  strata_open_args a = base;
  a.options = options ? options->c() : nullptr;
  return a;
}

}  // namespace strata::test
