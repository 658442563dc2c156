// Training with the optimizer's state, the params or both on disk: the bits of the plain run, whatever the disks, the
// queue and the cut into sub-groups; nothing left behind; a failing disk ends the run with its name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tests/support/disk_dirs.h"
#include "tests/train/by_hand.h"
#include "tests/train/gates.h"
#include "tests/train/harness.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

const std::string kState = "zero_optimization.offload_optimizer.", kParam = "zero_optimization.offload_param.";

// Optimizer state on disk, at `paths`.
Trial on_disk(Trial t, const std::string& paths) {
  t.offload_optimizer = "nvme";
  t.overrides.push_back(kState + "nvme_path=\"" + paths + "\"");
  t.manifest_extra += "[plugin.offload_nvme]\nprobe_ms = 0\n";
  return t;
}

struct Shape {
  int stage, world, micro;
};

class NvmeKeepsBits : public testing::TestWithParam<Shape> {
 protected:
  Trial base() const {
    Trial t;
    t.stage = GetParam().stage;
    t.world = GetParam().world;
    t.micro_batches = GetParam().micro;
    t.clip = 0.05;
    t.steps = 5;
    if (t.stage == 3) t.overrides = {"zero_optimization.param_persistence_threshold=50"};
    return t;
  }
  void expect_plain(Trial t, const std::string& what) {
    const Result other = run(t);
    ASSERT_EQ(other.error, "") << what;
    EXPECT_TRUE(other == plain_) << what << " changed the numbers";
    EXPECT_GT(other.counters.tier_read[2], 0u) << what;
    EXPECT_GT(other.counters.tier_write[2], 0u) << what;
    EXPECT_EQ(a.entries() + b.entries(), 0u) << what << " left something behind";
  }
  Result plain_;
  DiskDir a, b;
};

