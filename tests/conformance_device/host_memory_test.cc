// libs/host_memory: allocation at its borders, and the memory limits read from a folder of made-up /proc and /sys.
#include "host_memory/host_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>

#include "host_memory/limits.h"

namespace strata::host_memory {
namespace {

TEST(HostMemory, IsZeroAndAlignedOnBothSidesOfTheMappingBorder) {
  for (uint64_t bytes :
       {uint64_t{1}, uint64_t{4096}, kMappedFrom - 1, kMappedFrom, kMappedFrom + 1, 3 * kHugePage + 5}) {
    char* p = static_cast<char*>(allocate(bytes));
    ASSERT_NE(p, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % (bytes >= kMappedFrom ? kHugePage : kAlignment), 0u);
    touch(p, bytes);
    for (uint64_t i = 0; i < bytes; ++i) ASSERT_EQ(p[i], 0) << i;
    p[0] = p[bytes - 1] = 1;
    release(p, bytes);
  }
  EXPECT_EQ(allocate(UINT64_MAX), nullptr);
  EXPECT_EQ(allocate(UINT64_MAX - kHugePage), nullptr);
  EXPECT_EQ(allocate(uint64_t{1} << 60), nullptr);
  release(nullptr, 5);
}

class LimitsTest : public testing::Test {
 protected:
  void SetUp() override {
    root = std::filesystem::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(root);
    write("proc/meminfo", "MemTotal:  1000 kB\nMemFree: 3 kB\nMemAvailable:  600 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(root); }
  void write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  }
  std::filesystem::path root;
};

TEST_F(LimitsTest, AreTheMachinesWithoutAGroup) {
  const Limits limits = read_limits(root);
  EXPECT_EQ(limits.total_bytes, 1000u * 1024);
  EXPECT_EQ(limits.free_bytes, 600u * 1024);
}

TEST_F(LimitsTest, AreTheTightestOfAllGroupsAbove) {
  write("proc/self/cgroup", "4:memory:/v1\n0::/a/b\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.current", "5\n");
  write("sys/fs/cgroup/a/memory.max", "500000\n");
  write("sys/fs/cgroup/a/memory.current", "100000\n");
  const Limits limits = read_limits(root);
  EXPECT_EQ(limits.total_bytes, 500000u);
  EXPECT_EQ(limits.free_bytes, 400000u);
}

TEST_F(LimitsTest, CountTheRootOfAContainer) {
  write("proc/self/cgroup", "0::/\n");
  write("sys/fs/cgroup/memory.max", "300000\n");
  write("sys/fs/cgroup/memory.current", "300001\n");
  const Limits limits = read_limits(root);
  EXPECT_EQ(limits.total_bytes, 300000u);
  EXPECT_EQ(limits.free_bytes, 0u);
}

TEST(Limits, OfThisMachineAreThere) {
  const Limits limits = read_limits();
  EXPECT_GT(limits.total_bytes, 0u);
  EXPECT_LE(limits.free_bytes, limits.total_bytes);
}

}  // namespace
}  // namespace strata::host_memory
