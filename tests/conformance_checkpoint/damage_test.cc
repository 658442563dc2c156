// damage_test.cc - files that are missing, cut, swapped or flipped are errors that name the file; never a crash, never
// wrong numbers. And a disk that is full is noticed before any data is written.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "tests/conformance_checkpoint/model.h"

namespace fs = std::filesystem;

namespace strata::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

struct Outcome {
  strata_status code;
  std::string text;
};

Outcome open_only(const std::string& root, const char* tag) {
  Instance instance;
  strata_ckpt_load* load = nullptr;
  const strata_status code = instance.api->load_open(instance.self, root.c_str(), tag, &load);
  if (load) instance.api->load_close(load);
  return {code, failure_text(code)};
}

class Damage : public testing::Test {
 protected:
  void SetUp() override {
    model.shard(2);
    ASSERT_EQ(save(model, dir.path, "t"), STRATA_OK);
  }
  std::string file(const std::string& name) const { return dir.path + "/t/" + name; }

  TempDir dir;
  Model model = ordinary_model(1);
};

TEST_F(Damage, TruncationAtAnyOffset) {
  std::mt19937_64 random(7);
  for (const char* name : {"index.h5", "rank00000.h5", "rank00001.h5"}) {
    const std::string good = read_file(file(name));
    std::vector<size_t> sizes = {0, 1, good.size() - 1};
    for (int k = 0; k < 10; ++k) sizes.push_back(random() % good.size());
    for (size_t n : sizes) {
      write_file(file(name), good.substr(0, n));
      const Outcome o = open_only(dir.path, nullptr);
      EXPECT_EQ(o.code, STRATA_DATA_LOSS) << name << " cut at " << n;
      EXPECT_THAT(o.text, HasSubstr(file(name)));
    }
    write_file(file(name), good);
  }
  EXPECT_EQ(difference(model, dir.path, nullptr), "");
}

TEST_F(Damage, MissingFilesAreNamed) {
  for (const char* name : {"index.h5", "rank00000.h5", "rank00001.h5"}) {
    fs::rename(file(name), dir.path + "/away");
    const Outcome o = open_only(dir.path, nullptr);
    EXPECT_EQ(o.code, STRATA_DATA_LOSS);
    EXPECT_EQ(open_only(dir.path, "t").code, STRATA_DATA_LOSS);
    EXPECT_THAT(o.text, HasSubstr(file(name)));
    fs::create_directory(file(name));  // something else in its place
    EXPECT_EQ(open_only(dir.path, nullptr).code, STRATA_DATA_LOSS);
    fs::remove(file(name));
    fs::rename(dir.path + "/away", file(name));
  }
}

