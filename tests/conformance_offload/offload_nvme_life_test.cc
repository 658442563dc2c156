// The life of offload_nvme's files: nothing left behind, what the dead left reclaimed, the living left alone.
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#include <fstream>

#include "nvme_options.h"
#include "shadow.h"
#include "tests/support/disk_dirs.h"
#include "tests/support/tracer.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr uint64_t kMiB = 1 << 20;

TEST(OffloadNvmeFiles, TwoInstancesOfOneProcessShareNothing) {
  DiskDir dir;
  Tier a("offload_nvme"), b("offload_nvme");
  ASSERT_EQ(a.open(at(dir.path)), STRATA_OK);
  ASSERT_EQ(b.open(at(dir.path)), STRATA_OK);
  EXPECT_EQ(dir.entries(), 2u);
  Shadow in_a(a, kMiB, 1), in_b(b, 2 * kMiB, 2);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(in_a.random_calls(3, 4096), "");
    EXPECT_EQ(in_b.random_calls(3, 4096), "");
  }
  a.close();
  EXPECT_EQ(dir.entries(), 1u);
  EXPECT_EQ(in_b.read_all(), "");
  b.close();
  EXPECT_EQ(dir.entries(), 0u);
}

TEST(OffloadNvmeFiles, APathThatVanishesIsNamed) {
  DiskDir dir;
  Tier tier("offload_nvme");
  const std::string path = dir.path + "/mounted";
  fs::create_directory(path);
  ASSERT_EQ(tier.open(at(path).set("segment_bytes", int64_t(kMiB))), STRATA_OK);
  Shadow region(tier, kMiB, 1);
  fs::remove_all(path);
  EXPECT_EQ(region.random_calls(3, 4096), "") << "open files stay";
  strata_region none = 0;
  ASSERT_EQ(tier.api->alloc(tier.self, kMiB, "layer7 master", &none), STRATA_NOT_FOUND);
  EXPECT_THAT(reason(STRATA_NOT_FOUND), AllOf(HasSubstr("layer7 master"), HasSubstr(path), HasSubstr("1048576 bytes")));
}

TEST(OffloadNvmeFiles, NamesAreBoundedAndPlain) {
  DiskDir dir;
  Tier tier("offload_nvme");
  tier.rank.job = "../" + std::string(5000, 'j') + "/\nhost elsewhere\r\npid 1";
  tier.rank.base.job = tier.rank.job.c_str();
  ASSERT_EQ(tier.open(at(dir.path)), STRATA_OK);
  ASSERT_EQ(dir.entries(), 1u);
  const std::string name = fs::directory_iterator(dir.path)->path().filename();
  EXPECT_LE(name.size(), 100u);
  EXPECT_THAT(name, testing::MatchesRegex("strata-[-A-Za-z0-9_.]*-r0-[0-9]+-0"));
  std::ifstream record(dir.path + "/" + name + "/owner");
  int lines = 0;
  for (std::string line; std::getline(record, line);) {
    ++lines;
    EXPECT_EQ(line.rfind("job ", 0) == 0, line.find("host elsewhere_") != std::string::npos) << line;
  }
  EXPECT_EQ(lines, 7) << "the job's name is one of them";
  tier.close();
  tier.rank.base.job = nullptr;
  ASSERT_EQ(tier.open(at(dir.path)), STRATA_OK);
  EXPECT_THAT(fs::directory_iterator(dir.path)->path().filename(), testing::MatchesRegex("strata-r0-[0-9]+-0"));
}

// A job of its own, in a process of its own, that writes until it is killed or told to end.
class Neighbour {
 public:
  explicit Neighbour(const std::string& path, bool writes = true) {
    int ready[2], go[2];
    if (::pipe(ready) != 0 || ::pipe(go) != 0) ADD_FAILURE() << "pipe";
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(go[1]);
      run(path, writes, ready[1], go[0]);
    }
    ::close(ready[1]), ::close(go[0]);
    go_ = go[1];
    char byte = 0;
    if (::read(ready[0], &byte, 1) != 1) ADD_FAILURE() << "the neighbour did not start";
    ::close(ready[0]);
  }
  ~Neighbour() {
    if (pid_ > 0) kill();
    ::close(go_);
  }
  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  // Its exit status: 0 when all its bytes were right to the end.
  int end() {
    if (::write(go_, "e", 1) != 1) ADD_FAILURE() << "the neighbour is gone";
    int status = 0;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return status;
  }

 private:
  [[noreturn]] static void run(const std::string& path, bool writes, int ready, int go) {
    int status = 1;
    {
      Tier tier("offload_nvme");
      if (tier.open(at(path)) == STRATA_OK) {
        Shadow region(tier, 4 * kMiB, 1);
        status = region.write(0, 4 * kMiB).empty() ? 0 : 1;
        ::fcntl(go, F_SETFL, writes ? O_NONBLOCK : 0);
        if (::write(ready, "r", 1) != 1) status = 1;
        char byte;
        while (::read(go, &byte, 1) < 0) {
          if (!region.random_calls(2, 4096).empty()) status = 1;
        }
        if (!region.read_all().empty()) status = 1;
      }
    }
    ::_exit(status);
  }
  pid_t pid_ = 0;
  int go_ = -1;
};

