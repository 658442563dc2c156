// What one key demands of another (cases.md 54): deprecated, contradictory and ineffective keys.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/manifest/manifest_keys.h"
#include "tests/unit_manifest/manifest_text.h"

namespace strata {
namespace {

using test::accepted;
using test::refusal;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ManifestRules, DeprecatedAloneWorksWithOneWarning) {
  std::vector<std::string> warnings;
  const Settings s = accepted("[zero_optimization]\nstage = 2\ncpu_offload = true", {}, &warnings);
  EXPECT_EQ(s.zero_optimization.offload_optimizer.device, OffloadDevice::kCpu);
  EXPECT_THAT(warnings, ElementsAre("m.toml:3:1: `zero_optimization.cpu_offload` is deprecated: write "
                                    "`zero_optimization.offload_optimizer.device` = \"cpu\""));
  EXPECT_EQ(accepted("zero_optimization.cpu_offload = false").zero_optimization.offload_optimizer.device,
            OffloadDevice::kNone);
}

TEST(ManifestRules, DeprecatedBesideItsReplacementIsAnError) {
  const std::string text =
      "[zero_optimization]\ncpu_offload = true\n[zero_optimization.offload_optimizer]\ndevice = \"none\"";
  EXPECT_EQ(refusal(text),
            "m.toml:2:1: `zero_optimization.cpu_offload` is deprecated and contradicts "
            "[zero_optimization.offload_optimizer]: remove it");
  EXPECT_THAT(refusal("[zero_optimization]\ncpu_offload = true\noffload_optimizer = {}"), HasSubstr("contradicts"));
  EXPECT_THAT(refusal("zero_optimization.cpu_offload = true", {"zero_optimization.offload_optimizer.device=cpu"}),
              HasSubstr("contradicts"));
  EXPECT_THAT(refusal("zero_optimization.cpu_offload = \"yes\""), HasSubstr("must be true or false"));
}

TEST(ManifestRules, ParamOffloadBelowStage3) {
  EXPECT_EQ(refusal("[zero_optimization]\nstage = 2\n[zero_optimization.offload_param]\ndevice = \"cpu\""),
            "m.toml:4:1: `zero_optimization.offload_param.device` has no effect: `zero_optimization.stage` is 2 "
            "(m.toml:2:1) and params are sharded only at stage 3; remove it or set stage = 3 "
            "(no_effect_keys = \"warn\" lets such keys pass)");
  accepted("[zero_optimization]\nstage = 2\n[zero_optimization.offload_param]\ndevice = \"none\"");
}

TEST(ManifestRules, StageThreeKeysBelowStageThree) {
  for (const char* key : {"prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
                          "max_reuse_distance", "model_persistence_threshold", "stage3_param_persistence_threshold"}) {
    for (const char* stage : {"0", "1", "2"})
      EXPECT_THAT(refusal("[zero_optimization]\nstage = " + std::string(stage) + "\n" + key + " = 1e5"),
                  HasSubstr("has no effect"));
    accepted("[zero_optimization]\nstage = 3\n" + std::string(key) + " = 1e5");
  }
  EXPECT_THAT(refusal("zero_optimization.accumulate_locally = true"), HasSubstr("always accumulate locally"));
  accepted("zero_optimization = {stage = 2, accumulate_locally = true}");
}

TEST(ManifestRules, NoEffectCanBeAWarningButNeverSilent) {
  std::vector<std::string> warnings;
  const Settings s = accepted(
      "no_effect_keys = \"warn\"\n[zero_optimization]\nstage = 2\nmax_live_parameters = 1\n"
      "offload_param = {device = \"cpu\"}",
      {}, &warnings);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("max_live_parameters` has no effect"),
                                    HasSubstr("offload_param.device` has no effect")));
  EXPECT_EQ(s.zero_optimization.offload_param.device, OffloadDevice::kNone);
}

TEST(ManifestRules, AnOverrideMayMakeKeysOfTheFileIdle) {
  const std::string text =
      "[zero_optimization]\nstage = 3\nstage3_max_live_parameters = 1e6\n"
      "offload_param = {device = \"cpu\", pin_memory = true}\noffload_optimizer = {device = \"cpu\", pin_memory = "
      "true}";
  std::vector<std::string> warnings;
  const Settings s =
      accepted(text, {"zero_optimization.stage=1", "zero_optimization.offload_optimizer.device=none"}, &warnings);
  EXPECT_EQ(s.zero_optimization.offload_param.device, OffloadDevice::kNone);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("`zero_optimization.stage3_max_live_parameters` has no effect"),
                                    HasSubstr("offload_optimizer.pin_memory` has no effect"),
                                    HasSubstr("offload_param.device` has no effect")));
  // Not when the override itself has no effect, nor when file contradicts file.
  EXPECT_THAT(refusal("zero_optimization.stage = 1", {"zero_optimization.max_live_parameters=1e6"}),
              HasSubstr("has no effect"));
  EXPECT_THAT(refusal(text, {"zero_optimization.stage=1", "zero_optimization.max_reuse_distance=1"}),
              HasSubstr("max_reuse_distance` has no effect"));
}

