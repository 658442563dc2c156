// A system that fails one of two ranks in the middle of a step: both say which bytes of which file, nothing waits for
// ever, and the last checkpoint leads to the bits that the run would have had. Rank 1's tier is a copy of offload_nvme
// with calls that obey faulty_calls.h; rank 0's is the real one.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <barrier>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "tests/conformance_offload/faulty_calls.h"
#include "tests/support/disk_dirs.h"
#include "tests/train/by_hand.h"
#include "tests/train/gates.h"
#include "tests/train/harness.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
namespace fs = std::filesystem;

const std::string kState = "zero_optimization.offload_optimizer.", kParam = "zero_optimization.offload_param.";

// Those of the copy, which stays loaded.
Faults& disk_faults() {
  static Faults* const all = [] {
    void* const library = ::dlopen(STRATA_FAULTY_NVME ".so", RTLD_NOW | RTLD_LOCAL);
    void* const get = library ? ::dlsym(library, "strata_test_faults") : nullptr;
    if (!get) ADD_FAILURE() << ::dlerror();
    return get ? reinterpret_cast<Faults* (*)()>(get)() : nullptr;
  }();
  return *all;
}

class NvmeFaultsInAStep : public testing::TestWithParam<std::string> {
 protected:
  using Errors = std::array<std::string, 2>;
  using Body = std::function<std::string(int rank, strata_engine*)>;  // an empty text: all went well

  NvmeFaultsInAStep() { disk_faults().clear(); }
  ~NvmeFaultsInAStep() override { disk_faults().clear(); }

  Trial trial(bool params, const std::string& deadline = "20") const {
    Trial t;
    t.world = 2;
    t.stage = 3;
    t.overrides = {"deadline_seconds=" + deadline, "zero_optimization.param_persistence_threshold=50",
                   kState + "nvme_path=\"" + disk.path + "\"", kState + "buffer_size=2048"};
    t.offload_optimizer = "nvme";
    if (params) {
      for (const char* text : {"device=nvme", "max_in_cpu=0", "buffer_size=2048"}) t.overrides.push_back(kParam + text);
      t.overrides.push_back(kParam + "nvme_path=\"" + disk.path + "\"");
    }
    t.manifest_extra = "[plugin.offload_nvme]\nprobe_ms = 0\nio = \"" + GetParam() + "\"\n";
    return t;
  }

