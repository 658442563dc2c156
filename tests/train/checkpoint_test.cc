// Checkpoints through the engine: what is saved at one world size and stage is what another loads, bit by bit, and a
// resumed run goes on as if nothing had happened.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>

#include "tests/train/reference.h"

namespace strata::test {
namespace {

namespace fs = std::filesystem;

struct TempDir {
  TempDir() {
    char name[] = "/tmp/strata-ckpt-XXXXXX";
    path = mkdtemp(name);
  }
  ~TempDir() {
    std::error_code error;
    fs::remove_all(path, error);
  }
  std::string path;
};

Trial trial(int stage, int world, const std::string& offload = "none") {
  Trial t;
  t.stage = stage;
  t.world = world;
  t.clip = 0.05;
  t.offload_optimizer = offload;
  t.overrides = {"train_batch_size=12", "train_micro_batch_size_per_gpu=1"};
  t.micro_batches = 12 / world;
  if (stage == 3) t.overrides.push_back("zero_optimization.param_persistence_threshold=50");
  return t;
}

std::string steps(const Trial& t, strata_engine* e, int rank, int first, int last) {
  const Model m = odd_model();
  for (int step = first; step <= last; ++step) {
    for (int micro = 0; micro < t.micro_batches; ++micro) {
      std::string error = micro_batch(e, m, step, micro, rank, UINT32_MAX);
      if (!error.empty()) return error;
    }
    if (strata_step(e, nullptr) != STRATA_OK) return strata_last_error();
  }
  return "";
}

// Runs `body` on every rank after the model is built, and returns rank 0's arrays at the end.
Result run_on(Trial t, const std::function<std::string(int, strata_engine*)>& body) {
  Result result;
  t.body = [&](int rank, strata_engine* e) {
    std::string error = build_model(e, odd_model());
    if (error.empty()) error = body(rank, e);
    Result mine;
    if (error.empty()) error = collect(e, odd_model(), &mine);
    EXPECT_EQ(error, "") << "rank " << rank;
    if (rank == 0) result = mine;
  };
  EXPECT_EQ(run(t).error, "");
  return result;
}

std::string call(strata_status status) { return status == STRATA_OK ? "" : strata_last_error(); }

TEST(Checkpoint, LoadsAtAnyWorldSizeAndStageBitByBit) {
  TempDir dir;
  for (auto [stage, world] : {std::pair{0, 1}, {1, 2}, {2, 3}, {3, 2}, {3, 4}}) {
    const Trial saving = trial(stage, world, stage == 3 ? "cpu" : "none");
    const std::string tag = "s" + std::to_string(stage) + "w" + std::to_string(world);
    const Result saved = run_on(saving, [&](int rank, strata_engine* e) {
      std::string error = steps(saving, e, rank, 1, 2);
      if (error.empty()) error = call(strata_set_meta(e, "tokens", "123"));
      return error.empty() ? call(strata_save(e, dir.path.c_str(), tag.c_str())) : error;
    });
    for (auto [to_stage, to_world] : {std::pair{0, 2}, {1, 3}, {2, 2}, {3, 1}, {3, 3}}) {
      const Result loaded = run_on(trial(to_stage, to_world), [&](int, strata_engine* e) -> std::string {
        std::string error = call(strata_load(e, dir.path.c_str(), tag.c_str()));
        if (!error.empty()) return error;
        const char* tokens = "";
        EXPECT_EQ(strata_get_meta(e, "tokens", &tokens), STRATA_OK);
        EXPECT_STREQ(tokens, "123");
        strata_step_info info;
        STRATA_INIT(&info);
        EXPECT_EQ(strata_get_step_info(e, &info), STRATA_OK);
        EXPECT_EQ(info.applied_steps, 2u);
        return "";
      });
      EXPECT_TRUE(loaded == saved) << tag << " to stage " << to_stage << " world " << to_world;
    }
  }
}

TEST(Checkpoint, AResumedRunContinuesBitByBit) {
  TempDir dir;
  for (int stage : {0, 1, 2, 3}) {
    const Trial t = trial(stage, 2, "cpu");
    const std::string tag = "stage" + std::to_string(stage);
    const Result through = run_on(t, [&](int rank, strata_engine* e) { return steps(t, e, rank, 1, 5); });
    run_on(t, [&](int rank, strata_engine* e) {
      std::string error = steps(t, e, rank, 1, 2);
      return error.empty() ? call(strata_save(e, dir.path.c_str(), tag.c_str())) : error;
    });
    const Result resumed = run_on(t, [&](int rank, strata_engine* e) {
      std::string error = call(strata_load(e, dir.path.c_str(), nullptr));  // latest
      return error.empty() ? steps(t, e, rank, 3, 5) : error;
    });
    EXPECT_TRUE(resumed == through) << "stage " << stage;
  }
}

TEST(Checkpoint, SplitAndWholeMastersAreTheSameCheckpoint) {
  TempDir dir;
  Trial whole = trial(3, 2), split = trial(3, 2);
  split.overrides.push_back("optimizer.params.state_layout=split");
  const Result saved = run_on(split, [&](int rank, strata_engine* e) {
    std::string error = steps(split, e, rank, 1, 2);
    return error.empty() ? call(strata_save(e, dir.path.c_str(), "x")) : error;
  });
  const Result loaded =
      run_on(whole, [&](int, strata_engine* e) { return call(strata_load(e, dir.path.c_str(), "x")); });
  EXPECT_TRUE(loaded == saved);
}

TEST(Checkpoint, WrongLoadsAreRefusedOnAllRanksAndChangeNothing) {
  TempDir dir;
  const Trial t = trial(3, 2);
  run_on(t, [&](int, strata_engine* e) { return call(strata_save(e, dir.path.c_str(), "good")); });
  run_on(t, [&](int, strata_engine* e) {
    EXPECT_EQ(strata_load(e, dir.path.c_str(), "absent"), STRATA_NOT_FOUND) << strata_last_error();
    EXPECT_NE(strata_load(e, "/tmp/strata-no-such-directory", nullptr), STRATA_OK);
    return call(strata_load(e, dir.path.c_str(), "good"));
  });
}

// What a run may start anew on is the same on all ranks, and is said of no checkpoint that is there.
TEST(Checkpoint, NotFoundMeansThatThereIsNoneAtAll) {
  TempDir dir, other;
  const Trial t = trial(3, 2);
  run_on(t, [&](int, strata_engine* e) {
    EXPECT_EQ(strata_load(e, dir.path.c_str(), nullptr), STRATA_NOT_FOUND);
    for (const char* tag : {"step1", "step2"}) EXPECT_EQ(call(strata_save(e, dir.path.c_str(), tag)), "");
    return std::string();
  });
  fs::rename(dir.path + "/step2", other.path + "/step2");
  const auto refused = [&](const Trial& by, strata_status code, const std::string& text) {
    run_on(by, [&](int rank, strata_engine* e) {
      EXPECT_EQ(strata_load(e, dir.path.c_str(), nullptr), code) << rank << ": " << strata_last_error();
      EXPECT_NE(std::string(strata_last_error()).find(text), std::string::npos) << strata_last_error();
      return std::string();
    });
  };
  refused(t, STRATA_FAILED_PRECONDITION, "latest names 'step2', which is not there; there are step1: name one");
  std::ofstream(dir.path + "/latest") << "step1\n";
  Trial renamed = t;
  renamed.body = [&](int, strata_engine* e) {
    Model model = odd_model();
    model.params[0].name = "another";
    ASSERT_EQ(build_model(e, model), "");
    EXPECT_EQ(strata_load(e, dir.path.c_str(), nullptr), STRATA_INVALID_ARGUMENT) << strata_last_error();
  };
  EXPECT_EQ(run(renamed).error, "");
  Trial without = t;
  without.overrides.push_back("plugins.checkpoint=none_of_this_name");
  refused(without, STRATA_FAILED_PRECONDITION, "none_of_this_name");
}

// The same tag again, by another world and stage, with and without the weight file. What is no checkpoint stays.
TEST(Checkpoint, ATagIsSavedAgainInPlaceOfTheOldOne) {
  TempDir dir;
  Trial first = trial(3, 3), second = trial(2, 2);
  first.overrides.push_back("zero_optimization.gather_16bit_weights_on_model_save=true");
  const auto save_after = [&](const Trial& t, int from, int to) {
    return run_on(t, [&](int rank, strata_engine* e) {
      std::string error = steps(t, e, rank, from, to);
      return error.empty() ? call(strata_save(e, dir.path.c_str(), "last")) : error;
    });
  };
  const auto loaded = [&](const char* tag) {
    return run_on(second, [&](int, strata_engine* e) { return call(strata_load(e, dir.path.c_str(), tag)); });
  };
  const Result old_state = save_after(first, 1, 1);
  EXPECT_TRUE(loaded(nullptr) == old_state);
  const Result new_state = save_after(second, 1, 2);
  EXPECT_FALSE(new_state == old_state);
  for (const char* tag : {"last", static_cast<const char*>(nullptr)}) EXPECT_TRUE(loaded(tag) == new_state);
  EXPECT_FALSE(fs::exists(dir.path + "/last/weights.h5"));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir.path), {}), 2);
  std::ofstream(dir.path + "/last/notes.txt") << "mine";
  run_on(second, [&](int rank, strata_engine* e) {
    EXPECT_EQ(strata_save(e, dir.path.c_str(), "last"), STRATA_ALREADY_EXISTS) << rank;
    for (const char* part : {"it failed on rank 0: ", "has 'notes.txt' in it"}) {
      EXPECT_NE(std::string(strata_last_error()).find(part), std::string::npos) << rank << strata_last_error();
    }
    return call(strata_load(e, dir.path.c_str(), "last"));
  });
}

