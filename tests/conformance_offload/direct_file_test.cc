// libs/io's DirectFile, through which checkpoints are written and read, on file systems of every block size, and where
// they fail it: every byte of any range is right, and what can go past the page cache does.
#include "io/direct_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "faulty_calls.h"
#include "tests/support/disk_dirs.h"

namespace strata::test {
namespace {

using io::DirectFile;
using io::kLargestAlignment;

constexpr uint64_t kBytes = (3 << 20) + 777;

struct Freer {
  void operator()(void* p) const { std::free(p); }
};

class DirectFiles : public testing::Test {
 protected:
  DirectFiles() : memory_(static_cast<char*>(std::aligned_alloc(kLargestAlignment, kRoom))), holds_(kBytes) {
    faults().clear();
    const int fd = ::open(path().c_str(), O_CREAT | O_RDWR, 0600);
    EXPECT_EQ(::ftruncate(fd, kBytes), 0);
    ::close(fd);
  }
  ~DirectFiles() override { faults().clear(); }
  std::string path() const { return dir.path + "/file"; }
  // Memory that lies as this offset does, and `skew` bytes further.
  char* at(uint64_t offset, uint64_t skew = 0) { return memory_.get() + offset % kLargestAlignment + skew; }

  int write(DirectFile& file, uint64_t offset, uint64_t bytes, uint64_t skew = 0) {
    char* const from = at(offset, skew);
    for (uint64_t i = 0; i < bytes; ++i) from[i] = static_cast<char>(random_());
    const int error = file.write_at(offset, from, bytes);
    if (!error) std::copy_n(from, bytes, holds_.begin() + static_cast<ptrdiff_t>(offset));
    return error;
  }
  // 0, an errno, or -1: other bytes.
  int read(DirectFile& file, uint64_t offset, uint64_t bytes, bool direct, uint64_t skew = 0) {
    char* const to = at(offset, skew);
    std::memset(to, 0x5A, bytes);
    const int error = direct ? file.read_direct_at(offset, to, bytes) : file.read_at(offset, to, bytes);
    if (error) return error;
    return std::equal(to, to + bytes, holds_.begin() + static_cast<ptrdiff_t>(offset)) ? 0 : -1;
  }
  int random_transfers(DirectFile& file, int count) {
    int error = 0;
    for (int i = 0; i < count && !error; ++i) {
      const uint64_t offset = random_() % kBytes, bytes = 1 + random_() % (kBytes - offset);
      const uint64_t skew = random_() % 3 * 512 * (random_() % 2);
      error = random_() % 2 ? write(file, offset, bytes, skew) : read(file, offset, bytes, random_() % 4 != 0, skew);
    }
    return error ? error : read(file, 0, kBytes, true);
  }

