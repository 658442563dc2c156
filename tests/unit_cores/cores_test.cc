// cores_test.cc - which CPUs a rank gets: the arithmetic, on machines made of files, and what this machine says.
#include "core/plugins/cores.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <thread>

namespace strata {
namespace {

using testing::ElementsAre;
namespace fs = std::filesystem;

// A folder that looks like /sys and /proc.
class Machine {
 public:
  Machine() { root_ = fs::temp_directory_path() / ("strata_cores_" + std::to_string(getpid())); }
  ~Machine() { fs::remove_all(root_); }
  Machine& file(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text << "\n";
    return *this;
  }
  // CPUs that share a physical core.
  Machine& core(const std::vector<int>& cpus) {
    for (int cpu : cpus) {
      file("sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list", cpu_list_text(cpus));
    }
    return *this;
  }
  Machine& node(int number, const std::string& cpus) {
    return file("sys/devices/system/node/node" + std::to_string(number) + "/cpulist", cpus);
  }
  std::string root() const { return root_; }
  CoreShare share(const std::string& allowed, size_t part, size_t parts) const {
    return share_of(read_cpus(parse_cpu_list(allowed), root()), part, parts);
  }
  // "0-1 2-3": of every rank.
  std::string shares(const std::string& allowed, size_t parts) const {
    std::string text;
    for (size_t part = 0; part < parts; ++part) {
      text += (part > 0 ? " " : "") + cpu_list_text(share(allowed, part, parts).cpus);
    }
    return text;
  }