TEST(Checkpoint, ALoadThatDoesNotFitChangesNothing) {
  TempDir dir;
  Trial t;
  run_on(t, [&](int, strata_engine* e) {
    std::string error = call(strata_set_meta(e, "who", "saved"));
    return error.empty() ? call(strata_save(e, dir.path.c_str(), "odd")) : error;
  });
  t.body = [&](int, strata_engine* e) {
    Model m = odd_model();
    m.params[5].shape = {65, 33};  // every other param fits, most of them come before it
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(strata_set_meta(e, "who", "mine"), STRATA_OK);
    std::vector<float> ones(64 * 97, 1.0f);
    strata_tensor value;
    STRATA_INIT(&value);
    value.data = ones.data();
    value.device_type = STRATA_CPU;
    value.dtype = STRATA_F32;
    value.ndim = 2;
    value.shape = m.params[2].shape.data();
    ASSERT_EQ(strata_write_param(e, 2, &value, 0), STRATA_OK) << strata_last_error();
    EXPECT_EQ(strata_load(e, dir.path.c_str(), "odd"), STRATA_INVALID_ARGUMENT);
    const std::string text = strata_last_error();
    EXPECT_NE(text.find("[33, 65]"), std::string::npos) << text;
    EXPECT_NE(text.find("[65, 33]"), std::string::npos) << text;
    Result after;
    ASSERT_EQ(collect(e, m, &after), "");
    EXPECT_EQ(after.master["layer0.weight"], ones);
    const char* who = "";
    ASSERT_EQ(strata_get_meta(e, "who", &who), STRATA_OK);
    EXPECT_STREQ(who, "mine");
  };
  EXPECT_EQ(run(t).error, "");
}