TEST(ManifestRules, ErrorsNameAKeyAsItWasWritten) {
  EXPECT_THAT(refusal("[zero_optimization]\nstage = 1\nstage3_prefetch_bucket_size = 1e5"),
              HasSubstr("`zero_optimization.stage3_prefetch_bucket_size` has no effect"));
}

TEST(ManifestRules, TierKeysNeedTheirTier) {
  const std::string o = "zero_optimization.offload_optimizer.";
  EXPECT_THAT(refusal(o + "pin_memory = true"), HasSubstr("pin_memory` has no effect"));
  accepted(o + "pin_memory = true\n" + o + "device = \"cpu\"");
  for (const char* key : {"nvme_path = \"x\"", "buffer_count = 4", "buffer_size = 1e6", "cpu_state_budget = 1e6",
                          "fast_init = true", "pipeline_read = true", "pipeline_write = false"})
    for (const char* device : {"", "device = \"none\"\n", "device = \"cpu\"\n"}) {  // one word moves the state
      std::vector<std::string> warnings;
      accepted((*device ? o + device : "") + o + key, {}, &warnings);
      EXPECT_THAT(warnings, ElementsAre(HasSubstr("has no effect"))) << device << key;
    }
  EXPECT_EQ(refusal(o + "device = \"nvme\""),
            "m.toml:1:37: `zero_optimization.offload_optimizer.device` = \"nvme\" needs "
            "`zero_optimization.offload_optimizer.nvme_path`, a directory");
  accepted(o + "device = \"nvme\"\n" + o + "nvme_path = \"x\"\n" + o + "buffer_count = 5");
  const std::string state =
      "; buffer_count = 4 and buffer_size = 2048 work with any model: 98304 bytes of host memory for fp32 state, with "
      "weights on a GPU or on disk up to 131072";
  EXPECT_THAT(refusal(o + "device = \"nvme\"\n" + o + "nvme_path = \"x\"\n" + o + "buffer_count = 3"),
              HasSubstr("must be 4 to 1024, got 3" + state));
  EXPECT_THAT(refusal(o + "device = \"nvme\"\n" + o + "nvme_path = \"x\"\n" + o + "buffer_size = 2047"),
              HasSubstr("must be 2048 or more, got 2047" + state));
  const std::string p = "zero_optimization.offload_param.",
                    param =
                        "; buffer_count = 1 and buffer_size = 2048 work with any model: 4096 bytes of host memory, "
                        "8192 for fp32 params";
  EXPECT_THAT(refusal(p + "buffer_count = 0"), HasSubstr("must be 1 to 1024, got 0" + param));
  EXPECT_THAT(refusal(p + "buffer_size = 1000"), HasSubstr("must be 2048 or more, got 1000" + param));
}

TEST(ManifestRules, ATierOfHostMemoryBesideNvme) {
  const std::string z = "zero_optimization.", plugin = "plugins.offload_cpu = \"mine\"\n";
  const std::string state = z + "offload_optimizer.device = \"nvme\"\n" + z + "offload_optimizer.nvme_path = \"x\"\n";
  const std::string param =
      z + "stage = 3\n" + z + "offload_param.device = \"nvme\"\n" + z + "offload_param.nvme_path = \"x\"\n";
  EXPECT_THAT(refusal(state + plugin), HasSubstr("plugins.offload_cpu` has no effect"));
  accepted(state + plugin + z + "offload_optimizer.cpu_state_budget = 1");
  accepted(param + plugin);  // max_in_cpu has a default
  EXPECT_THAT(refusal(param + plugin + z + "offload_param.max_in_cpu = 0"), HasSubstr("has no effect"));
}