  static constexpr uint64_t kRoom = (kBytes / kLargestAlignment + 3) * kLargestAlignment;
  DiskDir dir;
  std::unique_ptr<char, Freer> memory_;
  std::vector<char> holds_;
  std::mt19937 random_{3};
};

class DirectFilesOf : public DirectFiles, public testing::WithParamInterface<int> {};

TEST_P(DirectFilesOf, KeepEveryByteAndGoDirect) {
  const uint64_t block = static_cast<uint64_t>(GetParam());
  faults().alignment = block;
  DirectFile file;
  ASSERT_EQ(file.open(path(), true, true), 0);
  ASSERT_TRUE(file.direct());
  EXPECT_EQ(random_transfers(file, 60), 0);
  EXPECT_TRUE(file.direct()) << "no transfer broke the rule";

  // All but the edges, where memory lies as the file does; with blocks of less than a page, whole pages.
  const uint64_t whole = std::max<uint64_t>(block, 4096);
  for (const uint64_t offset : {uint64_t{0}, uint64_t{1}, block, block - 1, uint64_t{8192}, uint64_t{100'000}}) {
    const uint64_t bytes = (1 << 20) + 333, first = (offset + whole - 1) / whole * whole;
    const uint64_t middle = ((offset + bytes) / whole - first / whole) * whole;
    EXPECT_TRUE(file.lies_right(offset, at(offset)));
    faults().direct_bytes = 0;
    EXPECT_EQ(write(file, offset, bytes), 0);
    EXPECT_EQ(faults().direct_bytes, middle) << offset;
    faults().direct_bytes = 0;
    EXPECT_EQ(read(file, offset, bytes, true), 0);
    EXPECT_EQ(faults().direct_bytes, middle) << offset;
  }
  // Memory at multiples of 512 is right for disks that want no more.
  EXPECT_EQ(file.lies_right(0, at(0, 512)), block <= 512);
  faults().direct_bytes = 0;
  EXPECT_EQ(write(file, 0, 1 << 20, 512), 0);
  EXPECT_EQ(faults().direct_bytes > 0, block <= 512);
  EXPECT_EQ(read(file, 0, kBytes, false), 0);
}

// As ranks write into one weight file: neighbours share blocks, and pages, at once.
TEST_P(DirectFilesOf, NeighboursDoNotDisturbEachOther) {
  faults().alignment = static_cast<uint64_t>(GetParam());
  DirectFile seen;
  ASSERT_EQ(seen.open(path(), true, true), 0);
  for (int round = 0; round < 5; ++round) {
    std::vector<uint64_t> cuts = {0, kBytes};
    while (cuts.size() < 9) cuts.push_back(random_() % kBytes);
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::thread> writers;
    std::atomic<int> failed{0};
    for (size_t k = 0; k + 1 < cuts.size(); ++k) {
      const uint64_t begin = cuts[k], bytes = cuts[k + 1] - begin;
      const char value = static_cast<char>('a' + k + static_cast<size_t>(round));
      std::fill_n(holds_.begin() + static_cast<ptrdiff_t>(begin), bytes, value);
      writers.emplace_back([this, begin, bytes, value, &failed] {
        const std::unique_ptr<char, Freer> own(static_cast<char*>(std::aligned_alloc(kLargestAlignment, kRoom)));
        char* const from = own.get() + begin % kLargestAlignment;
        std::memset(from, value, bytes);
        DirectFile file;
        failed += file.open(path(), true, true) != 0 || file.write_at(begin, from, bytes) != 0;
      });
    }
    for (std::thread& each : writers) each.join();
    EXPECT_EQ(failed, 0);
    EXPECT_EQ(read(seen, 0, kBytes, round % 2 == 0), 0) << round;
  }
}

TEST_P(DirectFilesOf, ShortAndInterruptedTransfersAreContinued) {
  faults().alignment = static_cast<uint64_t>(GetParam());
  DirectFile file;
  ASSERT_EQ(file.open(path(), true, true), 0);
  faults().short_transfers = true;
  EXPECT_EQ(random_transfers(file, 30), 0);
  faults().short_transfers = false;
  for (int n = 1; n < 6; ++n) {
    faults().fail(n % 2 ? "pwrite" : "pread", n, EINTR);
    EXPECT_EQ(random_transfers(file, 6), 0);
    EXPECT_TRUE(faults().has_fired());
  }
  EXPECT_TRUE(file.direct());
}

INSTANTIATE_TEST_SUITE_P(Blocks, DirectFilesOf, testing::Values(512, 4096, 65536),
                         [](const auto& tested) { return std::to_string(tested.param); });

TEST_F(DirectFiles, TakeTheRuleFromTheFileSystem) {
  DirectFile file;
  ASSERT_EQ(file.open(path(), true, true), 0);
  EXPECT_EQ(random_transfers(file, 40), 0);
  EXPECT_TRUE(file.direct());
  EXPECT_GT(faults().direct_bytes, 0u);
}

// One that says O_DIRECT is possible and then refuses every use of it.
TEST_F(DirectFiles, GoThroughThePageCacheWhereNoBlockIsRight) {
  faults().alignment = uint64_t{1} << 30;
  DirectFile file;
  ASSERT_EQ(file.open(path(), true, true), 0);
  EXPECT_FALSE(file.direct());
  EXPECT_TRUE(file.lies_right(3, at(0))) << "nothing is gained by copying";
  EXPECT_EQ(random_transfers(file, 20), 0);
}

// The rule changed, or was not the whole truth.
TEST_F(DirectFiles, GoThroughThePageCacheFromTheFirstRefusal) {
  DirectFile file;
  ASSERT_EQ(file.open(path(), true, true), 0);
  ASSERT_TRUE(file.direct());
  faults().alignment = uint64_t{1} << 30;
  EXPECT_EQ(random_transfers(file, 20), 0);
  EXPECT_FALSE(file.direct());
}

// Too small to try it out on, and still right.
TEST_F(DirectFiles, OfFewBytes) {
  for (const off_t bytes : {0, 1, 4096, 100'000, 131'071}) {
    ASSERT_EQ(::truncate(path().c_str(), bytes), 0);
    for (const uint64_t block : {0, 512, 65536}) {
      faults().alignment = block;
      DirectFile file;
      ASSERT_EQ(file.open(path(), true, true), 0);
      EXPECT_EQ(write(file, 0, static_cast<uint64_t>(bytes)), 0) << bytes;
      EXPECT_EQ(read(file, 0, static_cast<uint64_t>(bytes), true), 0) << bytes;
      EXPECT_EQ(file.read_direct_at(0, at(0), static_cast<uint64_t>(bytes) + 1), ENODATA);
      EXPECT_TRUE(file.direct());
    }
  }
}

TEST_F(DirectFiles, SayWhatFailed) {
  for (const char* call : {"pread", "pwrite"}) {
    for (const int error : {EIO, ENOSPC}) {
      DirectFile file;
      ASSERT_EQ(file.open(path(), true, true), 0);
      faults().fail(call, 1, error);
      EXPECT_EQ(call == std::string("pread") ? read(file, 0, 1 << 20, true) : write(file, 0, 1 << 20), error);
      EXPECT_TRUE(file.direct());
    }
  }
  DirectFile file;
  faults().fail("fstat", 1, EIO);
  EXPECT_EQ(file.open(path(), true, true), EIO);
  faults().alignment = 512;  // found out by reading
  faults().fail("pread", 1, EIO);
  EXPECT_EQ(file.open(path(), true, true), EIO);
}

}  // namespace
}  // namespace strata::test