TEST(Checkpoint, TheWeightFileIsPartOfTheCheckpoint) {
  TempDir dir;
  Trial t = trial(3, 2, "cpu");
  t.overrides.push_back("zero_optimization.gather_16bit_weights_on_model_save=true");
  const std::string exported = dir.path + "/alone.h5";
  run_on(t, [&](int rank, strata_engine* e) {
    std::string error = steps(t, e, rank, 1, 1);
    if (error.empty()) error = call(strata_save(e, dir.path.c_str(), "one"));
    if (error.empty()) error = call(strata_export_weights(e, exported.c_str()));
    return error.empty() ? call(strata_load(e, dir.path.c_str(), "one")) : error;
  });
  const auto bytes = [](const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  EXPECT_GT(fs::file_size(exported), 2u * 64 * 97);
  EXPECT_TRUE(bytes(dir.path + "/one/weights.h5") == bytes(exported));
}

// "save of x: save of x: ...": what is being done is said once, on the rank that failed and on those that only hear of
// it.
TEST(Checkpoint, ErrorsSayWhatWasDoneOnce) {
  TempDir dir;
  Trial t = trial(3, 2);
  t.overrides.push_back("zero_optimization.gather_16bit_weights_on_model_save=true");
  std::ofstream(dir.path + "/file") << "x";
  fs::create_directory(dir.path + "/taken.h5");
  run_on(t, [&](int rank, strata_engine* e) -> std::string {
    const std::string root = dir.path, odd_root = rank == 0 ? dir.path : dir.path + "/file/x";
    EXPECT_EQ(strata_save(e, root.c_str(), "good"), STRATA_OK) << strata_last_error();
    const std::function<strata_status()> wrong[] = {
        [&] { return strata_save(e, root.c_str(), "file"); },
        [&] { return strata_save(e, root.c_str(), " "); },
        [&] { return strata_save(e, root.c_str(), ".x"); },
        [&] { return strata_save(e, (root + "/file").c_str(), "t"); },
        [&] { return strata_save(e, odd_root.c_str(), "t"); },
        [&] { return strata_load(e, root.c_str(), "absent"); },
        [&] { return strata_load(e, root.c_str(), " absent"); },
        [&] { return strata_load(e, (root + "/nowhere").c_str(), nullptr); },
        [&] { return strata_load(e, odd_root.c_str(), "good"); },
        [&] { return strata_export_weights(e, (root + "/taken.h5").c_str()); },
        [&] { return strata_export_weights(e, (root + "/file/x.h5").c_str()); },
        [&] { return strata_export_weights(e, (root + "/").c_str()); },
    };
    for (const auto& call_it : wrong) {
      EXPECT_NE(call_it(), STRATA_OK);
      const std::string text = strata_last_error();
      EXPECT_GT(text.size(), 20u);
      std::set<std::string> parts;
      for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 2) {
        end = text.find(": ", begin);
        EXPECT_TRUE(parts.insert(text.substr(begin, end - begin)).second) << "rank " << rank << ": " << text;
      }
    }
    return call(strata_load(e, root.c_str(), "good"));
  });
}

TEST(Checkpoint, ExportHoldsTheTrainingWeightsBitForBit) {
  TempDir dir;
  const std::string path = dir.path + "/weights.h5";
  for (int world : {1, 3}) {
    const Trial t = trial(3, world, "cpu");
    run_on(t, [&](int rank, strata_engine* e) {
      std::string error = steps(t, e, rank, 1, 1);
      return error.empty() ? call(strata_export_weights(e, path.c_str())) : error;
    });
    EXPECT_GT(fs::file_size(path), 2u * 64 * 97);
    fs::remove(path);
  }
}

}  // namespace
}  // namespace strata::test
