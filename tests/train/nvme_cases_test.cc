// What went wrong with state on disk elsewhere, as runs of the engine: checkpoints of such a run, a disk that is too
// small or is filled by others, files that somebody links.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "tests/support/disk_dirs.h"
#include "tests/train/harness.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr uint64_t kMiB = 1 << 20;

Trial trial(int stage, const std::string& tier, const std::string& nvme_path = "") {
  const std::string state = "zero_optimization.offload_optimizer.";
  Trial t;
  t.world = 2;
  t.stage = stage;
  t.clip = 0.05;
  if (stage == 3) t.overrides = {"zero_optimization.param_persistence_threshold=50"};
  if (tier == "cpu") t.offload_optimizer = tier;
  if (tier == "nvme") {
    t.overrides.push_back(state + "device=nvme");
    t.overrides.push_back(state + "nvme_path=\"" + nvme_path + "\"");
    t.manifest_extra = "[plugin.offload_nvme]\nprobe_ms = 0\n";
  }
  return t;
}

std::string call(strata_status status) { return status == STRATA_OK ? "" : strata_last_error(); }

std::string steps(strata_engine* e, const Trial& t, int rank, int first, int last) {
  for (int step = first; step <= last; ++step) {
    const std::string error = micro_batch(e, t.model, step, 0, rank, UINT32_MAX);
    if (!error.empty()) return error;
    if (strata_step(e, nullptr) != STRATA_OK) return strata_last_error();
  }
  return "";
}

// Runs `body` on every rank of a built model; all arrays at its end, of rank 0.
Result run_on(Trial t, const std::function<std::string(int, strata_engine*)>& body) {
  Result result;
  t.body = [&](int rank, strata_engine* e) {
    std::string error = build_model(e, t.model);
    if (error.empty()) error = body(rank, e);
    Result mine;
    if (error.empty()) error = collect(e, t.model, &mine);
    EXPECT_EQ(error, "") << "rank " << rank;
    if (rank == 0) result = mine;
  };
  EXPECT_EQ(run(t).error, "");
  return result;
}

// Saving does not disturb what lies on disk; what was saved is what a run in host memory saves, and loads anywhere.
TEST(NvmeCases, CheckpointsOfARunOnDisk) {
  for (const int stage : {2, 3}) {
    DiskDir disk, root, plain_root;
    const Trial on_disk = trial(stage, "nvme", disk.path), in_memory = trial(stage, "cpu");
    const Result through =
        run_on(in_memory, [&](int rank, strata_engine* e) { return steps(e, in_memory, rank, 1, 5); });
    const Result saving = run_on(on_disk, [&](int rank, strata_engine* e) {
      const auto save = [&](const char* tag) { return call(strata_save(e, root.path.c_str(), tag)); };
      std::string error = steps(e, on_disk, rank, 1, 2);
      if (error.empty()) error = save("a");
      if (error.empty()) error = steps(e, on_disk, rank, 3, 3);
      // The same tag again: refused on all ranks, without harm.
      EXPECT_EQ(strata_save(e, root.path.c_str(), "a"), STRATA_ALREADY_EXISTS) << "rank " << rank;
      if (error.empty()) error = save("b");
      return error.empty() ? steps(e, on_disk, rank, 4, 5) : error;
    });
    EXPECT_TRUE(saving == through) << "saves disturbed the run";
    run_on(in_memory, [&](int rank, strata_engine* e) {
      const auto save = [&](const char* tag) { return call(strata_save(e, plain_root.path.c_str(), tag)); };
      std::string error = steps(e, in_memory, rank, 1, 2);
      if (error.empty()) error = save("a");
      if (error.empty()) error = steps(e, in_memory, rank, 3, 3);
      return error.empty() ? save("b") : error;
    });
    const auto load = [&](const Trial& t, const DiskDir& from, const char* tag) {
      return run_on(t, [&](int, strata_engine* e) { return call(strata_load(e, from.path.c_str(), tag)); });
    };
    for (const char* tag : {"a", "b"}) {
      const Result right = load(in_memory, plain_root, tag);
      EXPECT_TRUE(load(in_memory, root, tag) == right) << tag << ", saved from disk";
      EXPECT_TRUE(load(on_disk, root, tag) == right) << tag << ", from disk to disk";
      EXPECT_TRUE(load(on_disk, plain_root, tag) == right) << tag << ", loaded to disk";
    }
    const Result resumed = run_on(on_disk, [&](int rank, strata_engine* e) {
      const std::string error = call(strata_load(e, root.path.c_str(), "b"));
      return error.empty() ? steps(e, on_disk, rank, 4, 5) : error;
    });
    EXPECT_TRUE(resumed == through);
    EXPECT_EQ(disk.entries(), 0u);
  }
}

