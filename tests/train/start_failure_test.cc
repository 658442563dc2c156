// One rank cannot start: every rank ends in bounded time, with one code and a text that has the number of the rank that
// failed and what it said (contracts 3 and 6). Opening, committing and the first save are what is meant by starting.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <mutex>
#include <thread>

#include "tests/support/disk_dirs.h"
#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

constexpr int kUnlessItHangs = 60;  // seconds, beyond every deadline here

// What a rank heard of the first call that failed.
struct Heard {
  strata_status code = STRATA_OK;
  std::string call, text;
  bool has(const std::string& part) const { return text.find(part) != std::string::npos; }
};

// A small model: no text of the test's own gets between a call and its error.
Heard start(strata_engine* e, const std::string& save_to) {
  const int64_t shape[] = {5000};
  strata_unit unit;
  strata_param param;
  strata_param_args args;
  STRATA_INIT(&args);
  args.name = "w";
  args.shape = shape;
  args.ndim = 1;
  args.dtype = STRATA_BF16;
  EXPECT_EQ(strata_add_unit(e, "u", &unit), STRATA_OK);
  EXPECT_EQ(strata_add_param(e, unit, &args, &param), STRATA_OK);
  if (const strata_status code = strata_commit(e)) return {code, "commit", last()};
  if (save_to.empty()) return {};
  if (const strata_status code = strata_save(e, save_to.c_str(), "first")) return {code, "save", last()};
  return {};
}

using TrialOf = std::function<Trial(int rank)>;

