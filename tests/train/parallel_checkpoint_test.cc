// Checkpoints of a model in parts: one tag with all of them or none, loaded at any data-parallel size, refused at
// another tensor or pipeline size.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "strata/draft/fault_control.h"
#include "tests/support/tracer.h"
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

const Cut kSaved = {2, 2, 2}, kSmall = {2, 1, 1};

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
  load("step2", STRATA_NOT_FOUND, "step2: there is no such checkpoint");
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
    EXPECT_EQ(strata_load(e, dir.path.c_str(), "a"), STRATA_DATA_LOSS) << rank;
    EXPECT_TRUE(says("it failed on rank 1, 3: ") && says("tp1of2-pp0of2: this part is missing")) << rank << last();
  });
}

TEST(PartsOfACheckpoint, NotFoundMeansThatThereIsNoneAtAll) {
  const TempDir dir;
  const auto load = [&](strata_status code, const std::string& text) {
    on_ranks(kSaved, 1, [&](int rank, strata_engine* e) {
      EXPECT_EQ(strata_load(e, dir.path.c_str(), nullptr), code) << rank << last();
      EXPECT_TRUE(says(text)) << rank << last();
    });
  };
  load(STRATA_NOT_FOUND, "no checkpoint was committed in");
  for (const char* tag : {"step1", "step2", "step3"}) ASSERT_EQ(save(kSaved, dir.path, tag, 1), "");
  fs::remove_all(dir.path + "/step3");
  load(STRATA_FAILED_PRECONDITION, "latest names 'step3', which is not there; there are step1, step2: name one");
  fs::remove(dir.path + "/latest");
  load(STRATA_FAILED_PRECONDITION, "latest is not there; there are step1, step2: name one");
  fs::remove_all(dir.path + "/step1");
  fs::remove_all(dir.path + "/step2");
  load(STRATA_NOT_FOUND, "no checkpoint was committed in");
  ASSERT_EQ(save({1, 1, 2}, dir.path, "whole", 1), "");
  fs::remove(dir.path + "/latest");
  load(STRATA_FAILED_PRECONDITION, "latest is not there; there are whole: name one");
}

TEST(PartsOfACheckpoint, ATakenOrImpossibleTagIsRefusedEverywhere) {
  const TempDir dir;
  ASSERT_EQ(save({1, 1, 2}, dir.path, "a", 1), "");
  on_ranks(kSaved, 1, [&](int rank, strata_engine* e) {
    const auto save_as = [&](const char* tag, strata_status code, const char* text) {
      EXPECT_EQ(strata_save(e, dir.path.c_str(), tag), code) << rank << last();
      EXPECT_TRUE(says("it failed on rank 0: ") && says(text)) << rank << last();
    };
    save_as("a", STRATA_ALREADY_EXISTS, "/a is there, is no checkpoint of a model in parts");
    save_as("../b", STRATA_INVALID_ARGUMENT, "\"../b\"");
    save_as("latest", STRATA_INVALID_ARGUMENT, "\"latest\"");
    for (const size_t length : {201u, 240u, 250u, 255u, 300u}) {  // of a tag, of a name with what is put around it
      const std::string tag(length, 't');
      EXPECT_EQ(strata_save(e, dir.path.c_str(), tag.c_str()), STRATA_INVALID_ARGUMENT) << rank << last();
    }
    ASSERT_EQ(result_of(strata_save(e, dir.path.c_str(), "b")), "");
  });
}

uint64_t steps_of(strata_engine* e) {
  strata_step_info info;
  STRATA_INIT(&info);
  EXPECT_EQ(strata_get_step_info(e, &info), STRATA_OK);
  return info.steps;
}

uint64_t steps_in(const std::string& root, const char* tag) {
  uint64_t steps = 0;
  on_ranks(kSmall, 1, [&](int rank, strata_engine* e) {
    ASSERT_EQ(result_of(strata_load(e, root.c_str(), tag)), "");
    if (rank == 0) steps = steps_of(e);
  });
  return steps;
}

int save_two_steps(const std::string& root) { return save(kSmall, root, "a", 2) == "" ? 0 : 1; }