 private:
  fs::path root_;
};

// Two nodes of four cores of two threads, numbered as Intel's BIOS does: the second threads come last.
Machine two_sockets() {
  Machine m;
  for (int core = 0; core < 8; ++core) m.core({core, core + 8});
  m.node(0, "0-3,8-11").node(1, "4-7,12-15");
  return m;
}

TEST(CpuList, ReadsAndWritesTheKernelsWay) {
  EXPECT_THAT(parse_cpu_list("0-2,8"), ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(parse_cpu_list("5"), ElementsAre(5));
  EXPECT_THAT(parse_cpu_list(""), ElementsAre());
  EXPECT_THAT(parse_cpu_list("x,-3,7"), ElementsAre(7));
  EXPECT_EQ(cpu_list_text({0, 1, 2, 8, 10, 11}), "0-2,8,10-11");
  EXPECT_EQ(cpu_list_text({}), "");
}

TEST(Shares, AreConsecutiveAndKeepToANode) {
  const Machine m = two_sockets();
  EXPECT_EQ(m.shares("0-15", 2), "0-3,8-11 4-7,12-15");
  EXPECT_EQ(m.shares("0-15", 4), "0-1,8-9 2-3,10-11 4-5,12-13 6-7,14-15");
  EXPECT_EQ(m.share("0-15", 0, 2).node, 0);
  EXPECT_EQ(m.share("0-15", 3, 4).node, 1);
  EXPECT_EQ(m.share("0-15", 1, 3).node, -1);  // on both
  EXPECT_TRUE(m.share("0-15", 1, 3).is_part);
}

TEST(Shares, GiveWholeCoresWhileThereAreEnough) {
  const Machine m = two_sockets();
  EXPECT_EQ(m.shares("0-15", 8), "0,8 1,9 2,10 3,11 4,12 5,13 6,14 7,15");
  EXPECT_EQ(m.shares("0-1,8-9", 4), "0 8 1 9");  // four ranks on two cores: a thread each
  EXPECT_EQ(m.shares("0-1,8-9", 3), "0 8 1,9");
}

TEST(Shares, NeighboursAreThreadsOfACoreWhereTheyAreNumberedSo) {
  Machine m;
  for (int core = 0; core < 4; ++core) m.core({2 * core, 2 * core + 1});
  m.node(0, "0-7");
  EXPECT_EQ(m.shares("0-7", 2), "0-3 4-7");
  EXPECT_EQ(m.shares("0-7", 3), "0-1 2-3 4-7");
  EXPECT_EQ(m.share("0-7", 0, 2).node, -1);  // there is one node: nothing to choose
}

TEST(Shares, CoverEverythingOnceForEveryNumberOfRanks) {
  const Machine m = two_sockets();
  for (size_t parts = 1; parts <= 16; ++parts) {
    std::vector<int> all;
    for (size_t part = 0; part < parts; ++part) {
      const std::vector<int> cpus = m.share("0-15", part, parts).cpus;
      EXPECT_FALSE(cpus.empty());
      all.insert(all.end(), cpus.begin(), cpus.end());
    }
    EXPECT_EQ(all.size(), 16u) << parts;
    EXPECT_THAT(all, testing::UnorderedElementsAreArray(parse_cpu_list("0-15"))) << parts;
  }
}

TEST(Shares, OneRankOrMoreRanksThanCpusDivideNothing) {
  const Machine m = two_sockets();
  EXPECT_FALSE(m.share("0-15", 0, 1).is_part);
  for (const auto& [cpus, ranks] : {std::pair<std::string, size_t>{"3", 2}, {"0-15", 17}}) {
    const CoreShare share = m.share(cpus, 1, ranks);
    EXPECT_FALSE(share.is_part);
    EXPECT_EQ(cpu_list_text(share.cpus), cpus);
    EXPECT_EQ(share.threads(0), 1u);
  }
}

TEST(Shares, WithoutTopologyEveryCpuIsACore) {
  const Machine m;
  EXPECT_EQ(m.shares("0-3", 2), "0-1 2-3");
  EXPECT_EQ(m.share("0-3", 0, 2).node, -1);
}

TEST(Threads, AreTheCpusOfTheShareWithinTheQuota) {
  const Machine m = two_sockets();
  EXPECT_EQ(m.share("0-15", 0, 1).threads(0), 16u);
  EXPECT_EQ(m.share("0-15", 0, 4).threads(0), 4u);
  EXPECT_EQ(m.share("0-15", 0, 4).threads(6.5), 2u);  // 1.6 CPUs' worth each
  EXPECT_EQ(m.share("0-15", 0, 4).threads(100), 4u);
  EXPECT_EQ(m.share("0-15", 0, 4).threads(0.5), 1u);
}

TEST(Quota, IsTheSmallestOfTheGroupsAbove) {
  Machine m;
  EXPECT_EQ(cpu_quota(m.root()), 0);
  m.file("proc/self/cgroup", "0::/job/step").file("sys/fs/cgroup/job/step/cpu.max", "max 100000");
  EXPECT_EQ(cpu_quota(m.root()), 0);
  m.file("sys/fs/cgroup/job/cpu.max", "250000 100000").file("sys/fs/cgroup/cpu.max", "400000 100000");
  EXPECT_EQ(cpu_quota(m.root()), 2.5);
}

TEST(ThisMachine, BindsAThreadToCpusItMayUse) {
  std::thread([] {
    const std::vector<int> before = allowed_cpus();
    bind_this_thread({before.back()});
    EXPECT_THAT(allowed_cpus(), ElementsAre(before.back()));
    EXPECT_NE(cpus_fingerprint(before), before.size() > 1 ? cpus_fingerprint(allowed_cpus()) : 0);
    bind_this_thread({});  // nothing
    EXPECT_THAT(allowed_cpus(), ElementsAre(before.back()));
  }).join();
}

TEST(ThisMachine, MemoryIsNearForAWhile) {
  const auto mode = [] {
    int now = -1;
    return syscall(SYS_get_mempolicy, &now, nullptr, 0, nullptr, 0) == 0 ? now : -1;
  };
  const int before = mode();
  if (before < 0) GTEST_SKIP() << "get_mempolicy is not allowed here";
  {
    const MemoryNear nowhere(-1);
    EXPECT_EQ(mode(), before);
    const MemoryNear near(0);
    EXPECT_EQ(mode(), 1);  // MPOL_PREFERRED
  }
  EXPECT_EQ(mode(), before);
}

}  // namespace
}  // namespace strata