TEST_P(NvmeKeepsBits, OfThePlainRun) {
  plain_ = run(base());
  ASSERT_EQ(plain_.error, "");
  expect_plain(on_disk(base(), a.path), "state on disk");
  const auto with = [&](const std::vector<std::string>& overrides, const std::string& options = "") {
    Trial t = on_disk(base(), a.path + ", " + b.path);
    t.overrides.insert(t.overrides.end(), overrides.begin(), overrides.end());
    t.manifest_extra += options;
    expect_plain(t, (overrides.empty() ? "" : overrides[0]) + options);
  };
  with({});
  with({"zero_optimization.sub_group_size=2048"});
  with({"optimizer.params.state_layout=split"});
  with({kState + "fast_init=true"});
  with({kState + "buffer_size=2048"});
  with({kState + "buffer_size=2048", kState + "pipeline_read=false", kState + "pipeline_write=false"});
  with({kState + "buffer_size=5000", kState + "buffer_count=9"});
  with({kState + "buffer_size=2048", kState + "cpu_state_budget=150000"});
  with({kState + "cpu_state_budget=60000", "optimizer.params.state_layout=split"});
  with({}, "io = \"threads\"\nchecksum = true\nqueue_depth = 2\n");
  with({}, "segment_bytes = 1048576\nweights = \"5, 1\"\n");
  if (GetParam().stage < 3) return;
  const std::string same = kParam + "nvme_path=\"" + a.path + ", " + b.path + "\"";
  const std::string none = kParam + "max_in_cpu=0";
  with({kParam + "device=nvme", same, none});
  with({kParam + "device=nvme", same, none, "zero_optimization.sub_group_size=2048"});
  with({kParam + "device=nvme", same, none, kParam + "buffer_size=2048", kParam + "buffer_count=1"});
  with({kParam + "device=nvme", same, kParam + "max_in_cpu=20000", kState + "cpu_state_budget=100000"});
  with({kParam + "device=nvme", same, none, "zero_optimization.prefetch_bucket_size=0"});
  with({kParam + "device=nvme", same, none, "optimizer.params.state_layout=split"});
  with({kParam + "device=cpu"});
}
// Beside a GPU: simulated, of late work.
TEST_P(NvmeKeepsBits, BesideAGpu) {
  plain_ = run(base());
  ASSERT_EQ(plain_.error, "");
  const auto with = [&](const std::vector<std::string>& overrides, bool device_updates = false) {
    for (const bool lend : {false, true}) {
      Trial t = on_disk(base(), a.path + ", " + b.path);
      t.gpu = "gpu_sim";
      t.gpu_delay_us = 300;
      t.lend = lend;
      t.device_updates = device_updates;
      t.overrides.insert(t.overrides.end(), overrides.begin(), overrides.end());
      expect_plain(t, (overrides.empty() ? "" : overrides.back()) + (lend ? ", lent" : ""));
    }
  };
  with({});
  with({kState + "buffer_size=2048"});
  with({kState + "buffer_size=2048", kState + "cpu_state_budget=150000"});
  with({"optimizer.params.state_layout=split"});
  with({kState + "buffer_size=2048", kState + "device_state_budget=60000"}, true);
  with({kState + "ratio=0.5", kState + "cpu_state_budget=60000"}, true);
  if (GetParam().stage < 3) return;
  const std::string same = kParam + "nvme_path=\"" + a.path + ", " + b.path + "\"", none = kParam + "max_in_cpu=0";
  with({kParam + "device=nvme", same, none});
  with({kParam + "device=nvme", same, none, kParam + "buffer_size=2048", kParam + "buffer_count=1"});
  with({kParam + "device=nvme", same, kParam + "max_in_cpu=20000", kState + "cpu_state_budget=100000"});
  with({kParam + "device=nvme", same, none, "zero_optimization.max_live_parameters=20000"});
  with({kParam + "device=nvme", same, none, "optimizer.params.state_layout=split", kState + "buffer_size=2048"});
  with({kParam + "device=cpu", kParam + "pin_memory=true"});
  // Params on disk with their state in host memory.
  for (const bool split : {false, true}) {
    Trial t = base();
    t.gpu = "gpu_sim";
    t.offload_optimizer = "cpu";
    t.device_updates = split;
    t.manifest_extra += "[plugin.offload_nvme]\nprobe_ms = 0\n";
    for (const std::string& text : {kParam + "device=nvme", same, none}) t.overrides.push_back(text);
    if (split) t.overrides.push_back(kState + "split_update=true");
    expect_plain(t, split ? "split update" : "state in host memory");
  }
}

INSTANTIATE_TEST_SUITE_P(Matrix, NvmeKeepsBits,
                         testing::Values(Shape{0, 1, 1}, Shape{1, 2, 3}, Shape{2, 2, 1}, Shape{3, 1, 3},
                                         Shape{3, 3, 1}),
                         [](const auto& tested) {
                           return "stage" + std::to_string(tested.param.stage) + "_world" +
                                  std::to_string(tested.param.world) + "_micro" + std::to_string(tested.param.micro);
                         });

// Two engines of one process, one directory: each has its own files.
TEST(Nvme, TwoEnginesShareADirectory) {
  DiskDir dir;
  Trial small = on_disk({}, dir.path), large = small;
  large.world = 2;
  large.stage = 2;
  const Result alone_small = run(small), alone_large = run(large);
  ASSERT_EQ(alone_small.error + alone_large.error, "");
  Result beside;
  std::thread other([&] { beside = run(large); });
  const Result here = run(small);
  other.join();
  EXPECT_TRUE(here == alone_small);
  EXPECT_TRUE(beside == alone_large);
  EXPECT_EQ(dir.entries(), 0u);
}

