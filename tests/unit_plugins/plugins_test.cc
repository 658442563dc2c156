// Finding, checking and loading plugins (cases.md 65): everything that can be wrong with one is named, with its path,
// in bounded time, and nothing that is wrong is ever skipped in favour of something else.
#include "core/plugins/plugins.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <thread>

#include "core/plugins/event.h"
#include "core/plugins/plugin_slots.h"
#include "strata/iface/device.h"
#include "strata/iface/offload.h"
#include "tests/unit_plugins/variant_dir.h"

namespace strata {
namespace {

using test::VariantDir;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Plugins : ::testing::Test {
  VariantDir dir;
  std::map<std::string, std::vector<PluginOption>> options;

  PluginSearch here() const {
    PluginSearch search;
    search.manifest_dir = dir.path();
    search.directories = {dir.path()};
    return search;
  }

  // Installs the variant alone and returns why it cannot serve as an offload tier.
  std::string refused(const std::string& variant, const std::string& toml = "") {
    dir.install(variant, toml);
    return refusal_of(variant);
  }
  std::string refusal_of(const std::string& name, const std::string& interface_id = STRATA_OFFLOAD) {
    PluginSet set(here(), options);
    const void* table = nullptr;
    const Status status = set.find(name, interface_id, &table);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(table, nullptr);
    return status.text();
  }
  static std::string edited(std::string toml, const std::string& line, const std::string& other) {
    return toml.replace(toml.find(line), line.size(), other);
  }
};

TEST_F(Plugins, AGoodOneLoadsOnceAndSaysSo) {
  dir.install("good");
  PluginSet set(here(), options);
  const strata_offload_api* table = nullptr;
  const Status status = set.find("good", STRATA_OFFLOAD, &table);
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_NE(table->read, nullptr);
  const strata_offload_api* again = nullptr;
  ASSERT_TRUE(set.find("good", STRATA_OFFLOAD, &again).ok());
  EXPECT_EQ(table, again);
  const std::vector<std::string> lines = set.take_log_lines();
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_EQ(lines[0], "plugin good 1.2.3, ABI 1.0, strata.offload/1, " + (dir.path() / "good.so").string());
  EXPECT_TRUE(set.take_log_lines().empty());
  const std::vector<PluginInfo> loaded = set.describe();
  ASSERT_EQ(loaded.size(), 1u);
  EXPECT_EQ(loaded[0].id, "good");
  EXPECT_EQ(loaded[0].version, "1.2.3");
  EXPECT_EQ(loaded[0].abi_minor, 0u);
  EXPECT_EQ(loaded[0].library, dir.path() / "good.so");
  EXPECT_EQ(loaded[0].interfaces, std::vector<std::string>{STRATA_OFFLOAD});
}

TEST_F(Plugins, OptionalSlotsHaveDefaults) {
  dir.install("good");
  PluginSet set(here(), options);
  const strata_offload_api* table = nullptr;
  ASSERT_TRUE(set.find("good", STRATA_OFFLOAD, &table).ok());
  void* address = this;
  EXPECT_EQ(table->map(nullptr, 1, &address), STRATA_UNIMPLEMENTED);
  EXPECT_EQ(address, nullptr);
  EXPECT_THAT(take_failure(STRATA_UNIMPLEMENTED).text(), HasSubstr("no address (map)"));
  EXPECT_EQ(table->register_memory(nullptr, &set, 4096), STRATA_OK) << "it is for speed only";
  table->unregister_memory(nullptr, &set);
  strata_region region = 1;
  EXPECT_EQ(table->alloc_for(nullptr, 4096, STRATA_REGION_HOST_ONLY, "x", &region), STRATA_UNIMPLEMENTED);
  EXPECT_EQ(region, 0u);
}

TEST_F(Plugins, ADeviceWithoutStreamsIsOnTheCpu) {
  dir.install("bare_device", VariantDir::good_toml("bare_device", "", "\"strata.device/1\""));
  PluginSet set(here(), options);
  const strata_device_api* device = nullptr;
  const Status status = set.find("bare_device", STRATA_DEVICE, &device);
  ASSERT_TRUE(status.ok()) << status.text();
  void* memory = this;
  EXPECT_EQ(device->alloc_pinned(nullptr, 8, &memory), STRATA_UNIMPLEMENTED);
  device->free_pinned(nullptr, nullptr);
  strata_stream stream{};
  ASSERT_EQ(device->stream_create(nullptr, 0, &stream), STRATA_OK);
  EXPECT_EQ(stream.domain, STRATA_CPU);
  EXPECT_EQ(stream.native, nullptr);
  EXPECT_EQ(device->stream_wait_host(nullptr, &stream), STRATA_OK);
  strata_marker* marker = nullptr;
  EXPECT_EQ(device->marker_create(nullptr, &marker), STRATA_OK);
  EXPECT_EQ(device->marker_record(nullptr, marker, &stream), STRATA_OK);
  EXPECT_EQ(device->stream_wait_marker(nullptr, &stream, marker), STRATA_OK);
  EXPECT_EQ(device->marker_wait_host(nullptr, marker), STRATA_OK);
  device->marker_destroy(nullptr, marker);
  Event event = Event::create();
  EXPECT_EQ(device->stream_record(nullptr, &stream, event.get()), STRATA_OK);
  EXPECT_TRUE(event->is_set());
  device->stream_destroy(nullptr, &stream);
}

TEST_F(Plugins, HalfAGroupOfSlotsIsAnError) {
  dir.install("half_device", VariantDir::good_toml("half_device", "", "\"strata.device/1\""));
  EXPECT_EQ(refusal_of("half_device", STRATA_DEVICE),
            "plugin half_device: strata.device/1 slot \"stream_destroy\" is missing beside \"stream_create\"");
  EXPECT_EQ(refused("half_offload"),
            "plugin half_offload: strata.offload/1 slot \"unregister_memory\" is missing beside \"register_memory\"");
}

// --- versions and sizes ---------------------------------------------------------------------------------------------

TEST_F(Plugins, NewerPluginsOfTheSameMajorWork) {
  dir.install("longer_table");
  dir.install("newer_minor");
  PluginSet set(here(), options);
  const strata_offload_api* table = nullptr;
  ASSERT_TRUE(set.find("longer_table", STRATA_OFFLOAD, &table).ok());
  EXPECT_EQ(table->struct_size, sizeof(strata_offload_api)) << "the unknown tail is cut";
  ASSERT_TRUE(set.find("newer_minor", STRATA_OFFLOAD, &table).ok());
  EXPECT_EQ(set.describe()[1].abi_minor, STRATA_ABI_MINOR) << "both sides speak the older one";
}

TEST_F(Plugins, APluginFromBeforeASlotGetsItsDefault) {
  dir.install("older_table");
  PluginSet set(here(), options);
  const strata_offload_api* table = nullptr;
  const Status status = set.find("older_table", STRATA_OFFLOAD, &table);
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(table->struct_size, sizeof(strata_offload_api));
  EXPECT_EQ(table->register_memory(nullptr, &set, 4096), STRATA_OK) << "nothing is done, and all is well";
  table->unregister_memory(nullptr, &set);
}

TEST_F(Plugins, OtherAbiMajorsAndMinors) {
  const std::string toml = VariantDir::good_toml("good");
  EXPECT_THAT(refused("good", edited(toml, "major = 1", "major = 2")),
              AllOf(HasSubstr("is built for ABI major 2, this core has 1"), HasSubstr("good.so")));
  EXPECT_THAT(refused("good", edited(toml, "major = 1", "major = 0")), HasSubstr("ABI major 0, this core has 1"));
  EXPECT_THAT(refused("good", edited(toml, "min_host_minor = 0", "min_host_minor = 4")),
              HasSubstr("needs a core of ABI 1.4 or newer, this one has 1.0"));
  EXPECT_THAT(refused("good", toml + "[requires]\nhost = [\"strata.host.teleport/1\"]"),
              HasSubstr("needs strata.host.teleport/1 from the core, which has strata.host.sync/1"));
  EXPECT_THAT(refused("good", VariantDir::good_toml("good", "", "\"strata.offload/2\"")),
              HasSubstr("provides strata.offload/2, strata.offload/1 is needed"));
  EXPECT_THAT(refused("null_entry"), HasSubstr("cannot serve a core of ABI 1.0 (its entry returned NULL)"));
}

TEST_F(Plugins, WrongTables) {
  EXPECT_EQ(refused("missing_slot"), "plugin missing_slot: strata.offload/1 slot \"read\" is missing");
  EXPECT_THAT(refused("short_table"), HasSubstr("strata.offload/1 table has 64 bytes, at least 72 are needed"));
  EXPECT_THAT(refused("short_descriptor"), HasSubstr("its descriptor has 16 bytes, at least 32 are needed"));
  EXPECT_THAT(refused("null_get_interface"), HasSubstr("its descriptor has no get_interface"));
  EXPECT_THAT(refused("garbled_id"), HasSubstr("calls itself \"\\x1b[2J\\x07\""));
  EXPECT_THAT(refused("other_id"), HasSubstr("calls itself \"somebody_else\", its TOML \"other_id\""));
  EXPECT_THAT(refused("other_version"), HasSubstr("is version 9.9.9, its TOML says 1.2.3"));
  dir.install("promises_more", VariantDir::good_toml("promises_more", "", "\"strata.collective/1\""));
  EXPECT_THAT(refusal_of("promises_more", "strata.collective/1"),
              HasSubstr("its TOML promises strata.collective/1, the library has none"));
}

TEST_F(Plugins, InterfacesBetweenPluginsPassThrough) {
  dir.install("good", VariantDir::good_toml("good", "", "\"org.acme.other/1\""));
  PluginSet set(here(), options);
  const void* table = nullptr;
  ASSERT_TRUE(set.find("good", "org.acme.other/1", &table).ok());
  EXPECT_STREQ(static_cast<const char*>(table), "good");
  EXPECT_FALSE(is_known_interface("org.acme.other/1"));
}

// --- files that cannot be loaded ------------------------------------------------------------------------------------

TEST_F(Plugins, BrokenLibraries) {
  EXPECT_THAT(refused("no_entry"), HasSubstr("exports no strata_plugin_entry_v1"));
  EXPECT_THAT(refused("data_entry"), HasSubstr("its strata_plugin_entry_v1 is no function"));
  EXPECT_THAT(refused("throwing_entry"), HasSubstr("thrown by the entry"));
  EXPECT_THAT(refused("undefined_symbol"), HasSubstr("undefined symbol: nobody_defines_this"));
  const std::string good = VariantDir::read(VariantDir::library("good"));
  const auto with_library = [&](const std::string& bytes) {
    dir.write("good.toml", VariantDir::good_toml("good"));
    dir.write("good.so", bytes);
    return refusal_of("good");
  };
  EXPECT_THAT(with_library(good.substr(0, good.size() / 4)), HasSubstr("is truncated"));
  EXPECT_THAT(with_library("just text"), HasSubstr("is not a shared library (no ELF magic; 9 bytes)"));
  EXPECT_THAT(with_library(""), HasSubstr("0 bytes"));
  std::string other_machine = good;
  other_machine[18] = static_cast<char>(0xB7);  // e_machine: aarch64
  other_machine[4] = 2;
#if defined(__x86_64__)
  EXPECT_THAT(with_library(other_machine), HasSubstr("is built for aarch64, this machine is x86-64"));
#endif
  std::filesystem::remove(dir.path() / "good.so");
  EXPECT_THAT(refusal_of("good"), HasSubstr("good.so: no such file"));
  std::filesystem::create_directory(dir.path() / "good.so");
  EXPECT_THAT(refusal_of("good"), HasSubstr("is not a regular file"));
}

TEST_F(Plugins, BrokenTomls) {
  EXPECT_THAT(refused("good", "id = "), HasSubstr("good.toml:1:"));
  EXPECT_THAT(refused("good", VariantDir::good_toml("good") + "[other]\n"), HasSubstr("unknown key `other`"));
  EXPECT_THAT(refused("good", VariantDir::good_toml("best")), HasSubstr("has id \"best\""));
}

// --- search ---------------------------------------------------------------------------------------------------------

TEST_F(Plugins, NotFoundListsEveryPlaceAndWhy) {
  dir.write("b/lonely.so", "x");
  PluginSearch search = here();
  search.directories = {dir.path() / "a", dir.path() / "b"};
  search.ignored = {"STRATA_PLUGIN_PATH entry rel: not searched, it is no absolute path"};
  PluginSet set(search, {});
  const void* table = nullptr;
  const Status status = set.find("lonely", STRATA_OFFLOAD, &table);
  EXPECT_EQ(status.code(), STRATA_NOT_FOUND);
  EXPECT_EQ(status.text(), "plugin lonely was not found; tried:\n  " + (dir.path() / "a/lonely.toml").string() +
                               ": no such file\n  " + (dir.path() / "b/lonely.toml").string() +
                               ": no such file (lonely.so is there, but not its TOML)\n  STRATA_PLUGIN_PATH entry rel: "
                               "not searched, it is no absolute path");
}

TEST_F(Plugins, NotFoundSaysWhatMayBeMeant) {
  dir.install("good");
  dir.install("newer_minor");
  EXPECT_TRUE(refusal_of("godo").ends_with("/godo.toml: no such file\ndid you mean good?")) << refusal_of("godo");
  EXPECT_TRUE(refusal_of("elsewhere").ends_with("no such file\nthere are: good, newer_minor"));
  EXPECT_TRUE(refusal_of("./godo").ends_with("/godo.toml: no such file")) << "a path is no name";
}

TEST_F(Plugins, APluginThatTheBuildLeftOutSaysWhy) {
  dir.install("good");
  dir.write("goods.absent", "there was no \x1b compiler\nand more");
  EXPECT_TRUE(refusal_of("goodss").ends_with("did you mean goods?"));
  EXPECT_TRUE(refusal_of("elsewhere").ends_with("there are: good"));
  const std::string text = refusal_of("goods");
  EXPECT_TRUE(text.ends_with("/goods.toml: no such file; the plugin was not built: there was no \\x1b compiler"))
      << text;
}

TEST_F(Plugins, TheFirstHitWinsEvenWhenItIsBroken) {
  dir.install("good", "", "first");
  dir.install("good", "", "second");
  PluginSearch search = here();
  search.directories = {dir.path() / "none", dir.path() / "first", dir.path() / "second"};
  const void* table = nullptr;
  PluginSet set(search, {});
  ASSERT_TRUE(set.find("good", STRATA_OFFLOAD, &table).ok());
  EXPECT_EQ(set.describe()[0].toml, dir.path() / "first/good.toml");
  std::filesystem::remove(dir.path() / "first/good.so");  // it is mapped: never written over in place
  dir.write("first/good.so", "broken");
  PluginSet other(search, {});
  EXPECT_THAT(other.find("good", STRATA_OFFLOAD, &table).text(), HasSubstr("first/good.so: is not a shared library"));
}

TEST_F(Plugins, PathsAreRelativeToTheManifest) {
  dir.install("good", "", "deep/er");
  PluginSearch search;
  search.manifest_dir = dir.path() / "deep";
  for (const char* name : {"er/good", "er/good.toml", "er/good.so", "./er/../er/good", "../deep/er/good"}) {
    PluginSet set(search, {});
    const void* table = nullptr;
    const Status status = set.find(name, STRATA_OFFLOAD, &table);
    EXPECT_TRUE(status.ok()) << name << ": " << status.text();
  }
  PluginSet set(search, {});
  const void* table = nullptr;
  EXPECT_THAT(set.find("er/none", STRATA_OFFLOAD, &table).text(), HasSubstr("deep/er/none.toml: no such file"));
  for (const char* name : {"", "..", "a b", "good.so", "x\n"})
    EXPECT_EQ(set.find(name, STRATA_OFFLOAD, &table).code(), STRATA_INVALID_ARGUMENT) << name;
}

TEST_F(Plugins, TheWorkingDirectoryIsNeverSearched) {
  dir.install("good");
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(dir.path());
  setenv("STRATA_PLUGIN_PATH", ":.:plugins:", 1);
  Settings settings;
  const PluginSearch search = PluginSearch::from_settings(settings, "");
  unsetenv("STRATA_PLUGIN_PATH");
  EXPECT_TRUE(search.directories.empty());
  EXPECT_EQ(search.ignored.size(), 2u);
  PluginSet set(search, {});
  const void* table = nullptr;
  EXPECT_EQ(set.find("good", STRATA_OFFLOAD, &table).code(), STRATA_NOT_FOUND);
  std::filesystem::current_path(before);
}

TEST_F(Plugins, SearchOrder) {
  Settings settings;
  settings.manifest_dir = "/m";
  settings.plugins.path = {"mine", "/abs"};
  setenv("STRATA_PLUGIN_PATH", "/e1:/e2", 1);
  const PluginSearch search = PluginSearch::from_settings(settings, "/usr/lib/strata");
  unsetenv("STRATA_PLUGIN_PATH");
  const std::vector<std::filesystem::path> want = {"/m/mine", "/abs", "/e1", "/e2", "/usr/lib/strata/plugins"};
  EXPECT_EQ(search.directories, want);
}

// --- options --------------------------------------------------------------------------------------------------------

const char* const kOptions =
    "[options.budget]\ntype = \"int\"\ndefault = 7\ndoc = \"d\"\n"
    "[options.label]\ntype = \"string\"\ndefault = \"none\"\ndoc = \"d\"\n";

TEST_F(Plugins, OptionsComeWithDefaultsAndMapNothing) {
  dir.install("bare_device", VariantDir::good_toml("bare_device", kOptions));
  std::filesystem::rename(dir.path() / "bare_device.so", dir.path() / "moved.so");
  options["bare_device"] = {{"label", std::string("mine"), "m.toml:3:1"}};
  PluginSet set(here(), options);
  const strata_options* list = nullptr;
  const Status status = set.options("bare_device", &list);
  ASSERT_TRUE(status.ok()) << status.text();
  ASSERT_EQ(list->count, 2u);
  EXPECT_STREQ(list->items[0].key, "budget");
  EXPECT_EQ(list->items[0].type, STRATA_OPT_INT);
  EXPECT_EQ(list->items[0].i, 7);
  EXPECT_EQ(list->items[1].type, STRATA_OPT_STRING);
  EXPECT_STREQ(list->items[1].s, "mine");
  EXPECT_TRUE(set.describe().empty());
}

TEST_F(Plugins, PathsOfTheManifestThatAreNotThereAreNamedWithTheirPlace) {
  Settings settings;
  settings.manifest_dir = dir.path().string() + "/.";
  settings.plugins.path = {"./nowhere", "good.so", "apart"};
  settings.plugins.optimizer = "././gone";
  settings.given = {{"plugins.path", "m.toml:2:1"}, {"plugins.optimizer", "m.toml:3:1"}};
  dir.install("good", VariantDir::good_toml("good", kOptions));
  dir.install("newer_minor", VariantDir::good_toml("newer_minor", kOptions), "apart");
  PluginSearch search = here();
  search.manifest_dir = settings.manifest_dir;
  PluginSet set(search, {});
  const std::string at = dir.path().string() + "/";
  EXPECT_EQ(set.check_options(settings).text(),
            "m.toml:2:1: `plugins.path`: " + at + "nowhere is no directory\n" +      //
                "m.toml:2:1: `plugins.path`: " + at + "good.so is no directory\n" +  //
                "m.toml:3:1: `plugins.optimizer`: plugin ././gone was not found; tried:\n  " + at +
                "gone.toml: no such file");
}

TEST_F(Plugins, EverySectionIsCheckedAndMustBeUsed) {
  dir.install("good", VariantDir::good_toml("good", kOptions));
  dir.install("newer_minor", VariantDir::good_toml("newer_minor", kOptions), "apart");
  options["good"] = {{"budgt", int64_t{1}, "m.toml:2:1"}};
  options["newer_minor"] = {{"budget", true, "m.toml:4:1"}};
  options["goood"] = {{"budget", int64_t{1}, "m.toml:6:1"}};
  Settings settings;
  settings.plugins.offload_cpu = "apart/newer_minor";
  PluginSet set(here(), options);
  const std::string text = set.check_options(settings).text();
  EXPECT_THAT(text, HasSubstr("m.toml:2:1: unknown key `plugin.good.budgt`; did you mean `plugin.good.budget`?"));
  EXPECT_THAT(text, HasSubstr("m.toml:4:1: `plugin.newer_minor.budget` must be a whole number, got true"));
  EXPECT_THAT(text, HasSubstr("m.toml:6:1: [plugin.goood]: plugin goood was not found"));
  EXPECT_THAT(text, HasSubstr("did you mean good?"));

  options = {{"good", {{"budget", int64_t{1}, "m.toml:2:1"}}}, {"newer_minor", {{"budget", 1.0, "m.toml:4:1"}}}};
  PluginSet fine(here(), options);
  ASSERT_TRUE(fine.check_options(settings).ok());
  const void* table = nullptr;
  ASSERT_TRUE(fine.find("good", STRATA_OFFLOAD, &table).ok());
  EXPECT_EQ(fine.check_all_used().text(),
            "m.toml:4:1: [plugin.newer_minor] has no effect: this run does not use that plugin");
  ASSERT_TRUE(fine.find("apart/newer_minor", STRATA_OFFLOAD, &table).ok());
  EXPECT_TRUE(fine.check_all_used().ok());
}

// Keys of the manifest that are options of whatever plugin serves an interface.
TEST_F(Plugins, PresetsReachThePluginsOfTheirInterface) {
  dir.install("good", VariantDir::good_toml("good", kOptions));
  options["good"] = {{"budget", int64_t{1}, "m.toml:2:1"}};
  const strata_options* list = nullptr;
  PluginSet set(here(), options);
  set.preset(STRATA_OFFLOAD, {"label", std::string("split"), "m.toml:9:1"}, "state_layout", true);
  set.preset(STRATA_OFFLOAD, {"budget", int64_t{5}, "default"}, "host_memory_limit", false);
  set.preset(STRATA_DEVICE, {"label", std::string("other"), "m.toml:8:1"}, "other_key", true);
  ASSERT_TRUE(set.options("good", &list).ok());
  EXPECT_EQ(list->items[0].i, 1) << "a default does not replace what [plugin.good] says";
  EXPECT_STREQ(list->items[1].s, "split");
  EXPECT_THAT(set.check_all_used().text(), HasSubstr("m.toml:8:1: other_key has no effect"));

  PluginSet twice(here(), options);
  twice.preset(STRATA_OFFLOAD, {"budget", int64_t{5}, "m.toml:9:1"}, "host_memory_limit", true);
  EXPECT_THAT(twice.options("good", &list).text(), HasSubstr("host_memory_limit (m.toml:9:1) say the same thing"));
}

// --- life cycle -----------------------------------------------------------------------------------------------------

TEST_F(Plugins, LibrariesStayMappedAndSetsComeAndGo) {
  dir.install("good");
  for (int i = 0; i < 50; ++i) {
    PluginSet set(here(), options);
    const void* table = nullptr;
    ASSERT_TRUE(set.find("good", STRATA_OFFLOAD, &table).ok());
  }
  void* mapped = dlopen((dir.path() / "good.so").c_str(), RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(mapped, nullptr);
  dlclose(mapped);
}

TEST_F(Plugins, SeveralEnginesAtOnce) {
  dir.install("good", VariantDir::good_toml("good", kOptions));
  std::vector<std::thread> ranks;
  for (int r = 0; r < 8; ++r)
    ranks.emplace_back([&] {
      PluginSet set(here(), {});
      const void* table = nullptr;
      const strata_options* list = nullptr;
      EXPECT_TRUE(set.find("good", STRATA_OFFLOAD, &table).ok());
      EXPECT_TRUE(set.options("good", &list).ok());
    });
  for (std::thread& rank : ranks) rank.join();
}

}  // namespace
}  // namespace strata