// A save of "a" over "a", killed at any rename or failing there: "a" is what it was or what it becomes, in all parts,
// `latest` names the newest, and the next save leaves nothing else.
void strike_at_renames(bool kill, bool can_exchange) {
  TempDir before;
  ASSERT_EQ(save(kSmall, before.path, "a", 1), "");
  ASSERT_EQ(save(kSmall, before.path, "other", 3), "");
  int seen[3] = {};
  for (int k = 1;; ++k) {
    SCOPED_TRACE(testing::Message() << (kill ? "killed at" : "failed was") << " rename " << k);
    TempDir dir;
    fs::copy(before.path, dir.path, fs::copy_options::recursive);
    const Struck struck = run_traced({k, kill, can_exchange, true}, save_two_steps, dir.path);
    const uint64_t steps = steps_in(dir.path, "a"), latest = steps_in(dir.path, nullptr);
    ASSERT_TRUE(steps == 1 || steps == 2) << steps;
    ASSERT_TRUE(latest == 3 || (latest == 2 && steps == 2)) << latest << " " << steps;
    ASSERT_TRUE(!struck.succeeded || steps == 2);
    ++seen[steps];
    ASSERT_EQ(save(kSmall, dir.path, "third", 1), "");  // of whatever tag the next one is
    ASSERT_EQ(files_in(dir.path), (std::vector<std::string>{"a", "latest", "other", "third"}));
    ASSERT_EQ(steps_in(dir.path, "a"), steps);
    ASSERT_EQ(save(kSmall, dir.path, "a", 2), "");
    ASSERT_EQ(files_in(dir.path), (std::vector<std::string>{"a", "latest", "other", "third"}));
    ASSERT_EQ(files_in(dir.path + "/a"), (std::vector<std::string>{"tp0of2-pp0of1", "tp1of2-pp0of1"}));
    ASSERT_EQ(steps_in(dir.path, nullptr), 2u);
    if (struck.calls < k) break;
  }
  EXPECT_GT(seen[1], 10);
  EXPECT_GT(seen[2], 1);
}

TEST(PartsOfACheckpoint, AreReplacedTogetherWhateverIsKilledOrFails) {
  SKIP_WITHOUT_TRACING();
  strike_at_renames(true, true);
  if (!can_fail_calls()) return;
  strike_at_renames(true, false);
  strike_at_renames(false, true);
  strike_at_renames(false, false);
}

// Any of the calls that publish fails, as on a full disk: a save that returns OK is the latest, and no save leaves a
// `latest` that names nothing.
TEST(PartsOfACheckpoint, ACallThatFailsWhilePublishingIsAnError) {
  SKIP_WITHOUT_TRACING();
  if (!can_fail_calls()) GTEST_SKIP() << "calls cannot be made to fail on this processor";
  for (const char* tag : {"a", "other"}) {
    TempDir before;
    ASSERT_EQ(save(kSmall, before.path, "other", 1), "");
    ASSERT_EQ(save(kSmall, before.path, tag, 3), "");
    if (tag == std::string("other")) fs::remove_all(before.path + "/a");
    const auto copy = [&](const TempDir& dir) { fs::copy(before.path, dir.path, fs::copy_options::recursive); };
    const TempDir first;
    copy(first);
    const int calls = run_traced({}, save_two_steps, first.path).calls;
    for (int k = std::max(1, calls - 40); k <= calls; ++k) {
      SCOPED_TRACE(testing::Message() << "over " << tag << ", failed was call " << k << " of " << calls);
      const TempDir dir;
      copy(dir);
      const Struck struck = run_traced({k, false}, save_two_steps, dir.path);
      const uint64_t latest = steps_in(dir.path, nullptr);
      ASSERT_TRUE(latest == 2 || (latest == 3 && !struck.succeeded)) << latest;
    }
  }
}

// A kill between the renames left "b" committed and announced; whatever is killed next, `latest` is never older.
TEST(PartsOfACheckpoint, KilledTwice) {
  SKIP_WITHOUT_TRACING();
  TempDir before;
  ASSERT_EQ(save(kSmall, before.path, "other", 1), "");
  ASSERT_EQ(save(kSmall, before.path, "b", 3), "");
  std::ofstream(before.path + "/latest") << "other\n";
  std::ofstream(before.path + "/.latest.next") << "b\n";
  int seen[4] = {};
  for (int k = 1;; ++k) {
    SCOPED_TRACE(testing::Message() << "killed at rename " << k);
    const TempDir dir;
    fs::copy(before.path, dir.path, fs::copy_options::recursive);
    const Struck struck = run_traced({k, true, true, true}, save_two_steps, dir.path);
    const uint64_t latest = steps_in(dir.path, nullptr);
    ASSERT_TRUE(latest == 3 || latest == 2) << latest;
    ++seen[latest];
    if (struck.calls < k) break;
  }
  EXPECT_GT(seen[3], 5);
  EXPECT_GT(seen[2], 1);
}