TEST(Nvme, AFailingDiskEndsTheRunWithItsName) {
  DiskDir dir;
  const auto failing = [&](const std::string& rule, const std::string& what, bool params) {
    Trial t = on_disk({}, dir.path);
    t.steps = 8;
    t.overrides.push_back("deadline_seconds=2");
    t.overrides.push_back("plugins.offload_nvme=fault");
    t.manifest_extra += std::string("[plugin.fault]\nwraps = \"offload_nvme\"\nrules = \"") + rule + "\"\n";
    if (params) {
      t.stage = 3;
      t.world = 2;
      for (const char* text : {"device=nvme", "max_in_cpu=0", "buffer_size=2048"}) t.overrides.push_back(kParam + text);
      t.overrides.push_back(kParam + "nvme_path=\"" + dir.path + "\"");
      t.overrides.push_back(kState + "cpu_state_budget=1e9");
      t.overrides.push_back("zero_optimization.param_persistence_threshold=0");
    }
    const Result r = run(t);
    EXPECT_THAT(r.error, AllOf(HasSubstr(what), HasSubstr("unit \""))) << rule;
    EXPECT_EQ(dir.entries(), 0u);
  };
  failing("write:40:fail=DATA_LOSS", "write", false);
  failing("read:40:fail=DATA_LOSS", "read", false);
  failing("read:17:fail=DATA_LOSS", "gather of unit", true);
  failing("write:10:fail=DATA_LOSS", "write", true);
}

// Of several transfers into one buffer the first fails, at its call or in its event, and the others are late: the
// engine goes, and its buffers with it, only when they have ended.
TEST(Nvme, NothingIsUnderWayBehindAFailure) {
  DiskDir dir;
  for (const char* op : {"read", "write"}) {
    for (int n = 1; n < 24; n += 2) {
      const std::string at = op + std::string(":") + std::to_string(n),
                        behind = op + (":" + std::to_string(n + 1) + "+");
      for (const std::string& rules : {at + ":fail=DATA_LOSS", at + ":short, " + behind + ":late=20"}) {
        Trial t = on_disk({}, dir.path);
        t.stage = 2;
        t.model = vectors({2048, 2048}, STRATA_F32);
        t.overrides.push_back("plugins.offload_nvme=fault");
        t.manifest_extra += "[plugin.fault]\nwraps = \"offload_nvme\"\nrules = \"" + rules + "\"\n";
        EXPECT_THAT(run(t).error, HasSubstr(op)) << rules;
        EXPECT_EQ(dir.entries(), 0u);
      }
    }
  }
}

// The update on disk is still under way when the checkpoint before it is loaded.
TEST(Nvme, LoadsRightAfterAStep) {
  DiskDir dir, root;
  Trial t = on_disk({}, dir.path);
  t.stage = 3;
  t.world = 2;
  for (const std::string& text :
       {kParam + "device=nvme", kParam + "nvme_path=\"" + dir.path + "\"", kParam + "max_in_cpu=0",
        kState + "buffer_size=2048", std::string("zero_optimization.param_persistence_threshold=50"),
        std::string("plugins.offload_nvme=fault")}) {
    t.overrides.push_back(text);
  }
  t.manifest_extra += "[plugin.fault]\nwraps = \"offload_nvme\"\nrules = \"write:1+:late=2\"\n";
  t.body = [&](int rank, strata_engine* e) {
    ASSERT_EQ(build_model(e, t.model), "");
    const auto step = [&](int number) {
      ASSERT_EQ(micro_batch(e, t.model, number, 0, rank, UINT32_MAX), "");
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    };
    Result saved, loaded;
    step(1);
    ASSERT_EQ(strata_save(e, root.path.c_str(), "a"), STRATA_OK) << last();
    ASSERT_EQ(collect(e, t.model, &saved), "");
    step(2);
    ASSERT_EQ(strata_load(e, root.path.c_str(), "a"), STRATA_OK) << last();
    ASSERT_EQ(collect(e, t.model, &loaded), "");
    EXPECT_TRUE(loaded == saved);
    step(2);
    EXPECT_EQ(strata_wait(e), STRATA_OK) << last();
  };
  EXPECT_EQ(run(t).error, "");
}