std::vector<Heard> start_ranks(int world, const TrialOf& trial_of, const std::string& save_to = "") {
  static std::atomic<int> serial{0};
  const std::string job = "start-failure-" + std::to_string(serial++);
  std::vector<Heard> heard(static_cast<size_t>(world));
  std::vector<std::thread> ranks;
  ::alarm(kUnlessItHangs);
  for (int r = 0; r < world; ++r) {
    ranks.emplace_back([&, r] {
      Trial t = trial_of(r);
      t.world = world;
      Heard& mine = heard[static_cast<size_t>(r)];
      strata_engine* e = open_rank(t, job, r, &mine.text, nullptr, &mine.code);
      mine.call = e ? "" : "open";
      if (e) mine = start(e, save_to);
      strata_close(e);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  ::alarm(0);
  return heard;
}

// `role` is played by the fault plugin before `plugin`, on every rank alike, since the manifest is the same on all.
Trial through_fault(Trial t, const std::string& role, const std::string& plugin, const std::string& rules) {
  t.overrides.push_back("plugins." + role + "=fault");
  t.manifest_extra += "[plugin.fault]\nwraps = \"" + plugin + "\"\nrules = \"" + rules + "\"\n";
  return t;
}

Trial on_cpu() { return {.stage = 2, .offload_optimizer = "cpu"}; }

Trial with(Trial t, const std::string& override_text) {
  t.overrides.push_back(override_text);
  return t;
}

struct Case {
  std::string call;
  strata_status code;
  std::string cause;
  Trial fine, fails;
};

Case through_fault(const std::string& call, const std::string& role, const std::string& plugin,
                   const std::string& slot) {
  return {call, STRATA_DATA_LOSS, "fails with DATA_LOSS", through_fault(on_cpu(), role, plugin, ""),
          through_fault(on_cpu(), role, plugin, slot + ":1:fail=DATA_LOSS")};
}

std::vector<Case> cases() {
  std::vector<Case> all = {
      {"open", STRATA_NOT_FOUND,
       "override plugins.offload_cpu=nowhere: `plugins.offload_cpu`: plugin nowhere was not found", on_cpu(),
       with(on_cpu(), "plugins.offload_cpu=nowhere")},
      {"open", STRATA_INVALID_ARGUMENT, "/no/plugins is no directory", on_cpu(),
       with(on_cpu(), "plugins.path=[\"/no/plugins\"]")},
      {"open", STRATA_INVALID_ARGUMENT, "[plugin.fault] has no effect", on_cpu(),
       with(on_cpu(), "plugin.fault.tag=idle")},
      {"open", STRATA_INVALID_ARGUMENT, "train_batch_size", on_cpu(), with(on_cpu(), "train_batch_size=7")},
      through_fault("open", "device", "device_host", "open"),
      through_fault("open", "device", "device_host", "caps"),
      through_fault("open", "offload_cpu", "offload_cpu", "open"),
      through_fault("open", "offload_cpu", "offload_cpu", "caps"),
      through_fault("open", "optimizer", "optim_adamw", "open"),
      {"commit", STRATA_RESOURCE_EXHAUSTED, "host_memory_limit", on_cpu(), with(on_cpu(), "host_memory_limit=100000")},
      {"commit", STRATA_RESOURCE_EXHAUSTED, "budget", on_cpu(), with(on_cpu(), "plugin.offload_cpu.budget_bytes=4096")},
      through_fault("commit", "optimizer", "optim_adamw", "layout"),
      through_fault("commit", "device", "device_host", "alloc"),
      through_fault("commit", "offload_cpu", "offload_cpu", "alloc"),
      through_fault("save", "checkpoint", "checkpoint", "open"),
  };
  Case streams = through_fault("commit", "device", "gpu_sim", "stream_create");
  for (Trial* t : {&streams.fine, &streams.fails}) {
    t->gpu = "gpu_sim";
    t->offload_optimizer = "none";
  }
  all.push_back(streams);
  if (std::filesystem::exists(STRATA_BUILD_PLUGIN_DIR "/offload_nvme.toml")) {
    const std::string path = "zero_optimization.offload_optimizer.nvme_path=";
    const Trial on_disk = {
        .stage = 2, .offload_optimizer = "nvme", .manifest_extra = "[plugin.offload_nvme]\nprobe_ms = 0\n"};
    all.push_back({"open", STRATA_NOT_FOUND, "/no/such/disk", with(on_disk, path + "\"" STRATA_BUILD_DIR "\""),
                   with(on_disk, path + "\"/no/such/disk\"")});
  }
  return all;
}

TEST(StartFailure, OfOneRankIsHeardByAllWithItsCause) {
  for (const auto& [world, failing] : {std::pair{2, 1}, {3, 0}, {3, 2}}) {
    for (const Case& c : cases()) {
      SCOPED_TRACE(testing::Message() << c.cause << ", on rank " << failing << " of " << world);
      const DiskDir root;
      const auto trial_of = [&, failing = failing](int rank) { return rank == failing ? c.fails : c.fine; };
      for (const Heard& h : start_ranks(world, trial_of, root.path)) {
        EXPECT_EQ(h.call, c.call) << h.text;
        EXPECT_EQ(h.code, c.code) << h.text;
        EXPECT_TRUE(h.has("it failed on rank " + std::to_string(failing) + ": ") && h.has(c.cause)) << h.text;
      }
    }
  }
}

// Its data-parallel group is not all that waits for it.
TEST(StartFailure, OfOneRankIsHeardByAllPartsOfTheModel) {
  Trial fine;
  fine.overrides = {"tensor_model_parallel_size=2", "plugins.offload_cpu=offload_cpu"};
  fine.stage = 2;
  fine.offload_optimizer = "cpu";
  for (const char* wrong : {"train_batch_size=7", "plugins.offload_cpu=nowhere", "host_memory_limit=100000"}) {
    const std::string key = std::string(wrong).substr(0, std::string(wrong).find('='));
    const auto trial_of = [&](int rank) { return rank == 3 ? with(fine, wrong) : fine; };
    const std::vector<Heard> heard = start_ranks(4, trial_of);
    for (const Heard& h : heard) {
      EXPECT_EQ(h.code, heard[3].code) << h.text;
      EXPECT_TRUE(h.has("it failed on rank 3: ") && h.has(key)) << h.text;
    }
  }
}

TEST(StartFailure, WhereRanksPlanDifferentlyAllHearWhoAndWhat) {
  for (int world : {2, 3}) {
    const auto trial_of = [&](int rank) {
      return rank == 1 ? with(on_cpu(), "zero_optimization.reduce_bucket_size=4000") : on_cpu();
    };
    for (const Heard& h : start_ranks(world, trial_of)) {
      EXPECT_EQ(h.call + " " + std::to_string(h.code), "commit " + std::to_string(STRATA_FAILED_PRECONDITION));
      EXPECT_TRUE(h.has("zero_optimization.reduce_bucket_size: rank 1 differs from rank 0")) << h.text;
    }
  }
}

// All go by the first; a rank with another cause says that one, too.
TEST(StartFailure, OfSeveralRanksHasOneCode) {
  const auto trial_of = [](int rank) {
    return with(on_cpu(), rank == 0   ? "threads=1"
                          : rank == 1 ? "plugins.offload_cpu=nowhere"
                                      : "plugin.offload_cpu.budget_bytes=-1");
  };
  const std::vector<Heard> heard = start_ranks(3, trial_of);
  for (const Heard& h : heard) {
    EXPECT_EQ(h.code, STRATA_NOT_FOUND) << h.text;
    EXPECT_TRUE(
        h.has("it failed on rank 1, 2: override plugins.offload_cpu=nowhere: `plugins.offload_cpu`: plugin nowhere was "
              "not found"))
        << h.text;
    EXPECT_EQ(h.has("; here: "), &h == &heard[2]) << h.text;
    EXPECT_EQ(h.has("budget_bytes"), &h == &heard[2]) << h.text;
  }
}

TEST(StartFailure, OfAllRanksIsSaidOnce) {
  for (const Heard& h : start_ranks(3, [](int) { return with(on_cpu(), "plugin.offload_cpu.budget_bytes=-1"); })) {
    EXPECT_EQ(h.code, STRATA_INVALID_ARGUMENT) << h.text;
    EXPECT_TRUE(h.has("it failed on all 3 ranks: ")) << h.text;
    EXPECT_EQ(h.text.find("budget_bytes"), h.text.rfind("budget_bytes")) << h.text;
  }
}

// Whatever it has in it. The rank that failed has all of it.
TEST(StartFailure, ACauseIsShortAndPrintableElsewhere) {
  std::string long_name;
  while (long_name.size() < 2000) long_name += "é";
  for (int shift = 0; shift < 2; ++shift) {  // where it is cut a character begins, or not
    const std::string name = "/" + std::string(static_cast<size_t>(shift), 'x') + "\\u001b[31m\\u0007" + long_name;
    const auto trial_of = [&](int rank) {
      return rank == 1 ? with(on_cpu(), "plugins.offload_cpu=\"" + name + "\"") : on_cpu();
    };
    const std::vector<Heard> heard = start_ranks(2, trial_of);
    EXPECT_TRUE(heard[1].has(long_name)) << heard[1].text;
    const std::string& text = heard[0].text;
    EXPECT_TRUE(heard[0].has("it failed on rank 1: ") && heard[0].has("\\x1b[31m\\x07éé")) << text;
    EXPECT_LT(text.size(), 1100u);
    EXPECT_TRUE(heard[0].has(heard[1].text.substr(heard[1].text.size() - 25))) << text;  // why, after all that
    std::string rest = text;
    for (size_t at = 0; (at = rest.find("é", at)) != std::string::npos;) rest.erase(at, 2);
    EXPECT_TRUE(std::all_of(rest.begin(), rest.end(), [](char c) { return c >= ' ' && c < 0x7F; })) << text;
  }
}

// The call that fails is the one by which ranks tell each other. Each of them fails once, with and without a cause to
// be told.
TEST(StartFailure, OfAnExchangeEndsAllRanks) {
  const char* const kNowhere = "plugins.offload_cpu=nowhere";
  for (int world : {2, 3}) {
    for (const std::string wrong : {"", kNowhere, "host_memory_limit=100000"}) {
      int failed = 0;
      for (bool all_went_well = false; !all_went_well; ++failed) {
        ASSERT_LT(failed, 20);
        const std::string rule = "collective.exchange:" + std::to_string(failed + 1) + ":fail=DATA_LOSS";
        SCOPED_TRACE(testing::Message() << rule << ", world " << world << ", " << wrong);
        const auto trial_of = [&](int rank) {
          const Trial t = through_fault(on_cpu(), "collective", "comm_local", rank == 1 ? rule : "");
          return rank == 1 && !wrong.empty() ? with(t, wrong) : t;
        };
        const std::vector<Heard> heard = start_ranks(world, trial_of);
        all_went_well = !heard[1].has("fails with DATA_LOSS");
        for (const Heard& h : heard) {
          if (all_went_well) {  // in telling each other
            EXPECT_EQ(h.has("it failed on rank 1: "), !wrong.empty()) << h.text;
            continue;
          }
          EXPECT_NE(h.code, STRATA_OK);
          EXPECT_NE(h.code, STRATA_DEADLINE_EXCEEDED) << h.text;
          EXPECT_TRUE(h.has("rank 1") || &h == &heard[1]) << h.text;
          EXPECT_TRUE(h.has("fails with DATA_LOSS")) << h.text;
        }
        // The rank has a cause of its own from the second exchange on.
        EXPECT_TRUE(wrong != kNowhere || failed == 0 || heard[1].has("plugin nowhere was not found")) << heard[1].text;
      }
      EXPECT_GE(failed, wrong.empty() ? 5 : 3);
    }
  }
}

TEST(StartFailure, OfASplitEndsAllRanks) {
  Trial fine = {.stage = 2};
  fine.overrides = {"tensor_model_parallel_size=2"};
  const auto trial_of = [&](int rank) {
    return through_fault(fine, "collective", "comm_local", rank == 1 ? "split:1:fail=DATA_LOSS" : "");
  };
  for (const Heard& h : start_ranks(4, trial_of)) {
    EXPECT_EQ(h.call, "open");
    EXPECT_NE(h.code, STRATA_DEADLINE_EXCEEDED) << h.text;
    EXPECT_TRUE(h.has("fails with DATA_LOSS")) << h.text;
  }
}

// A rank that never comes cannot say why, but which one it is can be told.
TEST(StartFailure, BeforeRanksHaveMetEndsAtTheDeadline) {
  for (const std::string wrong : {"stage", "collective"}) {
    const auto trial_of = [&](int rank) {
      Trial t = on_cpu();
      if (wrong == "stage" && rank == 1) t.overrides.push_back("zero_optimization.stage=4");
      if (wrong == "collective") {
        t = through_fault(t, "collective", "comm_local", rank == 1 ? "collective.open:1:fail=DATA_LOSS" : "");
      }
      return with(t, "deadline_seconds=0.5");
    };
    const std::vector<Heard> heard = start_ranks(3, trial_of);
    EXPECT_TRUE(heard[1].has(wrong == "stage" ? "zero_optimization.stage" : "fails with DATA_LOSS")) << heard[1].text;
    for (int rank : {0, 2}) {
      const Heard& h = heard[static_cast<size_t>(rank)];
      EXPECT_EQ(h.code, STRATA_DEADLINE_EXCEEDED) << h.text;
      EXPECT_TRUE(h.has("rank 1")) << h.text;
    }
  }
}

// Long before: at a tenth of the deadline, or after 5 seconds. A rank is not left wondering.
TEST(StartFailure, WhoWaitsForOthersSaysSo) {
  std::mutex mutex;
  std::string said;
  Trial t = with(with(on_cpu(), "deadline_seconds=1"), "log_level=info");
  t.world = 2;
  t.log = [&](strata_log_level, const std::string& line) {
    const std::lock_guard lock(mutex);
    said += line + "\n";
  };
  std::string error;
  EXPECT_EQ(open_rank(t, "start-failure-lonely", 0, &error), nullptr);
  EXPECT_NE(error.find("rank 1 never came"), std::string::npos) << error;
  EXPECT_NE(said.find("waits for other ranks, up to 1 s (deadline_seconds)"), std::string::npos) << said;
}

// Each by its key; nobody looks for it in the model.
TEST(StartFailure, SettingsThatDifferAreNamedByTheirKey) {
  for (const std::string key :
       {"optimizer.params.lr", "optimizer.params.weight_decay", "train_micro_batch_size_per_gpu"}) {
    const auto trial_of = [&](int rank) { return rank == 1 ? with(on_cpu(), key + "=3") : on_cpu(); };
    for (const Heard& h : start_ranks(2, trial_of)) {
      EXPECT_EQ(h.code, STRATA_FAILED_PRECONDITION) << h.text;
      EXPECT_TRUE(h.has("rank 1 differs from rank 0; all ranks need the same")) << h.text;
      EXPECT_TRUE(h.has(key) || h.has("train_batch_size")) << h.text;
    }
  }
}

// The next save tries again, on all ranks.
TEST(StartFailure, OfTheCheckpointPluginIsHeardAtEverySave) {
  const DiskDir root;
  std::vector<std::thread> ranks;
  ::alarm(kUnlessItHangs);
  for (int r = 0; r < 2; ++r) {
    ranks.emplace_back([&, r] {
      Trial t = through_fault(on_cpu(), "checkpoint", "checkpoint", r == 1 ? "open:1:fail=DATA_LOSS" : "");
      t.world = 2;
      std::string error;
      strata_engine* e = open_rank(t, "start-failure-checkpoint", r, &error);
      ASSERT_TRUE(e) << error;
      EXPECT_EQ(start(e, root.path).code, STRATA_DATA_LOSS);
      EXPECT_EQ(strata_save(e, root.path.c_str(), "second"), STRATA_DATA_LOSS) << last();
      EXPECT_TRUE(says("it failed on rank 1: ") && says("fails with DATA_LOSS")) << last();
      strata_close(e);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  ::alarm(0);
}

}  // namespace
}  // namespace strata::test