  // Both ranks of a built model through `body`; their first errors.
  static Errors run_both(const Trial& t, const Body& body, std::array<Result, 2>* results = nullptr) {
    static std::atomic<int> serial{0};
    const std::string job = "faults-" + std::to_string(serial++);
    Trial faulty = t;
    faulty.overrides.push_back("plugins.offload_nvme=\"" STRATA_FAULTY_NVME ".toml\"");
    Errors errors;
    std::vector<std::thread> ranks;
    for (int r = 0; r < 2; ++r) {
      ranks.emplace_back([&, r] {
        std::string& error = errors[static_cast<size_t>(r)];
        strata_engine* const engine = open_rank(r == 1 ? faulty : t, job, r, &error);
        if (!engine) return;
        error = build_model(engine, t.model);
        if (error.empty()) error = body(r, engine);
        if (error.empty() && results) error = collect(engine, t.model, &results->at(static_cast<size_t>(r)));
        strata_close(engine);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    return errors;
  }

  // Steps of which each is over when the next begins, and in the end the memory of what it fetched is free.
  static std::string steps(const Trial& t, int rank, strata_engine* e, int first, int last) {
    for (int step = first; step <= last; ++step) {
      const std::string error = micro_batch(e, t.model, step, 0, rank, UINT32_MAX);
      if (!error.empty()) return error;
      if (strata_step(e, nullptr) != STRATA_OK || strata_wait(e) != STRATA_OK) return strata_last_error();
    }
    return "";
  }

  std::string no_ring() const {
    if (GetParam() == "threads") return "";
    const Errors errors = run_both(trial(false), [](int, strata_engine*) { return ""; });
    return errors[0].find("io_uring") == std::string::npos ? "" : errors[0];
  }

  // With all ranks at this place rank 1's disk answers no read, or no write, any more.
  static void hang_from_here(std::barrier<>& both, int rank, bool write) {
    both.arrive_and_wait();
    if (rank == 1) (write ? disk_faults().hang_writes : disk_faults().hang_reads) = true;
    both.arrive_and_wait();
  }

  // False, and the disk answers again, where it would not end by itself.
  static bool ends(const std::function<void()>& what) {
    const bool in_time = returns(what, std::chrono::seconds(60), [] { disk_faults().clear(); });
    EXPECT_TRUE(in_time);
    return in_time;
  }

  void link_segments(const std::string& to) const {
    int n = 0;
    for (const auto& entry : fs::recursive_directory_iterator(disk.path)) {
      if (entry.path().filename().string().rfind("segment-", 0) == 0) {
        fs::create_hard_link(entry.path(), to + "/" + std::to_string(n++));
      }
    }
    EXPECT_GT(n, 0);
  }

  DiskDir disk, root;
};

// From a moment on rank 1's disk answers no read, or no write, any more.
TEST_P(NvmeFaultsInAStep, ADiskThatIsStuckIsNamedOnBothRanks) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  struct Stuck {
    bool write, params;
  };
  for (const auto [write, params] : {Stuck{false, false}, {true, false}, {false, true}, {true, true}}) {
    disk_faults().clear();
    Trial t = trial(params, "6");
    // With the state in memory, what is on disk are params: read by fetches, written by the update.
    if (params) t.overrides.push_back(kState + "cpu_state_budget=1000000000");
    std::barrier both(2);
    const Errors errors = run_both(t, [&](int rank, strata_engine* e) {
      std::string error = steps(t, rank, e, 1, 2);
      hang_from_here(both, rank, write);
      return error.empty() ? steps(t, rank, e, 3, 5) : error;
    });
    const std::string what = write ? "write" : "read", path = disk.path + "/strata-[^ ]*-r1-[^ ]*/segment-[0-9]+";
    const std::string where = what + " " + path + ", [0-9]+ bytes at [0-9]+, 0 moved: the disk did not answer within";
    const auto names_it = AllOf(ContainsRegex(where),
                                ContainsRegex("\"[^\"]*(weights of|exp_avg|master)[^\"]*\", [0-9]+ bytes at offset"),
                                HasSubstr("unit \""));
    EXPECT_THAT(errors[0], AllOf(names_it, HasSubstr("rank 1: "))) << what << params;
    EXPECT_THAT(errors[1], names_it) << what << params;
    if (!write && params) {
      EXPECT_THAT(errors[1], HasSubstr("gather of unit")) << "a fetch, and not the update";
    }
  }
}

// A disk may answer when nobody waits any more, and the engines are gone: what it then moves has its memory yet. Parts
// and shards are of 1 MiB and more, which are mapped, so that a call finds none where they are freed.
class NvmeLate : public NvmeFaultsInAStep {};

TEST_P(NvmeLate, WhatADiskAnswersHasItsMemory) {
  struct Stuck {
    bool write, params, save;
  };
  for (const auto [write, params, save] : {Stuck{false, false, false},
                                           {true, false, false},
                                           {false, true, false},
                                           {true, true, false},
                                           {false, false, true},
                                           {false, true, true}}) {
    disk_faults().clear();
    Trial t = trial(params, "6");
    t.model = vectors({1 << 20, 1 << 20, 1 << 20}, STRATA_BF16);
    t.overrides.push_back(kState + "buffer_size=1000000");
    if (params) t.overrides.push_back(kParam + "buffer_size=1000000");
    if (params) t.overrides.push_back(kState + "cpu_state_budget=1000000000");
    std::barrier both(2);
    const Errors errors = run_both(t, [&](int rank, strata_engine* e) {
      std::string error = steps(t, rank, e, 1, 1);
      hang_from_here(both, rank, write);
      if (error.empty() && !save) error = steps(t, rank, e, 2, 3);
      if (error.empty() && strata_save(e, root.path.c_str(), "late") != STRATA_OK) error = strata_last_error();
      return error;
    });
    const std::string what = testing::PrintToString(std::array{write, params, save});
    EXPECT_THAT(errors[1], HasSubstr("the disk did not answer within")) << what;
    disk_faults().hang(false);
    EXPECT_TRUE(eventually([] { return disk_faults().have_ended(); })) << what;
    EXPECT_EQ(disk_faults().lost, 0u) << what;
  }
}

strata_counters counters_of(strata_engine* e) {
  strata_counters counters{};
  STRATA_INIT(&counters);
  EXPECT_EQ(strata_get_counters(e, STRATA_COUNT_TOTAL, &counters), STRATA_OK);
  return counters;
}

// Two ranks share a path. What rank 1 has on its way stands still: rank 0 reads and writes all of its own meanwhile.
// Afterwards both have moved what the formula says, and the run has the bits of one without a pause.
TEST_P(NvmeFaultsInAStep, RanksOnOnePathDoNotWaitForEachOther) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  constexpr uint64_t kEach = 1 << 15, kUnits = 4, kStep = kUnits * kEach / 2 * 12;  // bytes of a rank, each way
  constexpr int kSteps = 4;
  Trial t = trial(false, "240");
  t.model = vectors(std::vector<int64_t>(kUnits, kEach), STRATA_BF16);
  std::array<Result, 2> right, results;
  const auto undisturbed = [&](int rank, strata_engine* e) { return steps(t, rank, e, 1, kSteps); };
  ASSERT_EQ(run_both(t, undisturbed, &right), Errors());
  std::barrier both(2);
  const auto body = [&](int rank, strata_engine* e) {
    std::string error = steps(t, rank, e, 1, 1);
    const strata_counters before = counters_of(e);
    if (rank == 1) disk_faults().hang(true);
    both.arrive_and_wait();
    if (error.empty()) error = micro_batch(e, t.model, 2, 0, rank, UINT32_MAX);
    if (error.empty() && strata_step(e, nullptr) != STRATA_OK) error = strata_last_error();
    if (rank == 0) {
      EXPECT_TRUE(eventually([&] { return counters_of(e).tier_write[2] - before.tier_write[2] == kStep; }))
          << counters_of(e).tier_write[2] - before.tier_write[2] << " of " << kStep;
    }
    both.arrive_and_wait();
    if (rank == 1) {
      EXPECT_EQ(counters_of(e).tier_write[2], before.tier_write[2]) << "its first read is still under way";
      disk_faults().hang(false);
    }
    if (error.empty() && strata_wait(e) != STRATA_OK) error = strata_last_error();
    if (error.empty()) error = steps(t, rank, e, 3, kSteps);
    const strata_counters after = counters_of(e);
    EXPECT_EQ(after.tier_read[2] - before.tier_read[2], (kSteps - 1) * kStep) << rank;
    EXPECT_EQ(after.tier_write[2] - before.tier_write[2], (kSteps - 1) * kStep) << rank;
    return error;
  };
  EXPECT_EQ(run_both(t, body, &results), Errors());
  EXPECT_TRUE(results == right);
  EXPECT_EQ(disk.entries(), 0u);
}

// Rank 1's disk does not answer when the engines close: both close, and the log says which call of which file it was.
TEST_P(NvmeFaultsInAStep, ACloseThatADiskDoesNotAnswerEnds) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  Trial t = trial(false, "6");
  std::mutex mutex;
  std::string log;
  t.log = [&](strata_log_level, const std::string& line) {
    std::lock_guard lock(mutex);
    log += line + "\n";
  };
  const bool in_time = ends([&] {
    EXPECT_EQ(run_both(t,
                       [&](int rank, strata_engine* e) {
                         const std::string error = steps(t, rank, e, 1, 2);
                         if (rank == 1) disk_faults().hold("unlink");
                         return error;
                       }),
              Errors());
  });
  if (in_time) {
    EXPECT_EQ(disk.entries(), 1u);
    EXPECT_THAT(log, ContainsRegex("unlink of " + disk.path +
                                   "/strata-[^ ]*-r1-[^ ]*/segment-0: the disk did not "
                                   "answer within 3.000 s"));
  }
  const auto has_segment = [&] {
    for (const auto& entry : fs::directory_iterator(disk.path)) {
      if (fs::exists(entry.path() / "segment-0")) return true;
    }
    return false;
  };
  disk_faults().clear();
  EXPECT_TRUE(eventually([&] { return !has_segment(); })) << "it answers late";
}