// Reads, or writes, of an update are held: how many are begun. A part has three arrays of state.
TEST(Nvme, PipelinesAreAChoice) {
  constexpr uint64_t kPart = 2048, kArrays = 3, kParts = 8;
  for (const std::string side : {"read", "write"}) {
    for (const bool overlaps : {true, false}) {
      DiskDir dir;
      const std::string tag = "pipeline_" + side + (overlaps ? "_on" : "_off");
      Trial t = on_disk({}, dir.path);
      t.model = vectors({kParts * kPart}, STRATA_BF16);
      for (const std::string& text :
           {kState + "buffer_size=2048", kState + "buffer_count=4",
            kState + "pipeline_" + side + (overlaps ? "=true" : "=false"), std::string("plugins.offload_nvme=fault")}) {
        t.overrides.push_back(text);
      }
      t.manifest_extra += "[plugin.fault]\nwraps = \"offload_nvme\"\ntag = \"" + tag + "\"\n";
      t.manifest_extra += "rules = \"offload." + side + ":*:hold=" + tag + "\"\n";
      t.body = [&](int rank, strata_engine* e) {
        const auto* fault = control(e, "offload_nvme");
        const auto begun = [&] { return fault->count(tag.c_str(), rank, ("offload." + side).c_str()); };
        fault->open_gate(tag.c_str());
        ASSERT_EQ(build_model(e, t.model), "");
        ASSERT_EQ(micro_batch(e, t.model, 1, 0, rank, UINT32_MAX), "");
        fault->close_gate(tag.c_str());
        // Of four buffers two are read ahead; the part that needs the first one again waits for its writes.
        const uint64_t parts = !overlaps ? 1 : side == "read" ? 3 : 2, expected = begun() + parts * kArrays;
        ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
        EXPECT_TRUE(eventually([&] { return begun() >= expected; })) << begun();
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        EXPECT_EQ(begun(), expected) << side << overlaps;
        fault->open_gate(tag.c_str());
        EXPECT_EQ(strata_wait(e), STRATA_OK) << last();
      };
      EXPECT_EQ(run(t).error, "");
    }
  }
}

// What the engine plans in a tier, by name.
std::map<std::string, uint64_t> plan_of(Trial t, int tier) {
  std::map<std::string, uint64_t> planned;
  t.body = [&](int, strata_engine* e) {
    ASSERT_EQ(build_model(e, t.model), "");
    strata_plan_item items[64];
    uint64_t count = 0;
    ASSERT_EQ(strata_get_plan(e, items, 64, &count), STRATA_OK) << last();
    for (uint64_t i = 0; i < count; ++i) {
      if (items[i].tier == tier) planned[items[i].what] += items[i].bytes;
    }
  };
  EXPECT_EQ(run(t).error, "");
  return planned;
}

// A small error needs steps to show: 20 of them, for every way to have state or params on disk.
TEST(Nvme, TwentyStepsHaveTheBitsOfEveryOtherPlacement) {
  DiskDir dir;
  Trial base;
  base.stage = 3;
  base.world = 2;
  base.clip = 0.05;
  base.steps = 20;
  base.change_settings = true;
  base.overrides = {"zero_optimization.param_persistence_threshold=50"};
  const Result plain = run(base);
  ASSERT_EQ(plain.error, "");
  ASSERT_EQ(plain.norms.size(), 20u);
  Trial in_ram = base;
  in_ram.offload_optimizer = in_ram.offload_param = "cpu";
  EXPECT_TRUE(run(in_ram) == plain) << "state and params in host memory";
  const std::vector<std::pair<std::string, std::vector<std::string>>> placements = {
      {"state", {}},
      {"half of the state", {kState + "buffer_size=2048", kState + "cpu_state_budget=125000"}},
      {"state, split master", {"optimizer.params.state_layout=split"}},
      {"params and state",
       {kParam + "device=nvme", kParam + "nvme_path=\"" + dir.path + "\"", kParam + "max_in_cpu=0"}}};
  std::map<std::string, uint64_t> read;
  for (const auto& [name, overrides] : placements) {
    Trial t = on_disk(base, dir.path);
    t.overrides.insert(t.overrides.end(), overrides.begin(), overrides.end());
    const Result r = run(t);
    ASSERT_EQ(r.error, "") << name;
    EXPECT_TRUE(r == plain) << name << " on disk changed the numbers";
    EXPECT_EQ(dir.entries(), 0u) << name;
    read[name] = r.counters.tier_read[2];
  }
  EXPECT_GT(read["params and state"], read["state"]);
  EXPECT_LT(read["state, split master"], read["state"]);
  EXPECT_LT(read["half of the state"], read["state"]);
}