// Whatever else is in a checkpoint's directory, in its parts' or beside their files, or has its name, is left alone;
// and so is a checkpoint that a kill left under its other name.
TEST(PartsOfACheckpoint, NothingOfSomebodyElseIsReplaced) {
  const TempDir dir;
  const std::string a = dir.path + "/a", part = a + "/tp0of2-pp0of1";
  ASSERT_EQ(save(kSmall, dir.path, "a", 1), "");
  const auto refused = [&](const std::string& text) {
    EXPECT_NE(save(kSmall, dir.path, "a", 2).find(text), std::string::npos) << last();
    EXPECT_FALSE(fs::exists(dir.path + "/.a.partial"));
    EXPECT_FALSE(fs::exists(dir.path + "/.a.lock"));
  };
  for (const std::string& name : {a + "/notes.txt", part + "/notes.txt", part + "/a/notes.txt", part + "/a/rank1.h5"}) {
    std::ofstream(name) << "mine";
    refused(fs::path(name).filename());
    EXPECT_TRUE(fs::remove(name));
  }
  for (const std::string& name : {a + "/mine", part + "/mine", part + "/a/rank00001.h5"}) {
    fs::create_directory(name);
    refused(fs::path(name).filename());
    EXPECT_TRUE(fs::remove(name));
  }
  fs::rename(a, dir.path + "/.a.replaced");
  fs::create_directory(a);
  std::ofstream(a + "/notes.txt") << "mine";
  refused(a + "/notes.txt");
  fs::remove_all(a);
  EXPECT_EQ(steps_in(dir.path, "a"), 1u);
  for (const char* target : {"nowhere", ".a.replaced"}) {
    fs::create_symlink(target, a);
    refused("/a is there, is no checkpoint of a model in parts");
    EXPECT_TRUE(fs::remove(a));
  }
  fs::create_directory(a);  // empty: it makes room
  ASSERT_EQ(save(kSmall, dir.path, "a", 2), "");
  EXPECT_EQ(files_in(dir.path), (std::vector<std::string>{"a", "latest"}));
}

// What the body returns when it is run by a user who may not do everything, as root may; 77: that user sees nothing
// here.
int as_nobody(const std::string& directory, const std::function<int()>& body) {
  if (::geteuid() != 0) return body();
  constexpr uid_t kNobody = 65534;
  EXPECT_EQ(::lchown(directory.c_str(), kNobody, kNobody), 0);
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    EXPECT_EQ(::lchown(entry.path().c_str(), kNobody, kNobody), 0);
  }
  const pid_t child = ::fork();
  if (child == 0) {
    const bool is_nobody = ::setgid(kNobody) == 0 && ::setuid(kNobody) == 0;
    ::_exit(is_nobody && ::access(STRATA_BUILD_DIR "/lib/plugins/checkpoint.so", R_OK) == 0 ? body() : 77);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 78;
}

// A part that cannot be looked into may have anything in it. What cannot be removed leaves its name.
TEST(PartsOfACheckpoint, PartsThatCannotBeReadOrRemoved) {
  SKIP_WITHOUT_FORK();
  for (const std::string name : {"tp0of2-pp0of1", "tp1of2-pp0of1"}) {
    for (const bool readable : {false, true}) {
      SCOPED_TRACE(name + (readable ? " cannot be removed" : " cannot be read"));
      const TempDir dir;
      ASSERT_EQ(save(kSmall, dir.path, "a", 1), "");
      const std::string part = dir.path + "/a/" + name;
      if (!readable) std::ofstream(part + "/mine") << "mine";
      fs::permissions(part, readable ? fs::perms{0555} : fs::perms{0311});
      const int code = as_nobody(dir.path, [&] {
        if (readable) return save(kSmall, dir.path, "a", 2) == "" && save(kSmall, dir.path, "a", 3) == "" ? 0 : 1;
        return save(kSmall, dir.path, "a", 2).find(name + ": Permission denied") != std::string::npos ? 0 : 1;
      });
      if (code == 77) GTEST_SKIP() << "nobody may not read the build directory";
      EXPECT_EQ(code, 0);
      EXPECT_EQ(files_in(dir.path), (readable ? std::vector<std::string>{".a.left.1", "a", "latest"}
                                              : std::vector<std::string>{"a", "latest"}));
      for (const auto& entry :
           fs::recursive_directory_iterator(dir.path, fs::directory_options::skip_permission_denied)) {
        if (fs::is_directory(entry)) fs::permissions(entry, fs::perms{0755});
      }
      EXPECT_EQ(fs::exists(part + "/mine"), !readable);
    }
  }
}

