// What a manifest may say, value by value: types, numbers, unknown, misplaced and duplicate keys, overrides, and the
// text and position of every refusal.
#include "core/manifest/manifest.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "core/manifest/manifest_keys.h"
#include "core/manifest/toml_doc.h"
#include "tests/unit_manifest/manifest_text.h"

namespace strata {
namespace {

using test::accepted;
using test::refusal;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Manifest, EmptyIsAllDefaults) {
  const Settings s = accepted("");
  EXPECT_EQ(s.train_batch_size, 0);
  EXPECT_EQ(s.deadline_seconds, 600.0);
  EXPECT_EQ(s.log_level, STRATA_LOG_INFO);
  EXPECT_EQ(s.communication_data_type, 0);
  EXPECT_EQ(s.plugins.offload_cpu, "offload_cpu");
  EXPECT_EQ(s.optimizer.betas[1], 0.999);
  EXPECT_TRUE(s.optimizer.adam_w_mode);
  EXPECT_EQ(s.zero_optimization.reduce_bucket_size, 500'000'000);
  EXPECT_EQ(s.zero_optimization.prefetch_bucket_size, 50'000'000);
  EXPECT_EQ(s.zero_optimization.param_persistence_threshold, 100'000);
  EXPECT_EQ(s.zero_optimization.model_persistence_threshold, 9'200'000'000'000'000'000) << "no limit";
  EXPECT_EQ(s.zero_optimization.sub_group_size, 1'000'000'000);
  EXPECT_TRUE(s.zero_optimization.overlap_comm);
  EXPECT_EQ(s.zero_optimization.offload_optimizer.buffer_count, 4);
  EXPECT_EQ(s.zero_optimization.offload_param.device, OffloadDevice::kNone);
  EXPECT_TRUE(s.given.empty());
  EXPECT_EQ(s.origin("train_batch_size"), "default");
}

TEST(Manifest, EveryKindOfValueArrives) {
  const Settings s = accepted(R"(
train_batch_size = 1536
communication_data_type = "fp16"
log_level = "warn"
[plugins]
path = ["a", "../b"]
device = "my/device_x"
[bf16]
enabled = true
[optimizer]
type = "Adam"
[optimizer.params]
lr = 2e-5
betas = [0.9, 0.95]
[zero_optimization]
stage = 3
stage3_param_persistence_threshold = 1e4
[zero_optimization.offload_param]
device = "nvme"
nvme_path = "fast"
max_in_cpu = 1e9
[plugin.offload_cpu]
huge_pages = true
budget = 12
ratio = 0.5
name = "x"
)");
  EXPECT_EQ(s.train_batch_size, 1536);
  EXPECT_EQ(s.origin("train_batch_size"), "m.toml:2:1");
  EXPECT_EQ(s.communication_data_type, STRATA_F16);
  EXPECT_EQ(s.log_level, STRATA_LOG_WARN);
  EXPECT_EQ(s.plugins.path, (std::vector<std::string>{"a", "../b"}));
  EXPECT_EQ(s.plugins.device, "my/device_x");
  EXPECT_TRUE(s.bf16_enabled);
  EXPECT_EQ(s.optimizer.lr, 2e-5);
  EXPECT_EQ(s.optimizer.betas, (std::array<double, 2>{0.9, 0.95}));
  EXPECT_FALSE(s.optimizer.adam_w_mode) << "type Adam means coupled decay unless said";
  EXPECT_EQ(s.zero_optimization.param_persistence_threshold, 10000);
  EXPECT_TRUE(s.is_given("zero_optimization.param_persistence_threshold")) << "under Strata's own spelling";
  EXPECT_EQ(s.zero_optimization.offload_param.device, OffloadDevice::kNvme);
  EXPECT_EQ(s.resolve(s.zero_optimization.offload_param.nvme_path), "./fast");
  const auto& options = s.plugin_options.at("offload_cpu");
  ASSERT_EQ(options.size(), 4u);
  for (const PluginOption& o : options) {
    if (o.key == "huge_pages") {
      EXPECT_EQ(std::get<bool>(o.value), true);
    } else if (o.key == "budget") {
      EXPECT_EQ(std::get<int64_t>(o.value), 12);
    } else if (o.key == "ratio") {
      EXPECT_EQ(std::get<double>(o.value), 0.5);
    } else {
      EXPECT_EQ(std::get<std::string>(o.value), "x");
      EXPECT_EQ(o.where, "m.toml:26:1");
    }
  }
}

// cases.md 55: numbers.
TEST(Manifest, WholeFloatsAreIntegers) {
  const auto bucket = [](const std::string& value) {
    return accepted("zero_optimization.reduce_bucket_size = " + value).zero_optimization.reduce_bucket_size;
  };
  EXPECT_EQ(bucket("5e8"), 500'000'000);
  EXPECT_EQ(bucket("500000000.0"), 500'000'000);
  EXPECT_EQ(bucket("500_000_000"), 500'000'000);
  EXPECT_EQ(bucket("9007199254740993"), 9007199254740993) << "integers are never rounded through a float";
}

TEST(Manifest, OtherNumbersAreRefusedExactly) {
  const auto bucket = [](const std::string& value) {
    return refusal("[zero_optimization]\n  reduce_bucket_size = " + value);
  };
  const std::string at = "m.toml:2:3: `zero_optimization.reduce_bucket_size` ";
  EXPECT_EQ(bucket("15099494.4"), at + "must be a whole number, got 15099494.4");
  EXPECT_EQ(bucket("\"5e8\""), at + "must be a whole number, got \"5e8\"");
  EXPECT_EQ(bucket("1e30"), at + "does not fit into 64 bits: 1e+30");
  EXPECT_EQ(bucket("9223372036854775808.0"), at + "does not fit into 64 bits: 9.2233720368547758e+18");
  EXPECT_EQ(bucket("nan"), at + "must be a whole number, got nan");
  EXPECT_EQ(bucket("-inf"), at + "must be a whole number, got -inf");
  EXPECT_EQ(bucket("true"), at + "must be a whole number, got true");
  EXPECT_EQ(bucket("[1]"), at + "must be a whole number, got an array of 1");
  EXPECT_EQ(bucket("{a = 1}"), at + "must be a value (whole number), got a table");
  EXPECT_EQ(bucket("1979-05-27"), at + "must be a whole number, got a date or time");
  EXPECT_EQ(bucket("0"), at + "must be 1 or more, got 0");
  EXPECT_EQ(bucket("-5"), at + "must be 1 or more, got -5");
  EXPECT_THAT(bucket("9223372036854775808"), StartsWith("m.toml:2:"));  // the TOML reader's own refusal
}

TEST(Manifest, FloatsBoolsWordsAndLists) {
  EXPECT_EQ(accepted("gradient_clipping = 1").gradient_clipping, 1.0);
  EXPECT_EQ(refusal("gradient_clipping = nan"), "m.toml:1:1: `gradient_clipping` must be a finite number, got nan");
  EXPECT_EQ(refusal("gradient_clipping = -1.0"), "m.toml:1:1: `gradient_clipping` must be 0 or more, got -1");
  EXPECT_EQ(refusal("deadline_seconds = 0"), "m.toml:1:1: `deadline_seconds` must be 0.001 or more, got 0");
  EXPECT_EQ(refusal("wall_clock_breakdown = 1"), "m.toml:1:1: `wall_clock_breakdown` must be true or false, got 1");
  EXPECT_EQ(
      refusal("log_level = \"inof\""),
      "m.toml:1:1: `log_level` must be one of \"debug\", \"info\", \"warn\", \"error\", got \"inof\"; did you mean "
      "\"info\"?");
  EXPECT_THAT(refusal("optimizer.params.betas = [0.9]"), HasSubstr("must be two numbers"));
  EXPECT_EQ(refusal("optimizer.params.betas = [0.9, 1.0]"),
            "m.toml:1:18: `optimizer.params.betas` must be 0 to below 1, got 1");
  EXPECT_THAT(refusal("optimizer.params.betas = [0.9, \"x\"]"), HasSubstr("must be a finite number, got \"x\""));
  EXPECT_THAT(refusal("plugins.path = \"dir\""), HasSubstr("must be a list of texts"));
  EXPECT_THAT(refusal("plugins.path = [3]"), HasSubstr("must be text, got 3"));
  EXPECT_THAT(refusal("plugins.device = \"\""), HasSubstr("must not be empty"));
  EXPECT_THAT(refusal("plugins.device = \"a\\u0000b\""), HasSubstr("NUL"));
  EXPECT_THAT(refusal("zero_optimization.stage = 4"), HasSubstr("must be at most 3, got 4"));
}

// "auto" for every key, as text and inside a list.
TEST(Manifest, AutoIsRefusedNamingTheKey) {
  for (const ManifestKey& key : manifest_keys()) {
    EXPECT_THAT(refusal(key.path + " = \"auto\""), HasSubstr("`" + key.path + "` = \"auto\" is refused")) << key.path;
    EXPECT_THAT(refusal(key.path + " = [\"auto\", \"auto\"]"), HasSubstr("\"auto\" is refused")) << key.path;
  }
}

TEST(Manifest, AnOverrideReplacesAuto) {
  const Settings s = accepted("train_batch_size = \"auto\"\n[zero_optimization]\nstage = 3",
                              {"train_batch_size=8", "zero_optimization.stage=1", "zero_optimization.stage = 2",
                               "zero_optimization.offload_optimizer.device=cpu", "plugin.offload_cpu.numa=true"});
  EXPECT_EQ(s.train_batch_size, 8);
  EXPECT_EQ(s.zero_optimization.stage, 2) << "the last override wins";
  EXPECT_EQ(s.zero_optimization.offload_optimizer.device, OffloadDevice::kCpu) << "a bare word is text";
  EXPECT_EQ(std::get<bool>(s.plugin_options.at("offload_cpu")[0].value), true);
  EXPECT_EQ(s.origin("zero_optimization.stage"), "override zero_optimization.stage = 2");
}

TEST(Manifest, AnOverrideKnowsBothSpellings) {
  const Settings s = accepted("[zero_optimization]\nstage=3\nstage3_prefetch_bucket_size=5",
                              {"zero_optimization.prefetch_bucket_size=7"});
  EXPECT_EQ(s.zero_optimization.prefetch_bucket_size, 7);
}

TEST(Manifest, BadOverrides) {
  EXPECT_EQ(refusal("", {"train_batch_size"}), "override train_batch_size: must look like key.path=value");
  EXPECT_THAT(refusal("", {"a b.=3"}), HasSubstr("must look like key.path=value"));
  EXPECT_THAT(refusal("", {"threads=1\nlog_level='x'"}), HasSubstr("must look like key.path=value"));
  EXPECT_EQ(refusal("", {"thraeds=1"}), "override thraeds=1: unknown key `thraeds`; did you mean `threads`?");
  EXPECT_EQ(refusal("", {"threads="}), "override threads=: `threads` must be a whole number, got \"\"");
  EXPECT_EQ(refusal("", {"threads=1.5"}), "override threads=1.5: `threads` must be a whole number, got 1.5");
  EXPECT_EQ(refusal("", {"zero_optimization=3"}),
            "override zero_optimization=3: `zero_optimization` is a section: write [zero_optimization] and its keys "
            "below it, got 3");
}

// cases.md 54: unknown and misplaced keys.
TEST(Manifest, UnknownKeysNameTheNearest) {
  EXPECT_EQ(refusal("[zero_optimization.offload_optimzer]\ndevice = \"cpu\""),
            "m.toml:1:20: unknown section `zero_optimization.offload_optimzer`; did you mean "
            "`zero_optimization.offload_optimizer`?");
  EXPECT_EQ(refusal("gradient_acumulation_steps = 3"),
            "m.toml:1:1: unknown key `gradient_acumulation_steps`; did you mean `gradient_accumulation_steps`?");
  EXPECT_EQ(refusal("[optimiser]\ntype = \"AdamW\""),
            "m.toml:1:2: unknown section `optimiser`; did you mean `optimizer`?");
  EXPECT_EQ(refusal("[zero_optimization]\nstag = 1"),
            "m.toml:2:1: unknown key `zero_optimization.stag`; did you mean `zero_optimization.stage`?");
  EXPECT_EQ(refusal("[bf16]\nqwertyuiop = 1"), "m.toml:2:1: unknown key `bf16.qwertyuiop`; [bf16] has: enabled");
  EXPECT_THAT(refusal("[fp16]\nloss_scale_window = 1000"), HasSubstr("loss scaling, which is not there yet"));
}

TEST(Manifest, SectionsInPluginsSayWhereOptionsStand) {
  const std::string hint = "; [plugins] chooses plugins, the options of one stand in [plugin.NAME]";
  EXPECT_EQ(refusal("[plugins.options.offload_cpu]\nx = 1"), "m.toml:1:10: unknown section `plugins.options`" + hint);
  EXPECT_EQ(refusal("[plugins.comm_local]\nx = 1"), "m.toml:1:10: unknown section `plugins.comm_local`" + hint);
  EXPECT_EQ(refusal("[plugins.device]\nx = 1"),
            "m.toml:1:10: `plugins.device` must be a value (text), got a table" + hint);
}

TEST(Manifest, MisplacedKeysNameTheirPlace) {
  EXPECT_EQ(refusal("[offload_optimizer]\ndevice = \"cpu\""),
            "m.toml:1:2: unknown section `offload_optimizer`; it belongs in [zero_optimization]: "
            "`zero_optimization.offload_optimizer`");
  EXPECT_EQ(refusal("stage = 3"),
            "m.toml:1:1: unknown key `stage`; it belongs in [zero_optimization]: `zero_optimization.stage`");
  EXPECT_EQ(refusal("[optimizer]\nlr = 1e-3"),
            "m.toml:2:1: unknown key `optimizer.lr`; it belongs in [optimizer.params]: `optimizer.params.lr`");
  EXPECT_EQ(refusal("[zero_optimization]\ngradient_clipping = 1.0"),
            "m.toml:2:1: unknown key `zero_optimization.gradient_clipping`; it belongs in the top level: "
            "`gradient_clipping`");
  EXPECT_THAT(refusal("pin_memory = true"), HasSubstr("[zero_optimization.offload_optimizer]"));
  EXPECT_THAT(refusal("pin_memory = true"), HasSubstr(" or [zero_optimization.offload_param]"));
}

TEST(Manifest, AQuotedKeyIsNoPath) {
  EXPECT_THAT(refusal("\"zero_optimization.stage\" = 3"), HasSubstr("unknown key `\"zero_optimization\u2024stage\"`"));
  EXPECT_THAT(refusal("\"a\\nb\" = 3"), HasSubstr("unknown key `\"a\\nb\"`"));
}

TEST(Manifest, WhatCouldBeReadIsKeptForFurtherChecks) {
  Settings s;
  EXPECT_FALSE(read_manifest_text("this is no TOML", "m.toml", {}, &s, nullptr).ok());
  EXPECT_EQ(s.manifest_name, "");
  const std::string text = "train_batch_size = 8\nstag = 2\nplugins.device = \"mine\"\nzero_optimization.stage = 9";
  EXPECT_FALSE(read_manifest_text(text, "m.toml", {}, &s, nullptr).ok());
  EXPECT_EQ(s.manifest_name, "m.toml");
  EXPECT_EQ(s.train_batch_size, 8);
  EXPECT_EQ(s.plugins.device, "mine");
  EXPECT_EQ(s.zero_optimization.stage, default_settings().zero_optimization.stage);
}

TEST(Manifest, SyntaxAndDuplicates) {
  EXPECT_THAT(refusal("threads = "), StartsWith("m.toml:1:"));
  EXPECT_THAT(refusal("[\n"), StartsWith("m.toml:1:"));
  EXPECT_THAT(refusal("a = \"\xff\""), StartsWith("m.toml:1:"));
  EXPECT_EQ(refusal("[zero_optimization]\nstage = 3\nmax_live_parameters = 5\nstage3_max_live_parameters = 5"),
            "m.toml:4:1: `zero_optimization.stage3_max_live_parameters` is the same key as "
            "`zero_optimization.max_live_parameters` (m.toml:3:1): give one of them");
}

struct Twice {
  const char* text;
  const char* again;  // where it is refused
  const char* first;  // where it stands first; "": not told
};

// A key or a table that is there already: with both places, however each is written.
// The reader calls itself for each.
TEST(Manifest, TablesInTablesAreCounted) {
  std::string deep = "a";
  for (int k = 0; k < 100'000; ++k) deep += ".a";
  for (const std::string& text : {deep + " = 1", "[" + deep + "]", "[[" + deep + "]]", "x = {" + deep + " = 1}"}) {
    std::vector<TomlEntry> entries;
    const Status read = parse_toml("threads = 1\n" + text, "m.toml", &entries);
    EXPECT_EQ(read.code(), STRATA_INVALID_ARGUMENT);
    EXPECT_EQ(read.text(), "m.toml:2: more than 1000 dots in one line");
  }
}

TEST(Manifest, WhatIsDefinedTwiceIsNamedWithBothPlaces) {
  for (const Twice& t :
       std::vector<Twice>{{"threads = 1\n# threads = 5\nthreads = 2", "m.toml:3:", "m.toml:1:1"},
                          {"[zero_optimization]\nstage = 1\n[trace]\n[zero_optimization]", "m.toml:4:", "m.toml:1:2"},
                          {"[trace]\nsteps = 1\n[zero_optimization]\nstage = 1\nstage = 2", "m.toml:5:", "m.toml:4:1"},
                          {"zero_optimization.stage = 3\n\nzero_optimization.stage = 2", "m.toml:3:", "m.toml:1:19"},
                          {"zero_optimization.stage = 3\n[zero_optimization]", "m.toml:2:", "m.toml:1:1"},
                          {"[a]\nb.c = 1\n[a.b]", "m.toml:3:", "m.toml:2:1"},
                          {"[a.b]\nc = 1\n[a]\nb.d = 1", "m.toml:4:", "m.toml:1:4"},
                          {"[a.b]\n[a]\n[a]", "m.toml:3:", "m.toml:2:1"},  // its own header, not that of what is in it
                          {"a = 3\n[a.b]", "m.toml:2:", "m.toml:1:1"},
                          {"a = {b = 1}\n[a.c]", "m.toml:2:", "m.toml:1:1"},
                          {"[[a]]\n[a]", "m.toml:2:", "m.toml:1:3"},
                          {"'threads' = 1\n\"thr\\u0065ads\" = 2", "m.toml:2:", "m.toml:1:1"},
                          {"[plugin.'a.b']\n[plugin.a]\n[plugin.\"a.b\"]", "m.toml:3:", "m.toml:1:9"},
                          {"s = \"\"\"\nthreads = 5\n\"\"\"\nthreads = 1\nthreads = 2", "m.toml:5:", "m.toml:4:1"},
                          {"a = 1\na = '''\nx'''", "m.toml:2:", "m.toml:1:1"},
                          {"threads = 1\r\nthreads = 2\r\n", "m.toml:2:", "m.toml:1:1"},
                          {"  [ a . b ] # = 1\n\t[a.b] # b = 2", "m.toml:2:", "m.toml:1:9"},
                          // What the line itself does not tell is not guessed.
                          {"a = {b = 1, b = 2}", "m.toml:1:", ""},
                          {"a.x = 1\na.y = {b = 1, b = 2}", "m.toml:2:", ""},
                          {"[[a]]\nb = 1\nb = 2", "m.toml:3:", ""},
                          {"[[a]]\n[a.b]\n[a.b]", "m.toml:3:", ""},
                          {"'a=b' = 1\n'a=b' = 2", "m.toml:2:", ""},
                          {"a = [\n  {b = 1, b = 2}]", "m.toml:2:", ""},
                          {"a = 1\nb = [\n\n", "m.toml:", ""},
                          {"a = 1\na", "m.toml:2:", ""},
                          {"a = 1\na =", "m.toml:2:", ""},
                          {"[a]\n[a", "m.toml:2:", ""}}) {
    const std::string error = refusal(t.text);
    EXPECT_THAT(error, StartsWith(t.again)) << t.text;
    const std::string before_it = "; it first stands at ";
    const size_t at = error.find(before_it);
    EXPECT_EQ(at == std::string::npos ? "" : error.substr(at + before_it.size()), t.first) << t.text << "\n" << error;
  }
}

TEST(Manifest, AllErrorsOfAFileAreReported) {
  EXPECT_EQ(refusal("thread = 1\nlog_level = 3\n[zero_optimization]\nstage = 0.5\n[fp16]\nenabled = 1"),
            "m.toml:1:1: unknown key `thread`; did you mean `threads`?\n"
            "m.toml:2:1: `log_level` must be one of \"debug\", \"info\", \"warn\", \"error\", got 3\n"
            "m.toml:4:1: `zero_optimization.stage` must be a whole number, got 0.5\n"
            "m.toml:6:1: `fp16.enabled` must be true or false, got 1");
  std::string many;
  for (int i = 0; i < 50; ++i) many += "zzzzzzzz" + std::to_string(i) + " = 1\n";
  const std::string text = refusal(many);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 20);
  EXPECT_THAT(text, ::testing::EndsWith("\nand 30 more errors"));
}

TEST(Manifest, PluginSectionsKeepTheirShape) {
  EXPECT_THAT(refusal("plugin = 3"), HasSubstr("is a section"));
  EXPECT_THAT(refusal("plugin.x = 3"), HasSubstr("`plugin.x` must be a section [plugin.x], got 3"));
  EXPECT_THAT(refusal("plugin.x.y = [1]"), HasSubstr("`plugin.x.y` must be true, false, a number or text"));
  EXPECT_THAT(refusal("plugin.x.y.z = 1"),
              HasSubstr("`plugin.x.y` must be true, false, a number or text, got a table"));
}

TEST(Manifest, Files) {
  const std::filesystem::path dir = std::filesystem::path(::testing::TempDir()) / "strata_manifest_files";
  std::filesystem::create_directories(dir);
  Settings s;
  Status status = read_manifest((dir / "missing.toml").string(), {}, &s, nullptr);
  EXPECT_EQ(status.code(), STRATA_NOT_FOUND);
  EXPECT_THAT(status.text(), HasSubstr("missing.toml: no such file"));
  EXPECT_THAT(read_manifest(dir.string(), {}, &s, nullptr).text(), HasSubstr("is a directory"));
  const std::string pipe = (dir / "pipe").string();
  mkfifo(pipe.c_str(), 0600);
  EXPECT_THAT(read_manifest(pipe, {}, &s, nullptr).text(), HasSubstr("not a regular file")) << "and does not hang";
  const std::string file = (dir / "good.toml").string();
  std::ofstream(file) << "plugins.path = [\"extra\"]\n";
  ASSERT_TRUE(read_manifest(file, {}, &s, nullptr).ok());
  EXPECT_EQ(s.resolve(s.plugins.path[0]), (dir / "extra").string());
  EXPECT_EQ(s.origin("plugins.path"), file + ":1:9");
  std::ofstream(file) << std::string(kMaxManifestBytes + 1, '\n');
  EXPECT_THAT(read_manifest(file, {}, &s, nullptr).text(), HasSubstr("is longer than 1048576 bytes"));
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace strata