// Beside a GPU, so that the device's memory is not the host's: buffers, what is kept, and gradients.
TEST(Nvme, HostMemoryIsBuffersCacheAndGradients) {
  constexpr uint64_t kEach = 1 << 15, kAll = 4 * kEach, kPart = 8192;
  DiskDir dir;
  Trial t = on_disk({}, dir.path);
  t.stage = 3;
  t.gpu = "gpu_sim";
  t.model = vectors({kEach, kEach, kEach, kEach}, STRATA_BF16);
  t.overrides = {"zero_optimization.param_persistence_threshold=0",
                 kState + "nvme_path=" + dir.path,
                 kState + "buffer_size=" + std::to_string(kPart),
                 kState + "buffer_count=5",
                 kState + "cpu_state_budget=" + std::to_string(kAll * 12 / 4),
                 kParam + "device=nvme",
                 kParam + "nvme_path=" + dir.path,
                 kParam + "buffer_size=4096",
                 kParam + "buffer_count=3",
                 kParam + "max_in_cpu=" + std::to_string(kAll / 2)};
  const auto host = plan_of(t, 1), disk = plan_of(t, 2);
  EXPECT_EQ(host.at("update buffers"), 5 * kPart * (12 + 2));
  EXPECT_EQ(host.at("optimizer state"), kAll * 12 / 4);
  EXPECT_EQ(host.at("weight shards"), kAll / 2 * 2);
  EXPECT_EQ(host.at("weight shard buffers"), 3 * 4096u * 2);
  EXPECT_EQ(host.at("reduced gradients"), kAll * 2);
  EXPECT_EQ(disk.at("optimizer state"), kAll * 12 * 3 / 4);
  EXPECT_EQ(disk.at("weight shards"), kAll / 2 * 2);
}

// The least that the manifest takes, as its refusal of less says (core/manifest/manifest_keys.cc), with params that are
// larger than a buffer.
TEST(Nvme, TheSmallestBuffersTakeWhatTheirRefusalSays) {
  DiskDir dir;
  for (const auto& [dtype, gpu, params, state_bytes, param_bytes] : {std::tuple{STRATA_F32, "", false, 98304u, 0u},
                                                                     {STRATA_F32, "gpu_sim", false, 131072u, 0u},
                                                                     {STRATA_F32, "", true, 131072u, 8192u},
                                                                     {STRATA_BF16, "", true, 114688u, 4096u}}) {
    Trial t = on_disk({}, dir.path);
    t.stage = 3;
    t.gpu = gpu;
    t.model = vectors({1 << 14, 2049}, dtype);
    t.overrides.insert(t.overrides.end(), {"zero_optimization.param_persistence_threshold=0",
                                           kState + "buffer_size=2048", kState + "buffer_count=4"});
    if (params) {
      for (const char* text : {"device=nvme", "max_in_cpu=0", "buffer_size=2048", "buffer_count=1"}) {
        t.overrides.push_back(kParam + text);
      }
      t.overrides.push_back(kParam + "nvme_path=" + dir.path);
    }
    std::map<std::string, uint64_t> planned = plan_of(t, 1);
    for (const auto& [what, bytes] : plan_of(t, 0)) planned[what] += bytes;
    EXPECT_EQ(planned["update buffers"], state_bytes) << gpu << params;
    EXPECT_EQ(planned["weight shard buffers"], param_bytes) << gpu << params;
    EXPECT_EQ(run(t).error, "") << gpu << params;
  }
}