TEST(ManifestRules, TheDevicesPartInAnOffloadedUpdate) {
  const std::string o = "zero_optimization.offload_optimizer.", cpu = o + "device = \"cpu\"\n";
  const std::string nvme = o + "device = \"nvme\"\n" + o + "nvme_path = \"x\"\n";
  for (const char* key : {"ratio = 0.5", "device_state_budget = 1000", "split_update = true", "split_share = 0.5"})
    EXPECT_THAT(refusal(o + key), HasSubstr("has no effect")) << key;
  for (const char* key : {"ratio = 0.5", "device_state_budget = 1000"}) {
    accepted(cpu + o + key);
    accepted(nvme + o + key);
  }
  accepted(cpu + o + "split_update = true\nplugins.device_optimizer = \"mine\"");
  std::vector<std::string> warnings;
  accepted(cpu + o + "split_update = true", {}, &warnings);
  EXPECT_THAT(warnings, testing::ElementsAre(HasSubstr("pin_memory` = true")));
  warnings.clear();
  accepted(cpu + o + "split_update = true\n" + o + "pin_memory = true", {}, &warnings);
  EXPECT_TRUE(warnings.empty());
  EXPECT_THAT(refusal(nvme + o + "split_update = true"), HasSubstr("is \"nvme\" (m.toml:1:"));
  EXPECT_THAT(refusal(cpu + o + "split_share = 0.5"),
              HasSubstr("`zero_optimization.offload_optimizer.split_update` is"));
  EXPECT_THAT(refusal(cpu + o + "ratio = 0.5\n" + o + "device_state_budget = 1000"), HasSubstr("give one"));
  EXPECT_THAT(refusal(cpu + "plugins.device_optimizer = \"mine\""), HasSubstr("has no part in the update"));
}

// 0 offloads nothing: a choice beside params in host memory, and nothing is left for keys of what is offloaded.
TEST(ManifestRules, ARatioOfZeroLeavesNothingToSplitOrKeep) {
  const std::string o = "zero_optimization.offload_optimizer.", cpu = o + "device = \"cpu\"\n";
  const std::string nvme = o + "device = \"nvme\"\n" + o + "nvme_path = \"x\"\n", none = o + "ratio = 0\n";
  accepted(cpu + none);
  accepted(nvme + none);
  EXPECT_EQ(
      refusal(cpu + none + o + "split_update = true"),
      "m.toml:3:37: `" + o + "split_update` has no effect: `" + o +
          "ratio` is 0 (m.toml:2:37): the device keeps all of the state (no_effect_keys = \"warn\" lets such keys "
          "pass)");
  for (const std::string& text :
       {cpu + none + o + "split_share = 0.5", nvme + none + o + "split_update = true",
        nvme + none + o + "cpu_state_budget = 1000",
        "plugins.host_device = \"mine\"\ngradient_accumulation_steps = 2\nzero_optimization.stage = 2\n" + cpu + none})
    EXPECT_THAT(refusal(text), testing::AllOf(HasSubstr("has no effect"), HasSubstr("ratio` is 0 ("))) << text;
  EXPECT_THAT(refusal(cpu + none + o + "device_state_budget = 1000"), HasSubstr("give one"));
  std::vector<std::string> warnings;
  const Settings s = accepted(cpu + o + "split_update = true\n" + o + "split_share = 0.5", {o + "ratio=0"}, &warnings);
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("split_update` has no effect"), HasSubstr("split_share` has no effect")));
  EXPECT_FALSE(s.zero_optimization.offload_optimizer.split_update);
  accepted(cpu + o + "ratio = 1e-9\n" + o + "split_update = true");
}

TEST(ManifestRules, AHostDeviceIsForSumsInHostMemory) {
  const std::string z = "zero_optimization.", cpu = z + "offload_optimizer.device = \"cpu\"\n";
  const std::string two = "gradient_accumulation_steps = 2\n", mine = "plugins.host_device = \"mine\"\n";
  accepted(mine + two + cpu + z + "stage = 2");
  accepted(mine + cpu + z + "stage = 3");  // the number of micro-batches may follow from the world
  const std::string one = "gradient_accumulation_steps = 1\n";
  for (const auto& [text, why] : {std::pair{two + z + "stage = 2", "device` is \"none\""},
                                  {two + cpu + z + "stage = 1", "stage` is 1"},
                                  {two + cpu + z + "stage = 2\n" + z + "accumulate_locally = true", "locally` is true"},
                                  {one + cpu + z + "stage = 2", "steps` is 1"}})
    EXPECT_THAT(refusal(mine + text), testing::AllOf(HasSubstr("`plugins.host_device` has no effect"), HasSubstr(why)));
}

TEST(ManifestRules, OneTierServesStateAndParamsOnDisk) {
  const std::string o = "zero_optimization.offload_optimizer.", p = "zero_optimization.offload_param.";
  const std::string both = "zero_optimization.stage = 3\n" + o + "device = \"nvme\"\n" + p + "device = \"nvme\"\n" + o +
                           "nvme_path = \"/a, /b\"\n" + p + "nvme_path = ";
  accepted(both + "\"/a, /b\"");
  EXPECT_THAT(refusal(both + "\"/a\""),
              testing::AllOf(HasSubstr("\"/a\""), HasSubstr("\"/a, /b\""), HasSubstr("differ")));
}

