// <id>.toml is read strictly: every wrong key, type and version is named with its position.
#include "core/manifest/plugin_toml.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit_plugins/variant_dir.h"

namespace strata {
namespace {

using test::VariantDir;
using ::testing::HasSubstr;

struct PluginTomlTest : ::testing::Test {
  VariantDir dir;
  PluginToml toml;

  Status read(const std::string& text) {
    dir.write("p.toml", text);
    return read_plugin_toml(dir.path() / "p.toml", &toml);
  }
  std::string refused(const std::string& text) {
    const Status status = read(text);
    EXPECT_FALSE(status.ok());
    return status.text();
  }
  // The good TOML with one line replaced.
  static std::string with(const std::string& line, const std::string& other) {
    std::string text = VariantDir::good_toml("p");
    return text.replace(text.find(line), line.size(), other);
  }
};

TEST_F(PluginTomlTest, Good) {
  const Status status =
      read(VariantDir::good_toml("p",
                                 "[requires]\nhost = [\"strata.host.sync/1\"]\n"
                                 "[options.budget]\ntype = \"int\"\ndefault = 1e9\ndoc = \"Bytes.\"\n"
                                 "[options.path]\ntype = \"string\"\ndefault = \"\"\ndoc = \"Dir.\"\n"));
  ASSERT_TRUE(status.ok()) << status.text();
  EXPECT_EQ(toml.id, "p");
  EXPECT_EQ(toml.library, dir.path() / "p.so");
  EXPECT_EQ(toml.interfaces, std::vector<std::string>{"strata.offload/1"});
  EXPECT_EQ(toml.host_interfaces, std::vector<std::string>{"strata.host.sync/1"});
  ASSERT_EQ(toml.options.size(), 2u);
  EXPECT_EQ(std::get<int64_t>(toml.options[0].value), 1'000'000'000);
  EXPECT_EQ(toml.options[1].type, STRATA_OPT_STRING);
}

TEST_F(PluginTomlTest, Versions) {
  EXPECT_THAT(refused(with("manifest_version = 1", "manifest_version = 2\nsurprise = true")),
              HasSubstr("p.toml:1:1: manifest_version is 2, this core reads 1: the plugin is for a newer core"));
  EXPECT_THAT(refused(with("manifest_version = 1", "manifest_version = 0")), HasSubstr("manifest_version is 0"));
  EXPECT_THAT(refused(with("manifest_version = 1", "manifest_version = \"1\"")), HasSubstr("must be a whole number"));
  EXPECT_THAT(refused(with("manifest_version = 1", "")), HasSubstr("`manifest_version` is missing"));
}

TEST_F(PluginTomlTest, UnknownMissingAndWrong) {
  EXPECT_THAT(refused(with("license =", "licence =")),
              HasSubstr("p.toml:5:1: unknown key `licence`; did you mean `license`?"));
  EXPECT_THAT(refused(with("license =", "licence =")), HasSubstr("`license` is missing")) << "all errors at once";
  EXPECT_THAT(refused(with("[abi]", "[abii]")), HasSubstr("unknown key `abii`; did you mean `abi`?"));
  EXPECT_THAT(refused(with("major = 1", "major = -1")), HasSubstr("`abi.major` must be 0 or more, got -1"));
  EXPECT_THAT(refused(with("id = \"p\"", "id = 3")), HasSubstr("p.toml:2:1: `id` must be text, got 3"));
  EXPECT_THAT(refused(with("[\"strata.offload/1\"]", "\"strata.offload/1\"")), HasSubstr("must be a list of texts"));
  EXPECT_THAT(refused(with("[abi]\nmajor = 1\nmin_host_minor = 0", "abi = 3")),
              ::testing::AnyOf(HasSubstr("`abi` must be a section"), HasSubstr("p.toml:")));
  EXPECT_THAT(refused("manifest_version = "), HasSubstr("p.toml:1:"));
  EXPECT_THAT(refused("\x01\x02"), HasSubstr("p.toml:1:"));
}

TEST_F(PluginTomlTest, OptionTables) {
  const auto option = [&](const std::string& text) { return refused(VariantDir::good_toml("p", text)); };
  EXPECT_THAT(option("[options]\nx = 3"), HasSubstr("`options.x` must be a table with type, default and doc"));
  EXPECT_THAT(option("[options.x]\ntype = \"int\"\ndoc = \"d\""), HasSubstr("`options.x.default` is missing"));
  EXPECT_THAT(option("[options.x]\ntype = \"integer\"\ndefault = 1\ndoc = \"d\""),
              HasSubstr("must be bool, int, float or string, got \"integer\""));
  EXPECT_THAT(option("[options.x]\ntype = \"int\"\ndefault = 1.5\ndoc = \"d\""),
              HasSubstr("`options.x.default` must be a whole number, got 1.5"));
  EXPECT_THAT(option("[options.x]\ntype = \"int\"\ndefault = 1\ndoc = \"d\"\nmin = 0"),
              HasSubstr("unknown key `options.x.min`"));
}

TEST_F(PluginTomlTest, OptionsOfARun) {
  ASSERT_TRUE(read(VariantDir::good_toml("p",
                                         "[options.budget]\ntype = \"int\"\ndefault = 7\ndoc = \"d\"\n"
                                         "[options.rate]\ntype = \"float\"\ndefault = 0.5\ndoc = \"d\"\n"
                                         "[options.on]\ntype = \"bool\"\ndefault = false\ndoc = \"d\"\n"))
                  .ok());
  std::vector<PluginOption> merged;
  ASSERT_TRUE(merge_plugin_options(toml, {{"budget", 3e9, "m.toml:1:1"}, {"rate", int64_t{2}, ""}}, &merged).ok());
  ASSERT_EQ(merged.size(), 3u);
  EXPECT_EQ(std::get<int64_t>(merged[0].value), 3'000'000'000);
  EXPECT_EQ(std::get<double>(merged[1].value), 2.0);
  EXPECT_EQ(std::get<bool>(merged[2].value), false);
  EXPECT_EQ(merge_plugin_options(toml,
                                 {{"budgte", int64_t{1}, "m.toml:4:1"},
                                  {"on", int64_t{1}, "m.toml:5:1"},
                                  {"zzzzzz", true, "m.toml:6:1"},
                                  {"budget", std::string("auto"), "m.toml:7:1"}},
                                 &merged)
                .text(),
            "m.toml:4:1: unknown key `plugin.p.budgte`; did you mean `plugin.p.budget`?\n"
            "m.toml:5:1: `plugin.p.on` must be true or false, got 1\n"
            "m.toml:6:1: unknown key `plugin.p.zzzzzz`; p has: budget, rate, on\n"
            "m.toml:7:1: `plugin.p.budget` must be a whole number, got \"auto\"");
}

}  // namespace
}  // namespace strata