// What the tier itself takes counts against the limit, before anything is allocated: checksums as well.
TEST(Nvme, TheTiersOwnMemoryIsInThePlan) {
  constexpr uint64_t kMiB = 1 << 20, kEach = kMiB / 12 * 8;
  DiskDir dir;
  Trial t = on_disk({}, dir.path);
  t.model = vectors({kEach, kEach, kEach, kEach}, STRATA_BF16);
  const auto planned = [&](const char* checksum) {
    Trial with = t;
    with.manifest_extra += std::string("checksum = ") + checksum + "\n";
    return plan_of(with, 1).at("nvme index and buffers");
  };
  const uint64_t without = planned("false"), with = planned("true");
  EXPECT_GE(without, 3 * kMiB) << "the zeros and the buffer";
  const uint64_t mebibytes = (plan_of(t, 2).at("optimizer state") + kMiB - 1) / kMiB;
  EXPECT_EQ(with - without, mebibytes * (kMiB / 4096 * 8));
  // A limit between the two.
  uint64_t all = 0;
  for (const int tier : {0, 1}) {
    for (const auto& [what, bytes] : plan_of(t, tier)) all += bytes;
  }
  t.overrides.push_back("host_memory_limit=" + std::to_string(all));
  EXPECT_EQ(run(t).error, "");
  t.manifest_extra += "checksum = true\n";
  EXPECT_THAT(run(t).error, AllOf(HasSubstr("of host memory"), HasSubstr(std::to_string(all + with - without))));
}

// Of params, kept ones lie between others: every second unit here.
TEST(Nvme, ReadsWhatIsNotKept) {
  DiskDir dir;
  for (const uint64_t kept : {0u, 2u, 4u}) {
    constexpr uint64_t kEach = 1 << 14;
    Trial t = on_disk({}, dir.path);
    t.stage = 3;
    t.steps = 3;
    t.model = vectors({kEach, kEach, kEach, kEach}, STRATA_BF16);
    t.overrides = {"zero_optimization.param_persistence_threshold=0",
                   "zero_optimization.max_reuse_distance=0",
                   kState + "nvme_path=" + dir.path,
                   kState + "cpu_state_budget=1e9",
                   kParam + "device=nvme",
                   kParam + "nvme_path=" + dir.path,
                   kParam + "max_in_cpu=" + std::to_string(kept * kEach)};
    strata_counters before{}, after{};
    t.body = [&](int rank, strata_engine* e) {
      ASSERT_EQ(build_model(e, t.model), "");
      for (int step = 1; step <= 3; ++step) {
        EXPECT_EQ(micro_batch(e, t.model, step, 0, rank, UINT32_MAX), "");
        EXPECT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
        EXPECT_EQ(strata_wait(e), STRATA_OK) << last();
        STRATA_INIT(&after);
        EXPECT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &after), STRATA_OK);
        if (step == 2) before = after;
      }
    };
    ASSERT_EQ(run(t).error, "");
    const uint64_t shard = kEach * 2;
    EXPECT_EQ(after.tier_write[2] - before.tier_write[2], (4 - kept) * shard);
    // Once for the forward and once for the backward, but for the last unit, which stays in between: it is on disk
    // while anything is.
    EXPECT_EQ(after.tier_read[2] - before.tier_read[2] + (after.tier_read[1] - before.tier_read[1]), 7 * shard);
    EXPECT_EQ(after.tier_read[2] - before.tier_read[2], kept == 4 ? 0 : (2 * (4 - kept) - 1) * shard);
  }
}