TEST(ManifestRules, PathListsAreRelativeToTheManifest) {
  Settings s;
  s.manifest_dir = "/runs";
  EXPECT_EQ(s.resolve_list("fast"), "/runs/fast");
  EXPECT_EQ(s.resolve_list(" /a,b ,, c/d"), "/a, /runs/b, /runs/c/d");
  EXPECT_EQ(s.resolve_list(""), "");
  EXPECT_EQ(s.resolve_list(" , "), "");
}

TEST(ManifestRules, PluginsOfATierNeedTheirTier) {
  const std::string o = "zero_optimization.offload_optimizer.", p = "zero_optimization.offload_param.";
  EXPECT_EQ(refusal("plugins.offload_cpu = \"mine\""),
            "m.toml:1:9: `plugins.offload_cpu` has no effect: neither `zero_optimization.offload_optimizer.device` nor "
            "`zero_optimization.offload_param.device` is \"cpu\" (no_effect_keys = \"warn\" lets such keys pass)");
  EXPECT_THAT(refusal("plugins.offload_nvme = \"mine\"\n" + o + "device = \"cpu\""), HasSubstr("offload_nvme` has no"));
  const std::string stage3 = "\nzero_optimization.stage = 3\n", mine = "plugins.offload_cpu = \"mine\"\n";
  accepted(mine + o + "device = \"cpu\"");
  const std::string of_params = mine + p + "device = \"cpu\"" + stage3;
  accepted(of_params);
  for (const std::string& idle : {p + "device=none", std::string("zero_optimization.stage=2")}) {
    std::vector<std::string> warnings;
    accepted(of_params, {idle}, &warnings);
    EXPECT_THAT(warnings, ::testing::Contains(HasSubstr("`plugins.offload_cpu` has no effect"))) << idle;
  }
  EXPECT_THAT(refusal(stage3, {"plugins.offload_cpu=mine", o + "device=none"}),
              HasSubstr("offload_cpu` has no effect"));
}

TEST(ManifestRules, Contradictions) {
  EXPECT_THAT(refusal("fp16.enabled = true"), HasSubstr("loss scaling, which is not there yet"));
  EXPECT_EQ(refusal("optimizer.params.adam_w_mode = false"),
            "m.toml:1:18: `optimizer.params.adam_w_mode` = false contradicts `optimizer.type` = \"AdamW\" (default); "
            "write type = \"Adam\"");
  EXPECT_TRUE(accepted("optimizer.type = \"Adam\"\noptimizer.params.adam_w_mode = true").optimizer.adam_w_mode);
}

TEST(ManifestRules, AWrongValueDoesNotCauseFollowUpErrors) {
  EXPECT_EQ(refusal("[zero_optimization]\nstage = 7\nmax_live_parameters = 1"),
            "m.toml:2:1: `zero_optimization.stage` must be at most 3, got 7");
}

TEST(ManifestRules, WhatIsOnlyWarnedAboutIsNotThereAfterwards) {
  for (const char* key : {"ratio = 0.5", "device_state_budget = 1000", "split_update = true"}) {
    std::vector<std::string> warnings;
    const Settings s = accepted("no_effect_keys = \"warn\"\n[zero_optimization.offload_optimizer]\n" + std::string(key),
                                {}, &warnings);
    EXPECT_THAT(warnings, ElementsAre(HasSubstr("has no effect")));
    EXPECT_FALSE(s.zero_optimization.offload_optimizer.uses_device()) << key;
  }
}

// Errors do not cite a default as if somebody had written it.
TEST(ManifestRules, ValuesInWordsSayWhichAreDefaults) {
  const Settings s =
      accepted("threads = 4\n[zero_optimization]\nstage = 3\nstage3_max_live_parameters = 1e9\n", {"log_level=warn"});
  EXPECT_EQ(value_in_words(s, "threads"), "4");
  EXPECT_EQ(value_in_words(s, "zero_optimization.max_live_parameters"), "1000000000")
      << "given, though it is the default";
  EXPECT_EQ(value_in_words(s, "zero_optimization.sub_group_size"), "1000000000, the default");
  EXPECT_EQ(value_in_words(s, "log_level"), "warn");
  EXPECT_EQ(value_in_words(s, "zero_optimization.offload_param.device"), "none, the default");
}

TEST(ManifestRules, ThePlaceOfTheTraceIsThatOfItsLastName) {
  Settings s = accepted("");
  s.manifest_dir = "/runs";
  for (const auto& [path, parent] : std::vector<std::pair<std::string, std::string>>{{"trace", "/runs"},
                                                                                     {"trace/", "/runs"},
                                                                                     {"a/b", "/runs/a"},
                                                                                     {"/x/y", "/x"},
                                                                                     {"/x", "/"},
                                                                                     {"../t", "/runs/.."}}) {
    s.trace.path = path;
    EXPECT_EQ(s.trace_parent(), parent) << path;
  }
}

}  // namespace
}  // namespace strata