TEST_F(Damage, LatestThatLeadsNowhere) {
  EXPECT_EQ(open_only(dir.path, "nope").code, STRATA_NOT_FOUND);
  EXPECT_EQ(open_only(dir.path + "/nope", nullptr).code, STRATA_NOT_FOUND);
  write_file(dir.path + "/latest", "gone\n");
  const Outcome o = open_only(dir.path, nullptr);
  EXPECT_EQ(o.code, STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(o.text, HasSubstr("latest names 'gone', which is not there; there are t: name one"));
  for (const char* text : {"", "\n", "../t\n", ".t.partial\n"}) {
    write_file(dir.path + "/latest", text);
    EXPECT_EQ(open_only(dir.path, nullptr).code, STRATA_DATA_LOSS) << text;
  }
  EXPECT_EQ(difference(model, dir.path, "t"), "");
}

TEST_F(Damage, WithoutLatestTheCommittedTagsAreNamed) {
  fs::create_directories(dir.path + "/.u.partial");
  fs::create_directories(dir.path + "/not_a_checkpoint");
  ASSERT_EQ(save(model, dir.path, "s9"), STRATA_OK);
  fs::remove(dir.path + "/latest");
  const Outcome o = open_only(dir.path, nullptr);
  EXPECT_EQ(o.code, STRATA_FAILED_PRECONDITION);
  EXPECT_EQ(o.text, "checkpoint load: " + dir.path + "/latest is not there; there are s9, t: name one");
  write_file(dir.path + "/latest", "gone\n");
  EXPECT_THAT(open_only(dir.path, nullptr).text, HasSubstr("there are s9, t: name one"));
  const Outcome other = open_only(dir.path, "s8");
  EXPECT_EQ(other.code, STRATA_NOT_FOUND);
  EXPECT_EQ(other.text, "checkpoint load: " + dir.path + "/s8: there is no such checkpoint; there are s9, t");
}

// A program starts anew on NOT_FOUND: it has to mean that nothing is there which it would write over.
TEST_F(Damage, NotFoundMeansThatThereIsNoCheckpointAtAll) {
  const auto expect = [&](const std::string& root, strata_status code, const std::string& text) {
    const Outcome o = open_only(root, nullptr);
    EXPECT_EQ(o.code, code) << o.text;
    EXPECT_THAT(o.text, HasSubstr(text));
  };
  expect(dir.path + "/nope", STRATA_NOT_FOUND, "/nope: there is no such directory");
  expect(dir.path + "/t", STRATA_NOT_FOUND, "no checkpoint was committed in");
  const std::string root = dir.path + "/root";  // what a first save that was killed leaves, beside other things
  fs::create_directories(root + "/.a.partial");
  fs::create_directories(root + "/logs/today");
  write_file(root + "/.latest.next", "a\n");
  expect(root, STRATA_NOT_FOUND, "no checkpoint was committed in");
  write_file(root + "/latest", "a\n");  // there was one, once
  expect(root, STRATA_FAILED_PRECONDITION, "latest names 'a', which is not there, nor is another checkpoint");
  fs::remove(root + "/latest");
  fs::copy(dir.path + "/t", root + "/.b.replaced", fs::copy_options::recursive);  // between two renames of a save
  expect(root, STRATA_FAILED_PRECONDITION, "latest is not there; there are b: name one");
  EXPECT_EQ(difference(model, root, "b"), "");
  fs::remove_all(root + "/.b.replaced");
  fs::create_directories(root + "/c/tp0of2-pp0of1");
  fs::copy(dir.path + "/t", root + "/c/tp0of2-pp0of1/c", fs::copy_options::recursive);  // of a model in parts
  expect(root, STRATA_FAILED_PRECONDITION, "latest is not there; there are c: name one");
}

TEST_F(Damage, FilesOfAnotherCheckpoint) {
  Model other = ordinary_model(2);
  other.shard(2);
  ASSERT_EQ(save(other, dir.path, "u"), STRATA_OK);
  const auto expect_refused = [&](const std::string& name, const std::string& bytes) {
    const std::string good = read_file(file(name));
    write_file(file(name), bytes);
    const Outcome o = open_only(dir.path, "t");
    EXPECT_EQ(o.code, STRATA_DATA_LOSS);
    EXPECT_THAT(o.text, HasSubstr(dir.path + "/t/"));
    write_file(file(name), good);
  };
  expect_refused("rank00001.h5", read_file(dir.path + "/u/rank00001.h5"));
  expect_refused("rank00001.h5", read_file(file("rank00000.h5")));
  expect_refused("index.h5", read_file(dir.path + "/u/index.h5"));
  expect_refused("index.h5", read_file(file("rank00000.h5")));
  expect_refused("index.h5", "this is not HDF5");
  EXPECT_EQ(difference(model, dir.path, "t"), "");
}

// Flips one bit at a time anywhere in a file and reads everything in a child process: the result is an error or, when
// the bit means nothing to us, the right numbers. Never a signal, never other numbers.
void flip_bits(const Model& model, const std::string& root, const std::string& path, int times, unsigned seed) {
  const std::string good = read_file(path);
  std::mt19937_64 random(seed);
  int noticed = 0;
  for (int k = 0; k < times; ++k) {
    std::string bad = good;
    const size_t at = random() % (k % 2 ? bad.size() : std::min<size_t>(bad.size(), 16384));
    bad[at] = static_cast<char>(bad[at] ^ (1 << (random() % 8)));
    write_file(path, bad);
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(60);
      const std::string d = difference(model, root, "t");
      ::_exit(d.empty() ? 0 : d.find("bits of") == std::string::npos ? 1 : 2);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << path << " byte " << at << ": signal " << WTERMSIG(status);
    EXPECT_LT(WEXITSTATUS(status), 2) << path << " byte " << at << ": wrong numbers";
    noticed += WIFEXITED(status) && WEXITSTATUS(status) == 1;
  }
  EXPECT_GT(noticed, 0);
  write_file(path, good);
}

TEST_F(Damage, FlippedBits) {
  flip_bits(model, dir.path, file("index.h5"), 60, 1);
  flip_bits(model, dir.path, file("rank00001.h5"), 60, 2);
}

TEST_F(Damage, FlippedDataIsNamedAndVerifyCanBeTurnedOff) {
  std::string bad = read_file(file("rank00001.h5"));
  const float needle = [&] {  // an element of rank 1: the second half of segment 1
    float f;
    model.fill(1, 0, model.segments[1].owned[1].first + 5, 1, &f);
    return f;
  }();
  const size_t at = bad.find(std::string(reinterpret_cast<const char*>(&needle), 4));
  ASSERT_NE(at, std::string::npos);
  bad[at] = static_cast<char>(bad[at] ^ 1);
  write_file(file("rank00001.h5"), bad);
  const std::string text = difference(model, dir.path, "t", 3);
  EXPECT_THAT(text, HasSubstr(file("rank00001.h5")));
  EXPECT_THAT(text, HasSubstr("are damaged: XXH3 is"));
  Options options;
  options.set("verify", false);
  EXPECT_THAT(difference(model, dir.path, "t", 1, &options), HasSubstr("bits of weight"));
}

TEST(DiskFull, IsNoticedBeforeTheDataAndLeavesNothing) {
  TempDir dir;
  if (::mount("none", dir.path.c_str(), "tmpfs", 0, "size=2m") != 0) {
    GTEST_SKIP() << "cannot mount a small file system here (needs root)";
  }
  Model m;
  const auto s = m.segment("u", {{"weight", STRATA_F32}});
  m.param(s, "p", {1 << 20});
  m.shard(2);
  Instance instance;
  SaveArgs args(m, dir.path + "/root", "t", 0);
  strata_ckpt_save* handle = nullptr;
  EXPECT_EQ(instance.api->write(instance.self, &args.c, &handle), STRATA_RESOURCE_EXHAUSTED);
  const std::string text = failure_text(STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(text, HasSubstr("bytes are free"));
  EXPECT_THAT(text, HasSubstr("wanted 2"));
  EXPECT_EQ(args.calls, 0u) << "data was read before space was found";
  EXPECT_TRUE(fs::is_empty(dir.path + "/root"));
  EXPECT_EQ(export_file(m, dir.path + "/root", "w.h5"), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_TRUE(fs::is_empty(dir.path + "/root"));
  ::umount2(dir.path.c_str(), MNT_DETACH);
}

TEST(DiskFull, SpaceTakenByAnotherRankIsNoticedToo) {
  TempDir dir;
  if (::mount("none", dir.path.c_str(), "tmpfs", 0, "size=6m") != 0) {
    GTEST_SKIP() << "cannot mount a small file system here (needs root)";
  }
  Model m;
  const auto s = m.segment("u", {{"weight", STRATA_F32}});
  m.param(s, "p", {2 << 20});
  m.shard(2);
  EXPECT_EQ(save(m, dir.path, "t"), STRATA_RESOURCE_EXHAUSTED);  // 4 MiB fit once
  EXPECT_TRUE(fs::is_empty(dir.path));
  ::umount2(dir.path.c_str(), MNT_DETACH);
}

TEST(Direct, FallbackIsLoggedOnceWithItsReason) {
  TempDir dir;
  const fs::path proc_like = "/dev/shm";
  if (!fs::exists(proc_like)) GTEST_SKIP() << "no /dev/shm";
  const std::string root = (proc_like / fs::path(dir.path).filename()).string();
  Model m = ordinary_model();
  m.shard(1);
  Instance instance;
  for (const char* tag : {"a", "b"}) {
    SaveArgs args(m, root, tag, 0);
    strata_ckpt_save* s = nullptr;
    ASSERT_EQ(instance.api->write(instance.self, &args.c, &s), STRATA_OK);
    ASSERT_EQ(instance.api->commit(instance.self, s), STRATA_OK);
  }
  EXPECT_EQ(difference(m, root, nullptr), "");
  int said = 0;
  for (const std::string& line : instance.rank->log_lines) said += line.find("no O_DIRECT") != std::string::npos;
  EXPECT_THAT(said, AnyOf(0, 1));  // 0 where tmpfs has O_DIRECT
  fs::remove_all(root);
}

}  // namespace
}  // namespace strata::test