// The numbers, the rank, each path with what is free there, and which of the two limits it was.
TEST(Nvme, RefusesAPlanThatIsOverTheBudget) {
  DiskDir a, b;
  Trial t = on_disk({}, a.path + ", " + b.path);
  t.model = vectors({1 << 20}, STRATA_BF16);
  t.manifest_extra += "budget_bytes = 8388608\n";
  EXPECT_THAT(run(t).error,
              AllOf(HasSubstr("plan needs"), HasSubstr("12582912 bytes"), HasSubstr("for rank 0, which may take"),
                    HasSubstr("8388608 bytes"), HasSubstr("the limit is option budget_bytes, not the disks"),
                    ContainsRegex(a.path + " has [0-9]+ bytes free"), ContainsRegex(b.path + " has [0-9]+ bytes free"),
                    HasSubstr("raise it"), HasSubstr("cpu_state_budget")));
  t.overrides.push_back(kState + "cpu_state_budget=4210688");
  EXPECT_EQ(run(t).error, "");
}

TEST(Nvme, RefusesAPlanThatTheDisksCannotHold) {
  LoopFs disk(8, 512);
  if (!disk.missing.empty()) GTEST_SKIP() << disk.missing;
  Trial t = on_disk({}, disk.path);
  t.world = 2;
  t.stage = 1;
  t.model = vectors({1 << 20}, STRATA_BF16);
  std::string errors[2];
  run_body(t, [&](int rank, strata_engine* e) { errors[rank] = build_model(e, t.model); });
  for (int rank : {0, 1}) {
    const std::string number = "rank " + std::to_string(rank);
    EXPECT_THAT(
        errors[rank],
        AllOf(HasSubstr("6291456 bytes) on nvme for " + number), HasSubstr("the limit is what the disks have free"),
              ContainsRegex(disk.path + " has [0-9]+ bytes free"), HasSubstr(number + " is one of 2"),
              HasSubstr("name more disks"), Not(HasSubstr("budget_bytes"))));
  }
}

TEST(Nvme, SaysWhenNothingIsOnDisk) {
  DiskDir dir;
  std::string lines;
  Trial t = on_disk({}, dir.path);
  t.stage = 3;
  t.overrides = {kState + "nvme_path=" + dir.path, kParam + "device=nvme", kParam + "nvme_path=" + dir.path,
                 "zero_optimization.param_persistence_threshold=0"};
  t.log = [&](strata_log_level, const std::string& line) { lines += line + "\n"; };
  ASSERT_EQ(run(t).error, "");
  EXPECT_THAT(lines, AllOf(HasSubstr("no weight shards on disk"), HasSubstr("max_in_cpu = 1000000000, the default")));
  EXPECT_THAT(lines, testing::Not(HasSubstr("no optimizer state on disk")));
  lines.clear();
  t.overrides.push_back(kParam + "max_in_cpu=0");
  t.overrides.push_back(kState + "cpu_state_budget=1e9");
  ASSERT_EQ(run(t).error, "");
  EXPECT_THAT(lines,
              HasSubstr("no optimizer state on disk: cpu_state_budget = 1000000000 keeps optimizer state in host"));
  EXPECT_THAT(lines, testing::Not(HasSubstr("weight shards on disk")));
  lines.clear();
  t.overrides.push_back(kParam + "max_in_cpu=10");
  t.overrides.push_back(kState + "cpu_state_budget=10");
  ASSERT_EQ(run(t).error, "");
  EXPECT_THAT(lines, AllOf(HasSubstr("max_in_cpu = 10 keeps no weight shards"),
                           HasSubstr("cpu_state_budget = 10 keeps no optimizer state")));
}

