// replace_test.cc - a save of a tag that is there: it replaces the old checkpoint, and whatever ends or fails on the
// way leaves one of the two whole, never neither, never a mix.
//
// A child saves over "t"; beside it lies "other", which `latest` names. The child is killed at the k-th call that
// changes a file, or that call fails, with and without a file system that can exchange names. Then a reader, by tag and
// by `latest`, and the next save. The kill of every call is for STRATA_SOAK=1, as ./check soak runs it; else a seventh
// of the calls, and all of the last, which publish.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <random>

#include "tests/conformance_checkpoint/model.h"
#include "tests/support/tracer.h"

namespace fs = std::filesystem;

namespace strata::test {
namespace {

using testing::HasSubstr;
using Names = std::vector<std::string>;

Names names_in(const std::string& directory) {
  Names names;
  for (const auto& entry : fs::directory_iterator(directory)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

// Other ranks than the new one has: files that must go.
Model old_model() { return small_model(1, 3); }
Model new_model() { return small_model(2, 2); }

int save_new(const std::string& root) { return save(new_model(), root, "t") == STRATA_OK ? 0 : 1; }
int save_new_with_weights(const std::string& root) { return save(new_model(), root, "t", true) == STRATA_OK ? 0 : 1; }

class Replace : public testing::Test {
 protected:
  void prepare(bool weights) {
    weights_ = weights;
    ASSERT_EQ(save(old_model(), before_.path, "t", weights), STRATA_OK);
    ASSERT_EQ(save(small_model(3), before_.path, "other"), STRATA_OK);
    for (const Model& m : {old_model(), new_model()}) {
      ASSERT_EQ(export_file(m, before_.path, "w.h5"), STRATA_OK);
      right_.push_back(read_file(before_.path + "/w.h5"));
      fs::remove(before_.path + "/w.h5");
    }
  }

  void strike_at_calls(bool kill, bool can_exchange, bool weights) {
    ASSERT_NO_FATAL_FAILURE(prepare(weights));
    const int calls = Trial(*this).strike({0, kill, can_exchange}).calls;
    const char* soak = std::getenv("STRATA_SOAK");
    const bool all = soak && std::string(soak) == "1";
    for (int k = 1; k <= calls; ++k) {
      if (!all && k % 7 != 3 && k < calls - 35) continue;
      SCOPED_TRACE(testing::Message() << (kill ? "killed at" : "failed was") << " call " << k << " of " << calls);
      Trial trial(*this);
      const Struck struck = trial.strike({k, kill, can_exchange});
      ASSERT_EQ(struck.killed, kill);
      ASSERT_NO_FATAL_FAILURE(trial.check(struck, can_exchange));
      if (kill && k % 2 == 0) {  // a call that fails may be one that removes what was replaced
        ASSERT_NO_FATAL_FAILURE(trial.check_save_of_another_tag());
      }
      ASSERT_NO_FATAL_FAILURE(trial.check_next_save());
    }
    EXPECT_GT(seen_old_, 10);
    EXPECT_GT(seen_new_, 5);
    EXPECT_EQ(seen_aside_ > 0, !can_exchange && kill) << "the old one under its other name";
  }

  // A copy of what was there, and what becomes of it.
  struct Trial {
    explicit Trial(Replace& t) : test(t) { fs::copy(test.before_.path, dir.path, fs::copy_options::recursive); }
    Struck strike(const Strike& strike) {
      return run_traced(strike, test.weights_ ? save_new_with_weights : save_new, dir.path);
    }
    void check(const Struck& struck, bool can_exchange) {
      const bool is_new = difference(new_model(), dir.path, "t").empty();
      if (!is_new) {
        ASSERT_EQ(difference(old_model(), dir.path, "t"), "");
      }
      ASSERT_TRUE(is_new || !struck.succeeded);
      ASSERT_EQ(difference(small_model(3), dir.path, "other"), "");
      if (const std::string other = difference(small_model(3), dir.path, nullptr); !other.empty()) {
        ASSERT_TRUE(is_new) << "latest names an old checkpoint: " << other;
        ASSERT_EQ(difference(new_model(), dir.path, nullptr), "");
      }
      const bool aside = !fs::exists(dir.path + "/t");
      ASSERT_TRUE(!aside || !can_exchange);
      const std::string weights = dir.path + (aside ? "/.t.replaced" : "/t") + "/weights.h5";
      ASSERT_EQ(fs::exists(weights), test.weights_);
      ASSERT_TRUE(!test.weights_ || read_file(weights) == test.right_[is_new]);
      ++(is_new ? test.seen_new_ : test.seen_old_);
      test.seen_aside_ += aside;
    }
    // It leaves nothing of a save that died but what another rank may be writing.
    void check_save_of_another_tag() {
      ASSERT_EQ(save(small_model(5), dir.path, "u"), STRATA_OK) << failure_text(STRATA_INTERNAL);
      for (const std::string& name : names_in(dir.path)) ASSERT_TRUE(name[0] != '.' || name == ".t.partial") << name;
      ASSERT_TRUE(difference(new_model(), dir.path, "t").empty() || difference(old_model(), dir.path, "t").empty());
      ASSERT_EQ(difference(small_model(5), dir.path, nullptr), "");
      fs::remove_all(dir.path + "/u");
    }
    void check_next_save() {
      const strata_status again = save(new_model(), dir.path, "t", test.weights_);
      ASSERT_EQ(again, STRATA_OK) << failure_text(again);
      ASSERT_EQ(difference(new_model(), dir.path, "t"), "");
      ASSERT_EQ(difference(new_model(), dir.path, nullptr), "");
      ASSERT_EQ(names_in(dir.path), (Names{"latest", "other", "t"}));
      Names files = {"index.h5", "rank00000.h5", "rank00001.h5"};
      if (test.weights_) files.push_back("weights.h5");
      ASSERT_EQ(names_in(dir.path + "/t"), files);
    }
    Replace& test;
    TempDir dir;
  };

  TempDir before_;
  bool weights_ = false;
  std::vector<std::string> right_;
  int seen_old_ = 0, seen_new_ = 0, seen_aside_ = 0;
};

TEST_F(Replace, KilledAtAnyCall) {
  SKIP_WITHOUT_TRACING();
  strike_at_calls(true, true, false);
}

TEST_F(Replace, KilledAtAnyCallWithWeights) {
  SKIP_WITHOUT_TRACING();
  strike_at_calls(true, true, true);
}

TEST_F(Replace, KilledAtAnyCallWhereNamesCannotBeExchanged) {
  SKIP_WITHOUT_TRACING();
  if (!can_fail_calls()) GTEST_SKIP() << "calls cannot be made to fail on this processor";
  strike_at_calls(true, false, false);
}

TEST_F(Replace, AnyCallFails) {
  SKIP_WITHOUT_TRACING();
  if (!can_fail_calls()) GTEST_SKIP() << "calls cannot be made to fail on this processor";
  strike_at_calls(false, true, true);
}

TEST_F(Replace, AnyCallFailsWhereNamesCannotBeExchanged) {
  SKIP_WITHOUT_TRACING();
  if (!can_fail_calls()) GTEST_SKIP() << "calls cannot be made to fail on this processor";
  strike_at_calls(false, false, false);
}

// The disk is full from any call on. The process ends as it should, too: HDF5 tries to write what it holds at exit.
TEST_F(Replace, TheDiskIsFullFromAnyCallOn) {
  SKIP_WITHOUT_TRACING();
  if (!can_fail_calls()) GTEST_SKIP() << "calls cannot be made to fail on this processor";
  ASSERT_NO_FATAL_FAILURE(prepare(true));
  const int calls = Trial(*this).strike({}).calls;
  int failed = 0;
  for (int k = 1; k <= calls; k += k < calls - 35 ? 3 : 1) {
    SCOPED_TRACE(testing::Message() << "full from call " << k << " of " << calls);
    Trial trial(*this);
    const Struck struck = trial.strike({.call = k, .kill = false, .full_disk = true});
    ASSERT_NO_FATAL_FAILURE(trial.check(struck, true));
    ASSERT_NO_FATAL_FAILURE(trial.check_next_save());
    failed += !struck.succeeded;
  }
  EXPECT_GT(failed, calls / 6);
}

// A limit on the size of files is met in whatever file comes to it first.
TEST_F(Replace, NoFileMayBeLargerThan) {
  SKIP_WITHOUT_TRACING();
  ASSERT_NO_FATAL_FAILURE(prepare(true));
  static rlim_t limit;
  int refused = 0;
  for (const rlim_t bytes : {0, 1, 2000, 4096, 10000, 20000, 40000, 80000, 1 << 20}) {
    SCOPED_TRACE(bytes);
    limit = bytes;
    Trial trial(*this);
    const auto limited = [](const std::string& root) {
      ::signal(SIGXFSZ, SIG_IGN);
      const rlimit of_files = {limit, RLIM_INFINITY};
      return ::setrlimit(RLIMIT_FSIZE, &of_files) == 0 ? save_new_with_weights(root) : 2;
    };
    const Struck struck = run_traced({}, limited, trial.dir.path);
    ASSERT_NO_FATAL_FAILURE(trial.check(struck, true));
    ASSERT_NO_FATAL_FAILURE(trial.check_next_save());
    refused += !struck.succeeded;
  }
  EXPECT_GT(refused, 3);
  EXPECT_LT(refused, 9);
}

// A rank that does not know whether all succeeded abandons its save while rank 0 commits: at any moment.
TEST_F(Replace, NothingIsTakenOutOfACommit) {
  SKIP_WITHOUT_TRACING();
  ASSERT_NO_FATAL_FAILURE(prepare(false));
  const int calls = Trial(*this).strike({}).calls;
  int failed = 0;
  for (int k = 1; k <= calls; ++k) {
    SCOPED_TRACE(testing::Message() << "at call " << k << " of " << calls);
    Trial trial(*this);
    const auto abandon = [&] { fs::remove(trial.dir.path + "/.t.partial/rank00001.h5"); };
    const Struck struck = trial.strike({.call = k, .kill = false, .meanwhile = abandon});
    ASSERT_NO_FATAL_FAILURE(trial.check(struck, true));
    failed += !struck.succeeded;
  }
  EXPECT_GT(failed, 0);
  EXPECT_LT(failed, calls / 2);
}

// Rank 0 puts right what a killed save left while the other ranks already write: whatever it is about to call, what
// rank 1 has made meanwhile stays where it is.
TEST_F(Replace, ARankArrivesAtAnyCall) {
  SKIP_WITHOUT_TRACING();
  const auto write_rank_0 = [](const std::string& root) {
    const Model model = new_model();
    Instance instance;
    SaveArgs args(model, root, "t", 0);
    strata_ckpt_save* save = nullptr;
    if (instance.api->write(instance.self, &args.c, &save) != STRATA_OK) return 1;
    instance.api->abandon(instance.self, save);
    return 0;
  };
  for (const bool killed_before : {false, true}) {
    int calls = 1;
    for (int k = 1; k <= calls; ++k) {
      SCOPED_TRACE(testing::Message() << "at call " << k << ", something left: " << killed_before);
      TempDir dir;
      if (killed_before) {
        fs::create_directory(dir.path + "/.t.committing");
        write_file(dir.path + "/.t.committing/rank00001.h5", "of another save");
      }
      const std::string partial = dir.path + "/.t.partial", file = partial + "/.rank00001.h5";
      const auto arrive = [&] {
        fs::create_directory(partial);
        write_file(file, "half a file");
      };
      const Struck struck = run_traced({.call = k, .kill = false, .meanwhile = arrive}, write_rank_0, dir.path);
      EXPECT_TRUE(struck.succeeded);
      EXPECT_TRUE(fs::exists(file));
      EXPECT_EQ(names_in(dir.path), (Names{".t.partial"}));
      calls = struck.calls;
    }
    EXPECT_GT(calls, 10);
  }
}

// Over and over the same tag, until the process dies at a random moment.
TEST_F(Replace, KilledAtRandomTimes) {
  SKIP_WITHOUT_FORK();
  std::mt19937 random(5);
  TempDir dir;
  for (int round = 0; round < 24; ++round) {
    ASSERT_EQ(save(small_model(0), dir.path, "t"), STRATA_OK);
    const pid_t child = ::fork();
    if (child == 0) {
      for (uint64_t seed = 1;; ++seed) {
        if (save(small_model(seed), dir.path, "t") != STRATA_OK) ::_exit(1);
      }
    }
    ::usleep(1000 + random() % 60000);
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the saver failed by itself";
    uint64_t seed = 0;
    while (seed < 1000 && !difference(small_model(seed), dir.path, nullptr).empty()) ++seed;
    ASSERT_LT(seed, 1000u) << "round " << round << ": " << difference(small_model(0), dir.path, nullptr);
  }
}

// Whoever reads while the tag is replaced gets the one he opened or an error, without hashes that would tell.
TEST_F(Replace, AReaderSeesNoMix) {
  Options options;
  options.set("verify", false);
  for (const bool read_before : {false, true}) {
    TempDir dir;
    const Model first = small_model(1), second = small_model(2);
    ASSERT_EQ(save(first, dir.path, "t"), STRATA_OK);
    Instance instance(0, 1, &options);
    strata_ckpt_load* load = nullptr;
    ASSERT_EQ(instance.api->load_open(instance.self, dir.path.c_str(), "t", &load), STRATA_OK);
    std::vector<uint16_t> found(57 * 133), right(57 * 133);
    const auto read = [&](uint64_t begin, uint64_t end) {
      return instance.api->load_read(load, 0, "weight", begin, end - begin, &found[begin]);
    };
    if (read_before) {
      ASSERT_EQ(read(0, 100), STRATA_OK);  // of rank 0's file, which is open from now on
    }
    ASSERT_EQ(save(second, dir.path, "t"), STRATA_OK);
    ASSERT_EQ(save(second, dir.path, "t"), STRATA_OK);  // whose directory may have got the old one's inode
    EXPECT_EQ(read(0, 2048), read_before ? STRATA_OK : STRATA_UNAVAILABLE);
    EXPECT_EQ(read(0, found.size()), STRATA_UNAVAILABLE);  // rank 1's file
    EXPECT_THAT(failure_text(STRATA_UNAVAILABLE), HasSubstr(dir.path + "/t: was replaced by another save"));
    first.fill(0, 0, 0, right.size(), right.data());
    if (read_before) {
      EXPECT_TRUE(std::equal(found.begin(), found.begin() + 2048, right.begin()));
    }
    instance.api->load_close(load);
    EXPECT_EQ(difference(second, dir.path, "t"), "");
  }
}

// A directory, file or link of somebody's that has the name is left alone.
TEST_F(Replace, WhatIsNoCheckpointIsNotReplaced) {
  const auto expect_refused = [&](const std::string& root, const std::string& what) {
    EXPECT_EQ(save(new_model(), root, "t"), STRATA_ALREADY_EXISTS);
    const std::string text = failure_text(STRATA_ALREADY_EXISTS);
    EXPECT_THAT(text, HasSubstr(root + "/t: " + what));
    EXPECT_FALSE(fs::exists(root + "/.t.partial"));
  };
  TempDir dir;
  write_file(dir.path + "/t", "mine");
  expect_refused(dir.path, "is there, is no checkpoint");
  fs::remove(dir.path + "/t");
  ASSERT_EQ(save(old_model(), dir.path, "real"), STRATA_OK);
  fs::create_symlink("real", dir.path + "/t");
  expect_refused(dir.path, "is there, is no checkpoint");
  fs::remove(dir.path + "/t");
  fs::create_directory(dir.path + "/t");
  write_file(dir.path + "/t/notes.txt", "mine");
  expect_refused(dir.path, "has 'notes.txt' in it");
  fs::rename(dir.path + "/t/notes.txt", dir.path + "/t/rank1.h5");  // not a name that a commit gives
  expect_refused(dir.path, "has 'rank1.h5' in it");
  EXPECT_EQ(read_file(dir.path + "/t/rank1.h5"), "mine");
  fs::remove(dir.path + "/t/rank1.h5");
  EXPECT_EQ(save(new_model(), dir.path, "t"), STRATA_OK);  // an empty directory
  write_file(dir.path + "/t/notes.txt", "mine");
  expect_refused(dir.path, "has 'notes.txt' in it");
  EXPECT_EQ(difference(new_model(), dir.path, "t"), "") << "the old one is as it was";
}

// A kill between the renames left "b" committed and announced; whatever happens to the next save, of any tag, `latest`
// is never older than "b".
TEST_F(Replace, KilledTwice) {
  SKIP_WITHOUT_TRACING();
  ASSERT_NO_FATAL_FAILURE(prepare(false));
  ASSERT_EQ(save(small_model(4), before_.path, "b"), STRATA_OK);
  for (const bool is_new : {false, true}) {
    if (is_new) fs::remove_all(before_.path + "/t");
    write_file(before_.path + "/latest", "other\n");
    write_file(before_.path + "/.latest.next", "b\n");
    int seen_b = 0, seen_new = 0;
    const int calls = Trial(*this).strike({}).calls;
    for (int k = 1; k <= calls; ++k) {
      SCOPED_TRACE(testing::Message() << "killed at call " << k << " of " << calls << ", new " << is_new);
      Trial trial(*this);
      trial.strike({k});
      const bool is_b = difference(small_model(4), trial.dir.path, nullptr).empty();
      if (!is_b) {
        ASSERT_EQ(difference(new_model(), trial.dir.path, nullptr), "");
      }
      ++(is_b ? seen_b : seen_new);
    }
    EXPECT_GT(seen_b, 10);
    EXPECT_GT(seen_new, 1);
  }
}

// Another job saves to the tag at any moment of a save: it is refused or comes first or last, and what is there is of
// one of them.
TEST_F(Replace, AnotherJobSavesToTheTag) {
  SKIP_WITHOUT_TRACING();
  ASSERT_NO_FATAL_FAILURE(prepare(false));
  const int calls = Trial(*this).strike({}).calls;
  int refused = 0;
  for (int k = 1; k <= calls; ++k) {
    SCOPED_TRACE(testing::Message() << "at call " << k << " of " << calls);
    Trial trial(*this);
    strata_status second = STRATA_OK;
    const Struck struck = trial.strike({k, false, true, false, [&] {
                                          second = save(small_model(6, 2), trial.dir.path, "t");
                                          if (second != STRATA_OK) {
                                            EXPECT_THAT(failure_text(second), HasSubstr("/.t.lock is locked"));
                                          }
                                        }});
    ASSERT_TRUE(second == STRATA_OK || second == STRATA_FAILED_PRECONDITION) << second;
    ASSERT_TRUE(struck.succeeded);
    const std::string other = difference(new_model(), trial.dir.path, "t");
    if (!other.empty()) {
      ASSERT_EQ(second, STRATA_OK) << other;
      ASSERT_EQ(difference(small_model(6, 2), trial.dir.path, "t"), "") << other;
    }
    refused += second != STRATA_OK;
    ASSERT_EQ(names_in(trial.dir.path), (Names{"latest", "other", "t"}));
  }
  EXPECT_GT(refused, calls - 10);
}

// At any moment of a save, a reader that opened the checkpoint before reads that one or is told, and one that opens it
// now gets the old one or the new one.
TEST_F(Replace, ReadersAtAnyMoment) {
  SKIP_WITHOUT_TRACING();
  ASSERT_NO_FATAL_FAILURE(prepare(false));
  constexpr uint64_t kElements = 57 * 133;
  std::vector<uint16_t> weight(kElements), right_weight(kElements);
  std::vector<uint32_t> master(kElements), right_master(kElements);
  old_model().fill(0, 0, 0, kElements, right_weight.data());
  old_model().fill(0, 1, 0, kElements, right_master.data());
  for (const bool can_exchange : {true, false}) {
    if (!can_exchange && !can_fail_calls()) break;
    const int calls = Trial(*this).strike({0, false, can_exchange}).calls;
    int told = 0;
    for (int k = std::max(1, calls - 45); k <= calls; ++k) {
      SCOPED_TRACE(testing::Message() << "at call " << k << " of " << calls << ", exchange " << can_exchange);
      Trial trial(*this);
      Instance instance;
      strata_ckpt_load* load = nullptr;
      ASSERT_EQ(instance.api->load_open(instance.self, trial.dir.path.c_str(), "t", &load), STRATA_OK);
      const auto read = [&](const char* array, uint64_t begin, uint64_t end, void* out) {
        const strata_status code = instance.api->load_read(load, 0, array, begin, end - begin, out);
        if (code != STRATA_OK) {
          EXPECT_EQ(code, STRATA_UNAVAILABLE) << failure_text(code);
          failure_text(code);
          ++told;
        }
        return code == STRATA_OK;
      };
      ASSERT_TRUE(k % 2 || read("weight", 0, 10, weight.data()));  // rank 0's file is open from now on, or not
      const auto meanwhile = [&] {
        EXPECT_TRUE(!read("weight", 0, kElements, weight.data()) || weight == right_weight);
        EXPECT_TRUE(!read("master", 0, kElements, master.data()) || master == right_master);
        const std::string other = difference(new_model(), trial.dir.path, "t");
        if (!other.empty()) {
          EXPECT_EQ(difference(old_model(), trial.dir.path, "t"), "") << other;
        }
      };
      trial.strike({k, false, can_exchange, false, meanwhile});
      instance.api->load_close(load);
    }
    EXPECT_GT(told, 10);
    EXPECT_LT(told, 90);
  }
}

int read_either(const std::string& root) {
  const std::string other = difference(new_model(), root, "t");
  if (other.empty() || difference(old_model(), root, "t").empty()) return 0;
  return other.find("was replaced by another save") != std::string::npos ? 0 : 1;
}

// The other way round: at any call of a reader the checkpoint is set aside, or all of it is replaced.
TEST_F(Replace, AtAnyCallOfAReader) {
  SKIP_WITHOUT_TRACING();
  ASSERT_NO_FATAL_FAILURE(prepare(false));
  ASSERT_EQ(save(new_model(), before_.path, "t"), STRATA_OK);
  for (const bool aside : {true, false}) {
    const int calls = run_traced({}, read_either, before_.path).calls;
    ASSERT_GT(calls, 4);
    for (int k = 1; k <= calls; ++k) {
      SCOPED_TRACE(testing::Message() << "at call " << k << " of " << calls << ", aside " << aside);
      Trial trial(*this);
      const Struck struck = run_traced({k, false, true, false,
                                        [&] {
                                          if (aside)
                                            return fs::rename(trial.dir.path + "/t", trial.dir.path + "/.t.replaced");
                                          EXPECT_EQ(save(old_model(), trial.dir.path, "t"), STRATA_OK);
                                        }},
                                       read_either, trial.dir.path);
      EXPECT_TRUE(struck.succeeded);
    }
  }
}

// What is under the names that a save uses on the way: links go and what they lead to stays; what cannot be emptied is
// moved; a checkpoint that was set aside is lost by no save that is refused.
TEST_F(Replace, LeftoversOfAnyKind) {
  for (const char* name : {"/.t.committing", "/.t.replaced", "/.t.partial"}) {
    for (const std::string kind : {"link", "dangling", "file", "tree"}) {
      SCOPED_TRACE(name + (" is a " + kind));
      if (kind == "tree" && name == std::string("/.t.partial")) continue;  // other ranks write there
      TempDir dir, elsewhere;
      ASSERT_EQ(save(old_model(), dir.path, "t"), STRATA_OK);
      write_file(elsewhere.path + "/precious", "mine");
      const std::string path = dir.path + name;
      if (kind == "link") fs::create_directory_symlink(elsewhere.path, path);
      if (kind == "dangling") fs::create_symlink("nowhere", path);
      if (kind == "file") write_file(path, "mine");
      if (kind == "tree") {
        fs::create_directories(path + "/deep");
        write_file(path + "/deep/notes.txt", "mine");
      }
      const strata_status saved = save(new_model(), dir.path, "t");
      ASSERT_EQ(saved, STRATA_OK) << failure_text(saved);
      EXPECT_EQ(difference(new_model(), dir.path, nullptr), "");
      EXPECT_EQ(read_file(elsewhere.path + "/precious"), "mine");
      EXPECT_EQ(names_in(dir.path), kind == "tree" ? (Names{".t.left.1", "latest", "t"}) : (Names{"latest", "t"}));
      if (kind == "tree") {
        EXPECT_EQ(read_file(dir.path + "/.t.left.1/deep/notes.txt"), "mine");
      }
    }
  }
  TempDir dir;
  ASSERT_EQ(save(old_model(), dir.path, "t"), STRATA_OK);
  fs::rename(dir.path + "/t", dir.path + "/.t.replaced");
  fs::create_directory(dir.path + "/t");
  write_file(dir.path + "/t/notes.txt", "mine");
  EXPECT_EQ(save(new_model(), dir.path, "t"), STRATA_ALREADY_EXISTS);
  failure_text(STRATA_ALREADY_EXISTS);
  fs::remove_all(dir.path + "/t");
  EXPECT_EQ(difference(old_model(), dir.path, "t"), "");
  fs::create_directory(dir.path + "/t");  // empty: it is no checkpoint either
  Model broken = new_model();
  SaveArgs args(broken, dir.path, "t", 0);
  args.fail_with = STRATA_INTERNAL;
  args.fail_at = 0;
  Instance instance;
  strata_ckpt_save* s = nullptr;
  EXPECT_NE(instance.api->write(instance.self, &args.c, &s), STRATA_OK);
  failure_text(STRATA_INTERNAL);
  EXPECT_EQ(difference(old_model(), dir.path, "t"), "");
}

// A damaged checkpoint is one, too, and a save that is given up leaves the old one.
TEST_F(Replace, DamagedOnesAreReplacedAndAbandonedSavesAreNone) {
  TempDir dir;
  ASSERT_EQ(save(old_model(), dir.path, "t"), STRATA_OK);
  const Model next = new_model();
  Instance instance;
  strata_ckpt_save* saves[2] = {};
  for (int r = 0; r < 2; ++r) {
    SaveArgs args(next, dir.path, "t", r);
    ASSERT_EQ(instance.api->write(instance.self, &args.c, &saves[r]), STRATA_OK);
  }
  EXPECT_EQ(difference(old_model(), dir.path, "t"), "") << "while the next is being written";
  for (auto* s : saves) instance.api->abandon(instance.self, s);
  EXPECT_EQ(difference(old_model(), dir.path, "t"), "");
  EXPECT_EQ(names_in(dir.path), (Names{"latest", "t"}));
  write_file(dir.path + "/t/index.h5", "this is not HDF5");
  fs::remove(dir.path + "/t/rank00001.h5");
  ASSERT_EQ(save(next, dir.path, "t"), STRATA_OK);
  EXPECT_EQ(difference(next, dir.path, nullptr), "");
  EXPECT_EQ(names_in(dir.path + "/t"), (Names{"index.h5", "rank00000.h5", "rank00001.h5"}));
}

}  // namespace
}  // namespace strata::test
