// Checkpoints of a model in parts: one tag with all of them or none, loaded at any data-parallel size, refused at
// another tensor or pipeline size.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "strata/iface/checkpoint.h"
#include "tests/support/plugin_fixture.h"
#include "tests/train/by_hand.h"
#include "tests/train/split_model.h"

namespace strata::test {
namespace {

namespace fs = std::filesystem;

struct TempDir {
  TempDir() {
    char name[] = "/tmp/strata-parts-XXXXXX";
    path = mkdtemp(name);
  }
  ~TempDir() {
    std::error_code error;
    fs::remove_all(path, error);
  }
  std::string path;
};

std::string result_of(strata_status status) { return status == STRATA_OK ? "" : last(); }

using Arrays = std::map<std::string, std::vector<float>>;
using Body = std::function<void(int rank, strata_engine*)>;

// Builds the model for the cut on every rank; the body does the rest.
void on_ranks(const Cut& cut, int stage, const Body& body, const std::vector<std::string>& overrides = {}) {
  Trial t = split_trial(cut, stage, 1);
  t.overrides.insert(t.overrides.end(), overrides.begin(), overrides.end());
  const std::vector<WholeParam> whole = whole_model(cut.pipeline);
  run_body(t, [&](int rank, strata_engine* e) {
    ASSERT_EQ(build_split_model(e, whole), "");
    body(rank, e);
  });
}

void train(const Cut& cut, strata_engine* e, int step) {
  ASSERT_EQ(split_backward(e, whole_model(cut.pipeline), step, 1), "");
  ASSERT_EQ(split_step(e, 0.01), "");
}

// What all ranks hold of an array, put together.
struct Whole {
  void add(const Cut& cut, strata_engine* e) {
    for (const char* array : {"weight", "exp_avg"}) {
      Arrays mine;
      ASSERT_EQ(collect_split(e, whole_model(cut.pipeline), array, &mine), "");
      std::lock_guard lock(mutex);
      merge(mine, &arrays[array]);
    }
  }
  std::mutex mutex;
  std::map<std::string, Arrays> arrays;
};

std::string save(const Cut& cut, const std::string& root, const std::string& tag, int steps, Whole* out = nullptr,
                 const std::vector<std::string>& overrides = {}) {
  std::string error;
  on_ranks(
      cut, 2,
      [&](int rank, strata_engine* e) {
        for (int step = 1; step <= steps; ++step) train(cut, e, step);
        const std::string mine = result_of(strata_save(e, root.c_str(), tag.c_str()));
        if (rank == 0) error = mine;
        if (out) out->add(cut, e);
      },
      overrides);
  return error;
}

std::vector<std::string> files_in(const std::string& directory) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

const Cut kSaved = {2, 2, 2};

TEST(PartsOfACheckpoint, LoadAtAnyDataParallelSizeAndStage) {
  const TempDir dir;
  Whole saved;
  ASSERT_EQ(save(kSaved, dir.path, "step2", 2, &saved), "");
  EXPECT_EQ(files_in(dir.path), (std::vector<std::string>{"latest", "step2"}));
  EXPECT_EQ(files_in(dir.path + "/step2"),
            (std::vector<std::string>{"tp0of2-pp0of2", "tp0of2-pp1of2", "tp1of2-pp0of2", "tp1of2-pp1of2"}));
  for (const auto& [data, stage] : {std::pair{1, 0}, {2, 3}, {3, 1}}) {
    const Cut cut = {2, 2, data};
    Whole loaded;
    on_ranks(cut, stage, [&](int, strata_engine* e) {
      ASSERT_EQ(result_of(strata_load(e, dir.path.c_str(), nullptr)), "");
      loaded.add(cut, e);
      train(cut, e, 3);  // and goes on
      strata_step_info info;
      STRATA_INIT(&info);
      ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
      EXPECT_EQ(info.applied_steps, 3u);
    });
    EXPECT_TRUE(loaded.arrays == saved.arrays) << "data " << data << ", stage " << stage;
  }
}

TEST(PartsOfACheckpoint, AnotherTensorOrPipelineSizeIsRefusedByName) {
  const TempDir dir;
  ASSERT_EQ(save(kSaved, dir.path, "parts", 1), "");
  ASSERT_EQ(save({1, 1, 2}, dir.path, "whole", 1), "");
  const auto refused = [&](const Cut& cut, const char* tag, const std::vector<std::string>& texts) {
    on_ranks(cut, 1, [&](int rank, strata_engine* e) {
      EXPECT_EQ(strata_load(e, dir.path.c_str(), tag), STRATA_INVALID_ARGUMENT) << rank;
      for (const std::string& text : texts) EXPECT_TRUE(says(text)) << rank << last();
      train(cut, e, 1);  // nothing was changed
    });
  };
  refused({4, 1, 1}, "parts",
          {"saved with tensor_model_parallel_size = 2 and pipeline_model_parallel_size = 2",
           "this run has tensor_model_parallel_size = 4 and pipeline_model_parallel_size = 1"});
  refused({1, 1, 1}, "parts",
          {"saved with tensor_model_parallel_size = 2", "this run has tensor_model_parallel_size = 1"});
  refused({2, 1, 1}, "whole",
          {"saved with tensor_model_parallel_size = 1", "this run has tensor_model_parallel_size = 2"});
}

// What kills leave: parts that were written, or committed, but never published; a name that was announced.
TEST(PartsOfACheckpoint, OneThatIsNotWholeIsNotThere) {
  const TempDir dir;
  ASSERT_EQ(save(kSaved, dir.path, "step1", 1), "");
  // The moment before the rename: all parts committed under the hidden name, the new name announced.
  fs::create_directory(dir.path + "/.step2.partial");
  fs::copy(dir.path + "/step1/tp0of2-pp0of2", dir.path + "/.step2.partial/tp0of2-pp0of2", fs::copy_options::recursive);
  fs::rename(dir.path + "/.step2.partial/tp0of2-pp0of2/step1", dir.path + "/.step2.partial/tp0of2-pp0of2/step2");
  std::ofstream(dir.path + "/.latest.next") << "step2\n";
  const auto load = [&](const char* tag, strata_status code, const std::string& text) {
    on_ranks(kSaved, 1, [&](int rank, strata_engine* e) {
      EXPECT_EQ(strata_load(e, dir.path.c_str(), tag), code) << rank << last();
      if (code != STRATA_OK) {
        EXPECT_TRUE(says(text)) << rank << last();
      }
    });
  };
  load(nullptr, STRATA_OK, "");
  load("step2", STRATA_NOT_FOUND, "step2 is not there");
  ASSERT_EQ(save(kSaved, dir.path, "step2", 2), "");  // what was left is no hindrance
  EXPECT_EQ(files_in(dir.path), (std::vector<std::string>{"latest", "step1", "step2"}));
  load("step2", STRATA_OK, "");
  // The moment after it: the announced name is the newest although `latest` has the old one.
  std::ofstream(dir.path + "/latest") << "step1\n";
  std::ofstream(dir.path + "/.latest.next") << "step2\n";
  on_ranks(kSaved, 1, [&](int, strata_engine* e) {
    ASSERT_EQ(result_of(strata_load(e, dir.path.c_str(), nullptr)), "");
    strata_step_info info;
    STRATA_INIT(&info);
    ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
    EXPECT_EQ(info.steps, 2u);
  });
}

TEST(PartsOfACheckpoint, AMissingPartIsNamedAndRefusedEverywhere) {
  const TempDir dir;
  ASSERT_EQ(save(kSaved, dir.path, "a", 1), "");
  fs::remove_all(dir.path + "/a/tp1of2-pp0of2");  // of ranks 1 and 3
  on_ranks(kSaved, 1, [&](int rank, strata_engine* e) {
    const bool mine = rank == 1 || rank == 3;
    EXPECT_EQ(strata_load(e, dir.path.c_str(), "a"), mine ? STRATA_NOT_FOUND : STRATA_ABORTED) << rank;
    EXPECT_TRUE(says(mine ? "tp1of2-pp0of2: this part is missing" : "it failed on rank 1, 3")) << rank << last();
  });
}

TEST(PartsOfACheckpoint, ATakenOrImpossibleTagIsRefusedEverywhere) {
  const TempDir dir;
  ASSERT_EQ(save(kSaved, dir.path, "a", 1), "");
  on_ranks(kSaved, 1, [&](int rank, strata_engine* e) {
    const auto save_as = [&](const char* tag, strata_status code, const char* text) {
      EXPECT_EQ(strata_save(e, dir.path.c_str(), tag), rank == 0 ? code : STRATA_ABORTED) << rank << last();
      EXPECT_TRUE(says(rank == 0 ? text : "it failed on rank 0")) << rank << last();
    };
    save_as("a", STRATA_ALREADY_EXISTS, "/a is there already");
    save_as("../b", STRATA_INVALID_ARGUMENT, "\"../b\"");
    save_as("latest", STRATA_INVALID_ARGUMENT, "\"latest\"");
    ASSERT_EQ(result_of(strata_save(e, dir.path.c_str(), "b")), "");
  });
}

// One part's disk is full, or its commit fails: no tag, and the next save succeeds.
TEST(PartsOfACheckpoint, AFailureInOnePartLeavesNothing) {
  load<strata_checkpoint_api>("fault", STRATA_CHECKPOINT);  // by one thread
  for (const char* rule : {"checkpoint.write:1:fail=RESOURCE_EXHAUSTED", "checkpoint.commit:1:fail=DATA_LOSS"}) {
    const TempDir dir;
    const auto trial_of = [&](int rank) {
      Trial t = split_trial(kSaved, 1, 1);
      t.manifest_extra =
          std::string("[plugins]\ncheckpoint = \"fault\"\n[plugin.fault]\nwraps = \"checkpoint\"\nrules = \"") +
          (rank == 4 ? rule : "") + "\"\n";
      return t;
    };
    each_rank(kSaved.world(), trial_of, [&](int rank, strata_engine* e, const std::string& error) {
      ASSERT_TRUE(e) << error;
      ASSERT_EQ(build_split_model(e, whole_model(2)), "");
      EXPECT_NE(strata_save(e, dir.path.c_str(), "a"), STRATA_OK) << rule << rank;
      EXPECT_TRUE(says(rank == 4 ? "fault:" : "it failed on rank 4")) << rule << rank << last();
      ASSERT_EQ(result_of(strata_save(e, dir.path.c_str(), "a")), "") << rule << rank;
    });
    EXPECT_EQ(files_in(dir.path), (std::vector<std::string>{"a", "latest"})) << rule;
  }
}

TEST(PartsOfACheckpoint, HaveAWeightFileEach) {
  const TempDir dir;
  const std::string gather = "zero_optimization.gather_16bit_weights_on_model_save=true";
  ASSERT_EQ(save({2, 1, 2}, dir.path, "a", 1, nullptr, {gather}), "");
  for (const char* part : {"tp0of2-pp0of1", "tp1of2-pp0of1"}) {
    EXPECT_TRUE(fs::exists(dir.path + "/a/" + part + "/a/weights.h5")) << part;
  }
  on_ranks({2, 1, 2}, 3, [&](int, strata_engine* e) {
    ASSERT_EQ(result_of(strata_export_weights(e, (dir.path + "/model.h5").c_str())), "");
  });
  EXPECT_EQ(files_in(dir.path),
            (std::vector<std::string>{"a", "latest", "model.tp0of2-pp0of1.h5", "model.tp1of2-pp0of1.h5"}));
}

}  // namespace
}  // namespace strata::test
