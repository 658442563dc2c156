// What went wrong with state on disk elsewhere, as runs of the engine: checkpoints of such a run, a disk that is too
// small or is filled by others, files that somebody links.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
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
const std::string kState = "zero_optimization.offload_optimizer.", kParam = "zero_optimization.offload_param.";

Trial trial(int stage, const std::string& tier, const std::string& nvme_path = "") {
  Trial t;
  t.world = 2;
  t.stage = stage;
  t.clip = 0.05;
  if (stage == 3) t.overrides = {"zero_optimization.param_persistence_threshold=50"};
  t.offload_optimizer = tier;
  if (tier == "nvme") {
    t.overrides.push_back(kState + "nvme_path=\"" + nvme_path + "\"");
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
      if (error.empty()) error = save("a");  // again, in place of the first
      if (error.empty()) error = save("b");
      return error.empty() ? steps(e, on_disk, rank, 4, 5) : error;
    });
    EXPECT_TRUE(saving == through) << "saves disturbed the run";
    run_on(in_memory, [&](int rank, strata_engine* e) {
      const auto save = [&](const char* tag) { return call(strata_save(e, plain_root.path.c_str(), tag)); };
      std::string error = steps(e, in_memory, rank, 1, 3);
      if (error.empty()) error = save("a");
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

Model large_model() {
  Model m = odd_model();
  m.params[2].shape = {640, 970};  // some 7 MiB of state
  return m;
}

// What a checkpointer does that keeps bytes without copying them: at a moment without writes it links every segment.
class Links {
 public:
  void take(const std::vector<std::string>& disks) {
    for (const std::string& disk : disks) {
      for (const fs::path& file : segments(disk)) {
        const std::string link = kept_.path + "/" + std::to_string(held_.size());
        fs::create_hard_link(file, link);
        held_[link] = content(link);
      }
    }
  }
  size_t count() const { return held_.size(); }
  bool unchanged() const {
    return std::all_of(held_.begin(), held_.end(), [](const auto& file) { return content(file.first) == file.second; });
  }
  // Files that the tier still has as well.
  size_t shared() const {
    return static_cast<size_t>(std::count_if(held_.begin(), held_.end(),
                                             [](const auto& file) { return fs::hard_link_count(file.first) > 1; }));
  }
  void remove() {
    for (const auto& [link, bytes] : held_) fs::remove(link);
    held_.clear();
  }

  static std::vector<fs::path> segments(const std::string& disk) {
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator(disk)) {
      if (entry.path().filename().string().rfind("segment-", 0) == 0) found.push_back(entry.path());
    }
    return found;
  }

 private:
  static std::string content(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  DiskDir kept_;
  std::map<std::string, std::string> held_;
};

const std::string kSmallSegments = "segment_bytes = 1048576\n";

struct Linking {
  const char* name;
  int stage, world;
  bool params;  // on disk, too
  std::vector<std::string> overrides = {};
  std::string options = "";  // of the plugin
  std::string gpu = "";
};

class LinkedFiles : public testing::TestWithParam<Linking> {
 protected:
  static constexpr int kSteps = 10, kLink = 2, kLinkAgain = 4, kRemove = 9;

  Trial plain() const {
    Trial t = trial(GetParam().stage, "cpu");
    t.world = GetParam().world;
    t.model = large_model();
    return t;
  }
  Trial on_disk() const {
    const Linking& p = GetParam();
    const std::string paths = "\"" + disks_[0] + ", " + disks_[1] + "\"";
    Trial t = trial(p.stage, "nvme", disks_[0] + ", " + disks_[1]);
    t.world = p.world;
    t.model = large_model();
    t.gpu = p.gpu;
    t.device_updates = !p.gpu.empty();
    if (p.params) {
      t.overrides.insert(t.overrides.end(), {kParam + "device=nvme", kParam + "nvme_path=" + paths});
    }
    t.overrides.insert(t.overrides.end(), p.overrides.begin(), p.overrides.end());
    t.manifest_extra += p.options;
    return t;
  }
  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const std::string& disk : disks_) {
      for (const fs::path& file : Links::segments(disk)) sum += fs::file_size(file);
    }
    return sum;
  }

  // Between the steps of rank 0, with the others waiting.
  void after(int step) {
    if (step == kLink) {
      at_first_ = bytes();
      first_.take(disks_);
      EXPECT_GT(first_.count(), GetParam().options.empty() ? 1u : 4u);
    } else if (step == kLinkAgain) {
      again_.take(disks_);
    } else if (step == kRemove) {
      EXPECT_TRUE(first_.unchanged() && again_.unchanged());
      EXPECT_EQ(first_.shared(), 0u) << "all of it was written since: the tier let it go";
      first_.remove();
      again_.remove();
    } else if (step == kSteps) {
      EXPECT_EQ(bytes(), at_first_) << "no spare space is left";
    }
  }

  DiskDir a_, b_;
  const std::vector<std::string> disks_ = {a_.path, b_.path};
  Links first_, again_;
  uint64_t at_first_ = 0;
};