// Nor does it when linked segments are to be left for fresh ones: the step fails, on both ranks, with call and file.
TEST_P(NvmeFaultsInAStep, AMoveThatADiskDoesNotAnswerIsNamedOnBothRanks) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  DiskDir links;
  const Trial t = trial(false, "6");
  std::barrier both(2);
  Errors errors;
  ends([&] {
    errors = run_both(t, [&](int rank, strata_engine* e) {
      const std::string error = steps(t, rank, e, 1, 2);
      both.arrive_and_wait();
      if (rank == 1) {
        link_segments(links.path);
        disk_faults().hold("fallocate");
      }
      both.arrive_and_wait();
      return error.empty() ? steps(t, rank, e, 3, 4) : error;
    });
  });
  disk_faults().clear();
  const auto names_it = AllOf(ContainsRegex("fallocate of " + disk.path +
                                            "/strata-[^ ]*-r1-[^ ]*/segment-[0-9]+: the "
                                            "disk did not answer within 3.000 s"),
                              HasSubstr("unit \""));
  EXPECT_THAT(errors[0], AllOf(names_it, HasSubstr("rank 1: ")));
  EXPECT_THAT(errors[1], names_it);
}

std::map<std::string, std::string> contents(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path()] = std::string(std::istreambuf_iterator<char>(file), {});
  }
  return files;
}

// Two steps behind a checkpoint, with all segments linked, so that their writes make files and remove some: each call
// of the tier fails once.
class EachCallOfAStep : public NvmeFaultsInAStep {
 protected:
  struct Outcome {
    Errors errors;
    std::array<Result, 2> results;
  };
  static constexpr int kSaved = 2, kLast = 4;