// Whatever else may keep params out of a tier: those that stay whole on every rank have no shards.
TEST(Nvme, SaysThatNoParamIsLargeEnoughForATier) {
  DiskDir dir;
  struct Asked {
    std::string device, max_in_cpu, threshold, says;
  };
  for (const Asked& a : std::vector<Asked>{{"nvme", "0", "", "on disk: no param has more elements than"},
                                           {"nvme", "1000", "", "threshold = 100000, the default: all"},
                                           {"nvme", "1000000000", "200000", "threshold = 200000: all"},
                                           {"cpu", "", "", "in host memory: no param has more elements than"},
                                           {"cpu", "", "0", ""},
                                           {"nvme", "0", "0", ""}}) {
    std::string lines;
    Trial t = on_disk({}, dir.path);
    t.stage = 3;
    t.offload_param = a.device;
    if (a.device == "nvme") {
      t.overrides.push_back(kParam + "nvme_path=" + dir.path);
      t.overrides.push_back(kParam + "max_in_cpu=" + a.max_in_cpu);
    }
    if (!a.threshold.empty()) t.overrides.push_back("zero_optimization.param_persistence_threshold=" + a.threshold);
    t.log = [&](strata_log_level, const std::string& line) { lines += line + "\n"; };
    ASSERT_EQ(run(t).error, "");
    EXPECT_EQ(lines.find("no weight shards ") != std::string::npos, !a.says.empty()) << lines;
    EXPECT_THAT(lines, AllOf(HasSubstr(a.says), Not(HasSubstr("max_in_cpu"))));
  }
}

// Also why no state is there: it is elsewhere by one setting, or by two, or there is none.
TEST(Nvme, SaysWhereAllOfTheStateIs) {
  DiskDir dir;
  struct Asked {
    std::vector<std::string> settings;
    bool frozen;
    std::string says;
  };
  for (const Asked& a : std::vector<Asked>{
           {{}, true, "no param is trained"},
           {{kState + "ratio=0"}, false, "ratio = 0 keeps optimizer state on the device"},
           {{kState + "device_state_budget=1000000000"}, false, "device_state_budget = 1000000000 keeps"},
           {{kState + "device_state_budget=60000", kState + "cpu_state_budget=1000000000"},
            false,
            "device_state_budget = 60000 keeps optimizer state on the device and cpu_state_budget = 1000000000 "
            "keeps"}}) {
    std::string lines;
    Trial t = on_disk({}, dir.path);
    t.gpu = "gpu_sim";
    t.device_updates = !a.settings.empty();
    t.overrides.insert(t.overrides.end(), a.settings.begin(), a.settings.end());
    for (ModelParam& p : t.model.params) p.frozen = p.frozen || a.frozen;
    t.log = [&](strata_log_level, const std::string& line) { lines += line + "\n"; };
    run_body(t, [&](int, strata_engine* e) { EXPECT_EQ(build_model(e, t.model), ""); });
    EXPECT_THAT(lines, HasSubstr("no optimizer state on disk: " + a.says));
  }
}

TEST(Nvme, RefusesWhatHostMemoryCannotHold) {
  DiskDir dir;
  Trial t = on_disk({}, dir.path);
  t.overrides.push_back("host_memory_limit=10000");
  EXPECT_THAT(run(t).error, AllOf(HasSubstr("the plan needs"), HasSubstr("buffer_size"),
                                  testing::Not(HasSubstr("move state to nvme"))));
}

TEST(Nvme, RefusesWhatCannotBe) {
  const auto refused = [](std::vector<std::string> overrides) {
    Trial t;
    t.stage = 3;
    t.overrides = std::move(overrides);
    return run(t).error;
  };
  const std::string at = kState + "nvme_path=";
  EXPECT_THAT(refused({kState + "device=nvme", at + "/no/such/directory"}),
              AllOf(HasSubstr("offload_nvme"), HasSubstr("/no/such/directory"), HasSubstr("No such file")));
  EXPECT_THAT(refused({kState + "device=nvme", at + "/a", kParam + "device=nvme", kParam + "nvme_path=/b"}),
              AllOf(HasSubstr("\"/a\""), HasSubstr("\"/b\""), HasSubstr("differ")));
}

}  // namespace
}  // namespace strata::test