TEST_P(LinkedFiles, KeepTheirBytesAndTheRunItsOwn) {
  const Trial reference = plain();
  const Result right =
      run_on(reference, [&](int rank, strata_engine* e) { return steps(e, reference, rank, 1, kSteps); });
  Trial t = on_disk();
  std::barrier all(t.world);
  Result linked;
  t.gpu_body = [&](int rank, strata_engine* e, Gpu* gpu) {
    std::string error = build_model(e, t.model);
    for (int step = 1; step <= kSteps; ++step) {
      if (error.empty()) error = micro_batch(e, t.model, step, 0, rank, UINT32_MAX, gpu);
      if (error.empty()) error = call(strata_step(e, nullptr));
      if (error.empty()) error = call(strata_wait(e));  // nothing is being written from here on
      all.arrive_and_wait();
      if (rank == 0) after(step);
      all.arrive_and_wait();
    }
    Result mine;
    if (error.empty()) error = collect(e, t.model, &mine);
    EXPECT_EQ(error, "") << "rank " << rank;
    if (rank == 0) linked = mine;
  };
  EXPECT_EQ(run(t).error, "");
  EXPECT_TRUE(linked == right);
  EXPECT_EQ(a_.entries() + b_.entries(), 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Places, LinkedFiles,
    testing::Values(
        Linking{"state", 2, 2, false}, Linking{"state_and_params", 3, 2, true, {kParam + "max_in_cpu=0"}},
        Linking{"several_segments", 3, 1, true, {kParam + "max_in_cpu=0"}, kSmallSegments},
        Linking{"part_in_memory",
                3,
                2,
                true,
                {kParam + "max_in_cpu=20000", kState + "cpu_state_budget=1000000"},
                kSmallSegments},
        Linking{"checksums", 2, 1, false, {}, kSmallSegments + "checksum = true\n"},
        Linking{
            "beside_a_gpu", 3, 1, true, {kParam + "max_in_cpu=0", kState + "ratio=0.9"}, kSmallSegments, "gpu_sim"}),
    [](const auto& tested) { return tested.param.name; });

// Links are taken after even steps, and go after odd ones, or stay. A unit is left out of every other step: files are
// shared for longer.
class LinksAndABudget : public testing::Test {
 protected:
  std::string step(strata_engine* e, const Trial& t, int step) {
    std::string error = micro_batch(e, t.model, step, 0, 0, step % 2 ? 1 : UINT32_MAX);
    if (error.empty()) error = call(strata_step(e, nullptr));
    if (error.empty()) error = call(strata_wait(e));
    return error;
  }
  Result without_links() {
    Trial t = trial(2, "cpu");
    t.world = 1;
    t.model = large_model();
    return run_on(t, [&](int, strata_engine* e) {
      std::string error;
      for (int s = 1; s <= kSteps && error.empty(); ++s) error = step(e, t, s);
      return error;
    });
  }
  // The text of the first error; then what was saved is loaded, with the links gone, and the run goes on from there.
  std::string with_links(bool remove, const std::string& budget, Result* out) {
    DiskDir disk, root;
    Trial t = trial(2, "nvme", disk.path);
    t.world = 1;
    t.model = large_model();
    t.manifest_extra += "budget_bytes = " + budget + "\n";
    std::string first_error;
    t.body = [&](int, strata_engine* e) {
      ASSERT_EQ(build_model(e, t.model), "");
      Links links;
      for (int s = 1; s <= kSteps; ++s) {
        std::string error = step(e, t, s);
        EXPECT_TRUE(links.unchanged()) << s;
        if (!error.empty()) {
          ASSERT_EQ(first_error, "");
          first_error = error;  // there are no more links from here on
          EXPECT_NE(strata_save(e, root.path.c_str(), "kept"), STRATA_OK) << "of a state that is not whole";
          links.remove();
          ASSERT_EQ(call(strata_load(e, root.path.c_str(), "kept")), "");
          ASSERT_EQ(step(e, t, s), "");
        }
        if (s % 2 == 0) {
          ASSERT_EQ(call(strata_save(e, root.path.c_str(), "kept")), "");
          if (first_error.empty()) links.take({disk.path});
        } else if (remove && first_error.empty()) {
          EXPECT_TRUE(s == 1 || links.shared() > 0) << s;
          links.remove();
        }
      }
      ASSERT_EQ(collect(e, t.model, out), "");
    };
    EXPECT_EQ(run(t).error, "");
    return first_error;
  }
  static constexpr int kSteps = 12;
};

TEST_F(LinksAndABudget, ARunWithRoomForTheStateTwiceNeverRunsOut) {
  const Result right = without_links();
  for (const bool remove : {false, true}) {
    Result linked;
    EXPECT_EQ(with_links(remove, "16000000", &linked), "");
    EXPECT_TRUE(linked == right) << remove;
  }
}

TEST_F(LinksAndABudget, WithoutRoomTheErrorNamesTheLinkAndTheCheckpointIsGood) {
  const Result right = without_links();
  Result linked;
  EXPECT_THAT(with_links(true, "8000000", &linked),
              AllOf(HasSubstr("which is linked"), HasSubstr("of the budget of 8000000 used")));
  EXPECT_TRUE(linked == right);
}

// With `links` it is the plan that is refused; the same budget without them holds it.
TEST_F(LinksAndABudget, APlanWithoutRoomForLinksIsRefusedWhereTheyAreAnnounced) {
  for (const bool links : {false, true}) {
    DiskDir disk;
    Trial t = trial(2, "nvme", disk.path);
    t.world = 1;
    t.model = large_model();
    t.manifest_extra += std::string("budget_bytes = 8000000\nlinks = ") + (links ? "true" : "false") + "\n";
    const std::string error = run(t).error;
    if (links) {
      EXPECT_THAT(error, AllOf(HasSubstr("the plan needs"), HasSubstr("option links keeps")));
    } else {
      EXPECT_EQ(error, "");
    }
    EXPECT_EQ(disk.entries(), 0u);
  }
  const Result right = without_links();
  Result linked;
  EXPECT_EQ(with_links(true, "17000000\nlinks = true", &linked), "");
  EXPECT_TRUE(linked == right);
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
