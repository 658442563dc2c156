// What offload_nvme takes a disk's room to be: all that is free, of which what it wrote to measure the disk is a part,
// its own and that of other ranks which are at it meanwhile.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/statvfs.h>

#include <atomic>
#include <thread>

#include "io/fd.h"
#include "offload_fixture.h"
#include "tests/support/disk_dirs.h"

namespace strata::test {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kNames = 64 << 10;  // directories and small files take a few blocks

Options at(const std::string& path, int probe_ms) { return Options().set("nvme_path", path).set("probe_ms", probe_ms); }

uint64_t free_bytes(const std::string& path) {
  struct statvfs s {};
  EXPECT_EQ(::statvfs(path.c_str(), &s), 0);
  return static_cast<uint64_t>(s.f_bavail) * s.f_frsize;
}

// The directory of another rank that measures the disk just now.
class Measuring {
 public:
  Measuring(const std::string& parent, uint64_t bytes) : path_(parent + "/strata-other-r1-1-0") {
    fs::create_directory(path_);
    owner_ = io::Fd(::open((path_ + "/owner").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    EXPECT_EQ(::flock(owner_.get(), LOCK_EX | LOCK_NB), 0);
    const io::Fd probe(::open((path_ + "/probe").c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600));
    EXPECT_EQ(::posix_fallocate(probe.get(), 0, static_cast<off_t>(bytes)), 0);
  }
  ~Measuring() { fs::remove_all(path_); }

 private:
  const std::string path_;
  io::Fd owner_;
};

class Room : public testing::TestWithParam<const char*> {};

TEST_P(Room, IsAllThatIsFree) {
  for (const int mebibytes : {4, 48, 600}) {
    LoopFs disk(mebibytes, 512);
    if (!disk.missing.empty()) GTEST_SKIP() << disk.missing;
    const uint64_t before = free_bytes(disk.path);
    for (int i = 0; i < 5; ++i) {
      Tier tier("offload_nvme");
      ASSERT_EQ(tier.open(at(disk.path, 20).set("io", GetParam())), STRATA_OK);
      EXPECT_NEAR(static_cast<double>(tier.caps().budget_bytes), static_cast<double>(before), kNames);
      tier.alloc(before - before / 50 - kNames);  // the file system's own records of it take the rest
    }
    EXPECT_NEAR(static_cast<double>(free_bytes(disk.path)), static_cast<double>(before), kNames);
  }
}
INSTANTIATE_TEST_SUITE_P(Io, Room, testing::Values("auto", "threads"), [](const auto& tested) { return tested.param; });

TEST(OffloadNvmeRoom, WhatOthersMeasureWithIsFree) {
  LoopFs disk(48, 512);
  if (!disk.missing.empty()) GTEST_SKIP() << disk.missing;
  const uint64_t before = free_bytes(disk.path);
  const Measuring other(disk.path, 8 * kMiB);
  EXPECT_LT(free_bytes(disk.path), before - 7 * kMiB);
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(disk.path, 0)), STRATA_OK);
  EXPECT_NEAR(static_cast<double>(tier.caps().budget_bytes), static_cast<double>(before), kNames);
  tier.close();
  ASSERT_EQ(tier.open(at(disk.path, 0).set("budget_bytes", static_cast<int64_t>(before - kNames))), STRATA_OK);
}

// The smallest part of the disk: many ranks begin at once.
TEST(OffloadNvmeRoom, TheProbeIsSmallBesideIt) {
  LoopFs disk(48, 512);
  if (!disk.missing.empty()) GTEST_SKIP() << disk.missing;
  uint64_t largest = 0;
  std::atomic<bool> ended{false};
  std::thread opening([&] {
    Tier tier("offload_nvme");
    EXPECT_EQ(tier.open(at(disk.path, 300)), STRATA_OK);
    ended = true;
  });
  while (!ended) {
    for (const auto& entry : fs::directory_iterator(disk.path)) {
      std::error_code error;
      const uint64_t bytes = fs::file_size(entry.path() / "probe", error);
      if (!error) largest = std::max(largest, bytes);
    }
  }
  opening.join();
  EXPECT_GT(largest, 0u);
  EXPECT_LE(largest, 48 * kMiB / 32);
}

}  // namespace
}  // namespace strata::test
