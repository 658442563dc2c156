// kill_test.cc - a process that dies while saving, at every file system call and at random times, loses at most the
// checkpoint in progress: what `latest` names opens and is right, and the next save under the same tag works.
//
// The first tests trace a child and kill it at the k-th call that changes a file or the tree, for every k until the
// save completes. The last kills by a timer. Content follows the tag.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "tests/conformance_checkpoint/model.h"
#include "tests/support/tracer.h"

namespace fs = std::filesystem;

namespace strata::test {
namespace {

int save_new(const std::string& root) { return save(small_model(2), root, "new") == STRATA_OK ? 0 : 1; }
int save_new_with_weights(const std::string& root) {
  return save(small_model(2), root, "new", true) == STRATA_OK ? 0 : 1;
}
int export_new(const std::string& root) { return export_file(small_model(2), root, "w.h5") == STRATA_OK ? 0 : 1; }

// A checkpoint that is there is whole, with its weight file where it has one; one that is not is saved again.
void kill_a_save_everywhere(int (*save_new)(const std::string&), bool weights) {
  const Model old_model = small_model(1), new_model = small_model(2);
  TempDir reference;
  ASSERT_EQ(export_new(reference.path), 0);
  const std::string right = read_file(reference.path + "/w.h5");
  int committed = 0, lost = 0;
  for (int k = 1;; ++k) {
    ASSERT_LT(k, 2000);
    TempDir dir;
    const std::string file = dir.path + "/new/weights.h5";
    ASSERT_EQ(save(old_model, dir.path, "old"), STRATA_OK);
    const Struck struck = run_traced({k}, save_new, dir.path);
    ASSERT_TRUE(struck.killed || struck.succeeded);
    const bool is_new = fs::exists(dir.path + "/new");  // committed is what counts, `latest` may still follow
    ASSERT_EQ(difference(is_new ? new_model : old_model, dir.path, nullptr), "") << "killed at call " << k;
    ASSERT_EQ(difference(old_model, dir.path, "old"), "") << "killed at call " << k;
    if (is_new) {
      ASSERT_EQ(difference(new_model, dir.path, "new"), "") << "killed at call " << k;
      ASSERT_EQ(fs::exists(file), weights) << "killed at call " << k;
    }
    ++(is_new ? committed : lost);
    const strata_status again = save(new_model, dir.path, "new", weights);
    ASSERT_EQ(again, STRATA_OK) << "killed at call " << k << failure_text(again);
    ASSERT_EQ(difference(new_model, dir.path, "new"), "") << "killed at call " << k;
    ASSERT_TRUE(!weights || read_file(file) == right) << "killed at call " << k;
    ASSERT_EQ(std::distance(fs::directory_iterator(dir.path + "/new"), {}), weights ? 4 : 3) << "killed at call " << k;
    ASSERT_FALSE(fs::exists(dir.path + "/.new.partial"));
    if (!struck.killed) break;
  }
  EXPECT_GT(lost, 30);
  EXPECT_GT(committed, 3);
}

TEST(Kill, AtEveryFileSystemCallOfASave) {
  SKIP_WITHOUT_TRACING();
  kill_a_save_everywhere(save_new, false);
}

TEST(Kill, AtEveryFileSystemCallOfASaveWithWeights) {
  SKIP_WITHOUT_TRACING();
  kill_a_save_everywhere(save_new_with_weights, true);
}

TEST(Kill, AtEveryFileSystemCallOfAnExport) {
  SKIP_WITHOUT_TRACING();
  TempDir reference;
  ASSERT_EQ(export_new(reference.path), 0);
  const std::string right = read_file(reference.path + "/w.h5");
  for (int k = 1;; ++k) {
    ASSERT_LT(k, 2000);
    TempDir dir;
    const Struck struck = run_traced({k}, export_new, dir.path);
    ASSERT_TRUE(struck.killed || struck.succeeded);
    if (fs::exists(dir.path + "/w.h5")) {
      ASSERT_TRUE(read_file(dir.path + "/w.h5") == right) << "killed at call " << k;
      fs::remove(dir.path + "/w.h5");
    }
    ASSERT_EQ(export_new(dir.path), 0) << "killed at call " << k;
    ASSERT_TRUE(read_file(dir.path + "/w.h5") == right) << "killed at call " << k;
    if (!struck.killed) break;
  }
}

// Saving step after step until the process dies at a random moment, again and again in one directory.
TEST(Kill, AtRandomTimes) {
  SKIP_WITHOUT_FORK();
  std::mt19937 random(11);
  TempDir dir;
  ASSERT_EQ(save(small_model(1000), dir.path, "1000"), STRATA_OK);
  int next = 1001;
  for (int round = 0; round < 24; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (int step = next;; ++step) {
        if (save(small_model(static_cast<uint64_t>(step)), dir.path, std::to_string(step)) != STRATA_OK) ::_exit(1);
      }
    }
    ::usleep(1000 + random() % 40000);
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the saver failed by itself";
    int latest = next - 1;  // the newest committed one, whether `latest` names it yet or not
    while (fs::exists(dir.path + "/" + std::to_string(latest + 1))) ++latest;
    ASSERT_EQ(difference(small_model(static_cast<uint64_t>(latest)), dir.path, nullptr), "") << "round " << round;
    next = latest + 1;
  }
}

}  // namespace
}  // namespace strata::test