  // `break_it` is called when the checkpoint is there.
  Outcome live(const Trial& t, const std::function<void()>& break_it) {
    DiskDir links;
    fs::remove_all(root.path + "/kept");
    std::barrier both(2);
    Outcome outcome;
    outcome.errors = run_both(
        t,
        [&](int rank, strata_engine* e) {
          std::string error = steps(t, rank, e, 1, kSaved);
          if (error.empty() && strata_save(e, root.path.c_str(), "kept") != STRATA_OK) error = strata_last_error();
          both.arrive_and_wait();
          if (rank == 1) {
            link_segments(links.path);
            saved_ = contents(root.path);
            break_it();
          }
          both.arrive_and_wait();
          if (error.empty()) error = steps(t, rank, e, kSaved + 1, kLast);
          if (rank == 1) counts_ = disk_faults().counts();
          return error;
        },
        &outcome.results);
    EXPECT_TRUE(contents(root.path) == saved_) << "the checkpoint was touched";
    EXPECT_EQ(disk.entries(), 0u) << "something is left";
    return outcome;
  }
  std::array<Result, 2> restart(const Trial& t) {
    std::array<Result, 2> results;
    const auto go_on = [&](int rank, strata_engine* e) {
      if (strata_load(e, root.path.c_str(), "kept") != STRATA_OK) return last();
      return steps(t, rank, e, kSaved + 1, kLast);
    };
    EXPECT_EQ(run_both(t, go_on, &results), Errors());
    return results;
  }
  std::map<std::string, std::string> saved_;
  std::map<std::string, int> counts_;  // of the steps
};

TEST_P(EachCallOfAStep, FailsOnceAndBothRanksSayWhich) {
  if (const std::string why = no_ring(); !why.empty()) GTEST_SKIP() << why;
  Trial t = trial(true);
  std::mutex mutex;
  std::string log;
  t.log = [&](strata_log_level, const std::string& line) {
    std::lock_guard lock(mutex);
    log += line + "\n";
  };
  const Outcome right = live(t, [] { disk_faults().clear(); });
  ASSERT_EQ(right.errors, Errors());
  const std::map<std::string, int> counts = counts_;
  // Without these the step goes on, in another way or by trying again.
  const std::set<std::string> dispensable = {"fstat", "update_file", "submit", "peek", "wait", "unlink"};
  std::set<std::string> told;
  for (const auto& [call, count] : counts) {
    for (int n = 1; n <= count; n += 1 + count / 4) {
      disk_faults().clear();
      log.clear();
      const Outcome outcome = live(t, [&call = call, n] {
        disk_faults().clear();
        disk_faults().fail(call, n, EIO);
      });
      const std::string what = call + " " + std::to_string(n) + " of " + std::to_string(count);
      const bool fired = disk_faults().has_fired();
      disk_faults().clear();
      if (fired && call == "unlink") {
        EXPECT_THAT(log, HasSubstr("could not be removed")) << what;
      }
      if (outcome.errors == Errors()) {
        EXPECT_TRUE(!fired || dispensable.count(call)) << what << ": nobody was told";
        EXPECT_TRUE(outcome.results == right.results) << what;
        continue;
      }
      told.insert(call);
      const auto names_it = AllOf(ContainsRegex("\"[^\"]+/[^\"]+\"|\"weights of [^\"]+\""),  // the unit's array
                                  ContainsRegex(disk.path + "/strata-[^ ]*-r1-[^ ]*/segment-[0-9]+"),
                                  HasSubstr(std::strerror(EIO)), HasSubstr(" bytes"));
      EXPECT_THAT(outcome.errors[0], AllOf(names_it, HasSubstr("rank 1: "))) << what;
      EXPECT_THAT(outcome.errors[1], names_it) << what;
      EXPECT_TRUE(restart(t) == right.results) << what;
    }
  }
  for (const char* call : {"open", "fallocate"}) EXPECT_TRUE(told.count(call)) << call;
  for (const char* call : {"pread", "pwrite"}) EXPECT_EQ(told.count(call), GetParam() == "threads") << call;
  for (const char* call : {"completion", "eventfd_write"}) EXPECT_EQ(told.count(call), GetParam() != "threads") << call;
  EXPECT_TRUE(counts.count("unlink") && counts.count("fstat"));
}

INSTANTIATE_TEST_SUITE_P(Io, EachCallOfAStep, testing::Values("io_uring", "threads"),
                         [](const auto& tested) { return tested.param; });
// A ring's kernel has moved the bytes when the test holds back that it did.
INSTANTIATE_TEST_SUITE_P(Io, NvmeLate, testing::Values("threads"), [](const auto& tested) { return tested.param; });
INSTANTIATE_TEST_SUITE_P(Io, NvmeFaultsInAStep, testing::Values("io_uring", "threads"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace strata::test