// Another job has begun to save to the tag.
TEST(PartsOfACheckpoint, TwoJobsDoNotSaveToOneTag) {
  const TempDir dir;
  const std::string path = dir.path + "/.a.lock";
  const int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  struct flock lock {};
  lock.l_type = F_WRLCK;
  ASSERT_EQ(::fcntl(file, F_OFD_SETLK, &lock), 0);
  EXPECT_NE(save(kSmall, dir.path, "a", 1).find("/a is being saved by another job: " + path), std::string::npos);
  EXPECT_EQ(files_in(dir.path), (std::vector<std::string>{".a.lock"}));
  ASSERT_EQ(save(kSmall, dir.path, "b", 1), "");
  ::close(file);  // as a kill does: the file stays
  ASSERT_EQ(save(kSmall, dir.path, "a", 1), "");
  EXPECT_EQ(files_in(dir.path), (std::vector<std::string>{"a", "b", "latest"}));
}

// A rank whose checkpoint plugin fails or holds calls by these rules, "" for none.
Trial faulty_trial(const Cut& cut, const std::string& rules) {
  Trial t = split_trial(cut, 1, 1);
  t.manifest_extra =
      "[plugins]\ncheckpoint = \"fault\"\n[plugin.fault]\nwraps = \"checkpoint\"\nrules = \"" + rules + "\"\n";
  return t;
}

// One part's disk is full, or its commit fails: no tag, and the next save succeeds.
TEST(PartsOfACheckpoint, AFailureInOnePartLeavesNothing) {
  for (const char* rule : {"checkpoint.write:1:fail=RESOURCE_EXHAUSTED", "checkpoint.commit:1:fail=DATA_LOSS"}) {
    const TempDir dir;
    const auto trial_of = [&](int rank) { return faulty_trial(kSaved, rank == 4 ? rule : ""); };
    each_rank(kSaved.world(), trial_of, [&](int rank, strata_engine* e, const std::string& error) {
      ASSERT_TRUE(e) << error;
      ASSERT_EQ(build_split_model(e, whole_model(2)), "");
      EXPECT_NE(strata_save(e, dir.path.c_str(), "a"), STRATA_OK) << rule << rank;
      EXPECT_TRUE(says("it failed on rank 4: fault: ")) << rule << rank << last();
      ASSERT_EQ(result_of(strata_save(e, dir.path.c_str(), "a")), "") << rule << rank;
    });
    EXPECT_EQ(files_in(dir.path), (std::vector<std::string>{"a", "latest"})) << rule;
  }
}

// A rank that finds nothing where others find a checkpoint would start anew alone.
TEST(PartsOfACheckpoint, NotFoundIsSaidByAllRanksOrNone) {
  const TempDir dir;
  const Cut cut = {1, 1, 2};
  ASSERT_EQ(save(cut, dir.path, "a", 1), "");
  const auto trial_of = [&](int rank) {
    return faulty_trial(cut, rank == 1 ? "checkpoint.load_open:1:fail=NOT_FOUND" : "");
  };
  each_rank(cut.world(), trial_of, [&](int rank, strata_engine* e, const std::string& error) {
    ASSERT_TRUE(e) << error;
    ASSERT_EQ(build_split_model(e, whole_model(2)), "");
    EXPECT_EQ(strata_load(e, dir.path.c_str(), nullptr), STRATA_FAILED_PRECONDITION) << rank << last();
    EXPECT_TRUE(says("whether it is there: rank 1 differs from rank 0")) << rank << last();
    ASSERT_EQ(result_of(strata_load(e, dir.path.c_str(), nullptr)), "") << rank;
  });
}