// Files that somebody links in the middle of steps, as a checkpoint does, keep the bytes they had; the run goes on.
TEST(NvmeCases, LinkedFilesKeepTheirBytesAndTheRunItsOwn) {
  const auto content = [](const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  for (const int stage : {2, 3}) {
    DiskDir disk, kept;
    Trial plain = trial(stage, "cpu"), t = trial(stage, "nvme", disk.path);
    const std::string params = "zero_optimization.offload_param.";
    if (stage == 3) {
      t.overrides.insert(t.overrides.end(),
                         {params + "device=nvme", params + "nvme_path=\"" + disk.path + "\"", params + "max_in_cpu=0"});
    }
    plain.world = t.world = 1;
    const Result right = run_on(plain, [&](int rank, strata_engine* e) { return steps(e, plain, rank, 1, 6); });
    std::map<std::string, std::string> held;
    const auto link_all = [&] {
      for (const auto& entry : fs::recursive_directory_iterator(disk.path)) {
        if (entry.path().filename().string().rfind("segment-", 0) != 0) continue;
        const std::string link = kept.path + "/" + std::to_string(held.size());
        fs::create_hard_link(entry.path(), link);
        held[link] = content(link);
      }
    };
    const Result linked = run_on(t, [&](int rank, strata_engine* e) {
      std::string error;
      for (int step = 1; step <= 6 && error.empty(); ++step) {
        error = micro_batch(e, t.model, step, 0, rank, UINT32_MAX);
        if (error.empty() && step % 2 == 0) {
          // Whoever reads state waits until the last update has written its own; the next has not begun.
          Result read;
          error = collect(e, t.model, &read);
          link_all();
        }
        if (error.empty()) error = call(strata_step(e, nullptr));
      }
      return error;
    });
    EXPECT_TRUE(linked == right) << stage;
    EXPECT_GT(held.size(), 2u);
    for (const auto& [link, bytes] : held) {
      EXPECT_TRUE(content(link) == bytes) << link;
      EXPECT_EQ(fs::hard_link_count(link), 1u) << "let go";
    }
    EXPECT_EQ(disk.entries(), 0u);
  }
}

Model large_model() {
  Model m = odd_model();
  m.params[2].shape = {640, 970};  // some 7 MiB of state
  return m;
}

TEST(NvmeCases, ADiskThatIsTooSmallIsRefusedAtTheStart) {
  LoopFs disk(4, 512);
  if (!disk.missing.empty()) GTEST_SKIP() << disk.missing;
  Trial t = trial(2, "nvme", disk.path);
  t.model = large_model();
  std::string errors[2];
  t.body = [&](int rank, strata_engine* e) { errors[rank] = build_model(e, t.model); };
  EXPECT_EQ(run(t).error, "");
  for (const std::string& error : errors)
    EXPECT_THAT(error, AllOf(HasSubstr("commit"), HasSubstr("bytes"))) << errors[0];
  EXPECT_THAT(errors[0] + errors[1], HasSubstr("budget"));
  for (const auto& entry : fs::directory_iterator(disk.path)) EXPECT_EQ(entry.path().filename(), "lost+found");
}

// Space is taken at the start: whoever fills the disk later does not end the run.
TEST(NvmeCases, ADiskFilledByOthersDoesNotEndTheRun) {
  LoopFs disk(64, 512);
  if (!disk.missing.empty()) GTEST_SKIP() << disk.missing;
  Trial t = trial(2, "nvme", disk.path), plain = trial(2, "cpu");
  t.model = plain.model = large_model();
  const Result right = run_on(plain, [&](int rank, strata_engine* e) { return steps(e, plain, rank, 1, 5); });
  const Result filled = run_on(t, [&](int rank, strata_engine* e) {
    const std::string error = steps(e, t, rank, 1, 2);
    if (rank == 0) {
      std::ofstream other(disk.path + "/other", std::ios::binary);
      const std::vector<char> junk(kMiB);
      while (other.write(junk.data(), static_cast<std::streamsize>(junk.size())).flush()) {
      }
      EXPECT_LT(fs::space(disk.path).available, kMiB);
    }
    return error.empty() ? steps(e, t, rank, 3, 5) : error;
  });
  EXPECT_TRUE(filled == right);
}

}  // namespace
}  // namespace strata::test