TEST(OffloadNvmeFiles, WhatAKilledJobLeftIsReclaimed) {
  DiskDir dir;
  std::mt19937 random(11);
  for (int round = 0; round < 8; ++round) {
    Neighbour doomed(dir.path);
    ::usleep(random() % 30'000);
    doomed.kill();
    ASSERT_EQ(dir.entries(), 1u) << "round " << round;
    Tier tier("offload_nvme");
    ASSERT_EQ(tier.open(at(dir.path)), STRATA_OK);
    EXPECT_EQ(mentions(tier, "reclaimed "), 1u);
    EXPECT_EQ(dir.entries(), 1u) << "its own";
    tier.close();
    ASSERT_EQ(dir.entries(), 0u);
  }
}

TEST(OffloadNvmeFiles, ALivingJobIsLeftAlone) {
  DiskDir dir;
  Neighbour lives(dir.path), sleeps(dir.path, false);
  for (int i = 0; i < 5; ++i) {
    Neighbour doomed(dir.path);
    doomed.kill();
    Tier tier("offload_nvme");
    ASSERT_EQ(tier.open(at(dir.path)), STRATA_OK);
    EXPECT_EQ(dir.entries(), 3u);
  }
  EXPECT_EQ(lives.end(), 0);
  EXPECT_EQ(sleeps.end(), 0);
  EXPECT_EQ(dir.entries(), 0u);
}

// A directory as a dead job would have left it, with one line of its record, or a file, changed.
std::string leave(const std::string& path, const std::string& key, const std::string& value) {
  std::string record;
  {
    Neighbour doomed(path, false);
    doomed.kill();
  }
  const fs::path left = *fs::directory_iterator(path);
  std::ifstream in(left / "owner");
  for (std::string line; std::getline(in, line);) {
    record += (line.rfind(key + " ", 0) == 0 ? key + " " + value : line) + "\n";
  }
  std::ofstream(left / "owner") << record;
  return left;
}

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof(name) - 1);
  return name;
}

// An owner that ended and whose parent has not waited for it, as in containers where nobody does.
TEST(OffloadNvmeFiles, AZombieIsDead) {
  SKIP_WITHOUT_FORK();
  const pid_t zombie = ::fork();
  if (zombie == 0) ::_exit(0);
  siginfo_t info;
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(zombie), &info, WEXITED | WNOWAIT), 0);
  std::ifstream stat("/proc/" + std::to_string(zombie) + "/stat");
  std::string start;
  for (int field = 1; field <= 22; ++field) stat >> start;
  DiskDir dir;
  const std::string left = leave(dir.path, "pid", std::to_string(zombie));
  std::ifstream in(left + "/owner");
  std::string record((std::istreambuf_iterator<char>(in)), {});
  const size_t begin = record.find("\nstart ") + 7;
  record.replace(begin, record.find('\n', begin) - begin, start);
  std::ofstream(left + "/owner") << record;
  Tier tier("offload_nvme");
  EXPECT_EQ(tier.open(at(dir.path)), STRATA_OK);
  EXPECT_FALSE(fs::exists(left));
  ::waitpid(zombie, nullptr, 0);
}

TEST(OffloadNvmeFiles, OnlyWhatSurelyIsDeadGoes) {
  const auto is_reclaimed = [](const std::string& key, const std::string& value, const std::string& stranger = "") {
    DiskDir dir;
    const std::string left = leave(dir.path, key, value);
    if (!stranger.empty()) std::ofstream(left + "/" + stranger) << "x";
    Tier tier("offload_nvme");
    EXPECT_EQ(tier.open(at(dir.path)), STRATA_OK);
    return !fs::exists(left);
  };
  EXPECT_TRUE(is_reclaimed("none", ""));
  EXPECT_TRUE(is_reclaimed("boot", "00000000-0000-0000-0000-000000000000"));
  EXPECT_TRUE(is_reclaimed("pid", std::to_string(::getpid()))) << "that number is another process's now";
  EXPECT_FALSE(is_reclaimed("host", "another-machine"));
  EXPECT_FALSE(is_reclaimed("none", "", "notes.txt")) << "somebody's file is in it";

  // The record speaks of a dead one, and yet the lock is held (a process of another container).
  {
    DiskDir shared;
    Tier holds("offload_nvme"), comes("offload_nvme");
    ASSERT_EQ(holds.open(at(shared.path)), STRATA_OK);
    holds.alloc(kMiB);
    const fs::path held = *fs::directory_iterator(shared.path);
    std::ofstream(held / "owner") << "host " << host_name() << "\nboot none\npid 1\nstart 1\n";
    ASSERT_EQ(comes.open(at(shared.path)), STRATA_OK);
    EXPECT_TRUE(fs::exists(held / "segment-0"));
  }

  // The lock is free, and yet the process lives (a file system without locks).
  DiskDir dir;
  const std::string self = "/proc/self/stat";
  std::ifstream stat(self);
  std::string word;
  for (int field = 1; field <= 22; ++field) stat >> word;
  const std::string left = leave(dir.path, "pid", std::to_string(::getpid()));
  std::ifstream in(left + "/owner");
  std::string record;
  for (std::string line; std::getline(in, line);)
    record += (line.rfind("start ", 0) == 0 ? "start " + word : line) + "\n";
  std::ofstream(left + "/owner") << record;
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(dir.path)), STRATA_OK);
  EXPECT_TRUE(fs::exists(left));
}

TEST(OffloadNvmeFiles, ManyAtOnceComeAndGo) {
  DiskDir dir;
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) {
        Tier tier("offload_nvme");
        if (tier.open(at(dir.path)) != STRATA_OK)
          ++failed;
        else if (Shadow(tier, kMiB, 1).random_calls(3, 4096) != "")
          ++failed;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failed, 0);
  EXPECT_EQ(dir.entries(), 0u);
}

}  // namespace
}  // namespace strata::test