// Any stage of a save of a tag that is there fails on one rank: an error everywhere, and the old one can be loaded.
TEST(PartsOfACheckpoint, AFailureWhileReplacingLeavesTheOldOne) {
  struct Failing {
    Cut cut;
    int rank;
    std::vector<std::string> calls;
  };
  const std::vector<std::string> writes = {"write:2", "export_weights:3", "export_weights:4"};
  const std::vector<std::string> all = {"write:2", "export_weights:3", "export_weights:4", "commit:2"};
  // Rank 0 of the world asks for each part when the save begins, and again before it publishes.
  const std::string asked_last = "may_replace:" + std::to_string(2 * kSaved.tensor * kSaved.pipeline);
  for (const auto& [cut, failing, calls] : {Failing{{1, 1, 2}, 0, all},
                                            {{1, 1, 2}, 1, writes},
                                            {kSaved, 4, all},
                                            {kSaved, 0, {"may_replace:1", asked_last}}}) {
    for (const std::string& call : calls) {
      SCOPED_TRACE(testing::Message() << call << " on rank " << failing << " of " << cut.world());
      const TempDir dir;
      const auto trial_of = [&, cut = cut, failing = failing](int rank) {
        Trial t = faulty_trial(cut, rank == failing ? "checkpoint." + call + ":fail=RESOURCE_EXHAUSTED" : "");
        t.overrides.push_back("zero_optimization.gather_16bit_weights_on_model_save=true");
        return t;
      };
      each_rank(cut.world(), trial_of,
                [&, cut = cut, failing = failing](int rank, strata_engine* e, const auto& error) {
                  ASSERT_TRUE(e) << error;
                  ASSERT_EQ(build_split_model(e, whole_model(cut.pipeline)), "");
                  ASSERT_EQ(result_of(strata_save(e, dir.path.c_str(), "a")), "");
                  train(cut, e, 1);
                  EXPECT_EQ(strata_save(e, dir.path.c_str(), "a"), STRATA_RESOURCE_EXHAUSTED) << rank << last();
                  for (const char* tag : {"a", static_cast<const char*>(nullptr)}) {
                    ASSERT_EQ(result_of(strata_load(e, dir.path.c_str(), tag)), "");
                    EXPECT_EQ(steps_of(e), 0u);
                  }
                  train(cut, e, 1);
                  ASSERT_EQ(result_of(strata_save(e, dir.path.c_str(), "a")), "");
                  ASSERT_EQ(result_of(strata_load(e, dir.path.c_str(), nullptr)), "");
                  EXPECT_EQ(steps_of(e), 1u);
                });
      EXPECT_EQ(files_in(dir.path), (std::vector<std::string>{"a", "latest"}));
    }
  }
}

// Another job saves to the tag after rank 0 has opened the checkpoint and before rank 1 does: they notice, and load
// again.
TEST(ALoadWhileOthersSave, IsOfOneCheckpointOnAllRanks) {
  const TempDir dir;
  const Cut cut = {1, 1, 2};
  ASSERT_EQ(save(cut, dir.path, "a", 1), "");
  const auto trial_of = [&](int rank) {
    Trial t = faulty_trial(cut, rank == 1 ? "checkpoint.load_open:1:hold=others_save" : "");
    t.manifest_extra += "tag = \"others\"\n";
    return t;
  };
  each_rank(cut.world(), trial_of, [&](int rank, strata_engine* e, const auto& error) {
    ASSERT_TRUE(e) << error;
    ASSERT_EQ(build_split_model(e, whole_model(cut.pipeline)), "");
    std::thread others;
    if (rank == 0) {
      const void* table = nullptr;
      ASSERT_EQ(strata_get_plugin_interface(e, "checkpoint", STRATA_FAULT_CONTROL, &table), STRATA_OK) << last();
      others = std::thread([&, control = static_cast<const strata_fault_control_api*>(table)] {
        const auto opened = [&] {
          return control->count("others", 0, "load_info") == 1 && control->waiting("others_save") == 1;
        };
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
        while (!opened() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
        EXPECT_TRUE(opened());
        EXPECT_EQ(save({1, 1, 1}, dir.path, "a", 2), "");
        control->open_gate("others_save");
      });
    }
    EXPECT_EQ(strata_load(e, dir.path.c_str(), "a"), STRATA_FAILED_PRECONDITION) << rank;
    EXPECT_TRUE(says("(save): rank 1 differs from rank 0")) << rank << last();
    if (others.joinable()) others.join();
    ASSERT_EQ(result_of(strata_load(e, dir.path.c_str(), "a")), "");
    EXPECT_EQ(steps_of(e), 2u);
  });
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
