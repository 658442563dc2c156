// offload_nvme's own promises, on a real file system: every byte of any range, with io_uring and with threads; stripes
// in proportion; errors with path and numbers; segments that somebody links.
#include <fcntl.h>

#include <fstream>
#include <map>
#include <numeric>

#include "nvme_options.h"
#include "shadow.h"
#include "tests/support/disk_dirs.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr uint64_t kMiB = 1 << 20;

// ---- every byte --------------------------------------------------------------------------------------------------

class EveryByte : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (tier.open(at(dir.path, GetParam())) == STRATA_FAILED_PRECONDITION) {
      GTEST_SKIP() << reason(STRATA_FAILED_PRECONDITION);
    }
    tier.close();
  }
  DiskDir dir;
  Tier tier{"offload_nvme"};
};

TEST_P(EveryByte, OfOddSizesAndCrookedMemory) {
  ASSERT_EQ(tier.open(at(dir.path, GetParam())), STRATA_OK);
  for (uint64_t bytes : {uint64_t{1}, uint64_t{511}, uint64_t{512}, uint64_t{513}, uint64_t{4095}, uint64_t{4097},
                         uint64_t{28'824'000}}) {
    Shadow region(tier, bytes, 7);
    EXPECT_EQ(region.read_all(), "") << bytes << ": fresh";
    for (size_t skew : {0u, 2u}) {
      EXPECT_EQ(region.write(0, bytes, skew), "") << bytes;
      EXPECT_EQ(region.read(0, bytes, 2 - skew), "") << bytes;
    }
    tier.api->free(tier.self, region.region);
  }
  EXPECT_EQ(mentions(tier, "no whole blocks"), 1u) << "a slower way is said once";
  EXPECT_EQ(mentions(tier, "is not aligned to"), 0u);
}

TEST_P(EveryByte, OfWholeBlocksInCrookedMemoryIsSaidToBeThat) {
  ASSERT_EQ(tier.open(at(dir.path, GetParam())), STRATA_OK);
  Shadow region(tier, kMiB, 7);
  EXPECT_EQ(region.write(0, kMiB), "");
  EXPECT_EQ(mentions(tier, "is not aligned to"), 0u) << "it is, and needs no copy";
  EXPECT_EQ(region.write(0, kMiB, 2), "");
  EXPECT_EQ(region.read(0, kMiB, 2), "");
  EXPECT_EQ(mentions(tier, "is not aligned to"), 1u);
  EXPECT_EQ(mentions(tier, "no whole blocks"), 0u);
}

TEST_P(EveryByte, OfRandomRanges) {
  for (const bool checksum : {false, true}) {
    ASSERT_EQ(tier.open(at(dir.path, GetParam()).set("checksum", checksum)), STRATA_OK);
    Shadow whole(tier, 5 * kMiB, 1), any(tier, 3 * kMiB + 777, 2);
    EXPECT_EQ(whole.random_calls(60, 4096), "");
    EXPECT_EQ(any.random_calls(60, 1), "");
    EXPECT_EQ(whole.read_all(), "");
    tier.close();
  }
}

TEST_P(EveryByte, OfRegionsOverSegmentsAndDisks) {
  DiskDir second;
  // A segment holds less than a region, and the disks share three to one.
  ASSERT_EQ(tier.open(at(dir.path + " , " + second.path, GetParam())
                          .set("segment_bytes", int64_t(4 * kMiB))
                          .set("weights", "3, 1")),
            STRATA_OK);
  Shadow a(tier, 16 * kMiB, 3), b(tier, 24 * kMiB, 4);
  EXPECT_EQ(a.random_calls(20, 4096), "");
  EXPECT_EQ(b.random_calls(20, 4096), "");
  EXPECT_EQ(a.read_all(), "");
  std::map<std::string, uint64_t> bytes;
  for (const std::string& path : {dir.path, second.path}) {
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (!entry.is_regular_file() || entry.path().filename() == "owner") continue;
      EXPECT_LE(entry.file_size(), 4 * kMiB) << entry.path();
      bytes[path] += entry.file_size();
    }
  }
  EXPECT_EQ(bytes[dir.path], 30 * kMiB);
  EXPECT_EQ(bytes[second.path], 10 * kMiB);
  tier.close();
  EXPECT_EQ(second.entries(), 0u);
}

TEST_P(EveryByte, OfFreedRoomIsZeroAgain) {
  for (const bool fast : {false, true}) {
    ASSERT_EQ(tier.open(at(dir.path, GetParam()).set("fast_init", fast).set("segment_bytes", int64_t(8 * kMiB))),
              STRATA_OK);
    std::vector<strata_region> regions;
    std::mt19937 random(5);
    for (int i = 0; i < 60; ++i) {
      if (regions.size() == 6) {
        const size_t gone = random() % regions.size();
        tier.api->free(tier.self, regions[gone]);
        regions.erase(regions.begin() + static_cast<ptrdiff_t>(gone));
      }
      Shadow region(tier, 4096 * (1 + random() % 700), random());
      ASSERT_EQ(region.read_all(), "") << i;
      ASSERT_EQ(region.random_calls(1, 4096), "");
      regions.push_back(region.region);
    }
    for (strata_region region : regions) tier.api->free(tier.self, region);
    EXPECT_EQ(tier.caps().used_bytes, 0u);
    for (const auto& entry : fs::recursive_directory_iterator(dir.path)) {
      EXPECT_EQ(entry.path().filename().string().rfind("segment", 0), std::string::npos) << "an empty one is removed";
    }
    tier.close();
  }
}

TEST_P(EveryByte, BeyondFourGiB) {
  if (fs::space(dir.path).available < (uint64_t{6} << 30)) GTEST_SKIP() << "less than 6 GiB free at " << dir.path;
  ASSERT_EQ(tier.open(at(dir.path, GetParam()).set("fast_init", true).set("segment_bytes", int64_t{8} << 30)),
            STRATA_OK);
  constexpr uint64_t kRegion = (uint64_t{5} << 30) + 4096;
  const strata_region region = tier.alloc(kRegion, "vast");
  void* memory = nullptr;
  ASSERT_EQ(posix_memalign(&memory, 4096, 2 * kMiB), 0);
  auto* data = static_cast<char*>(memory);
  const uint64_t places[] = {0, uint64_t{1} << 31, uint64_t{1} << 32, kRegion - 2 * kMiB};
  for (size_t i = 0; i < std::size(places); ++i) {
    std::memset(data, static_cast<int>('a' + i), 2 * kMiB);
    ASSERT_EQ(tier.write(region, places[i], data, 2 * kMiB), STRATA_OK);
  }
  for (size_t i = 0; i < std::size(places); ++i) {
    ASSERT_EQ(tier.read(region, places[i], data, 2 * kMiB), STRATA_OK);
    EXPECT_EQ(std::count(data, data + 2 * kMiB, static_cast<char>('a' + i)), static_cast<ptrdiff_t>(2 * kMiB)) << i;
  }
  std::free(memory);
}

TEST_P(EveryByte, OfManyTransfersAtOnce) {
  ASSERT_EQ(tier.open(at(dir.path, GetParam()).set("queue_depth", 4)), STRATA_OK);
  constexpr size_t kCount = 64;
  constexpr uint64_t kBytes = 3 * kMiB / 2;
  void* memory = nullptr;
  ASSERT_EQ(posix_memalign(&memory, 4096, 2 * kCount * kBytes), 0);
  char *const out = static_cast<char*>(memory), *const back = out + kCount * kBytes;
  const strata_region region = tier.alloc(kCount * kBytes);
  for (size_t i = 0; i < kCount * kBytes; ++i) out[i] = static_cast<char>(i * 31 + i / 4096);
  for (const bool write : {true, false}) {
    std::vector<Event> done;
    for (size_t i = 0; i < kCount; ++i) {
      done.push_back(Event::create());
      ASSERT_EQ(write ? tier.write(region, i * kBytes, out + i * kBytes, kBytes, done[i].get())
                      : tier.read(region, i * kBytes, back + i * kBytes, kBytes, done[i].get()),
                STRATA_OK);
    }
    for (Event& each : done) EXPECT_TRUE(each->wait(std::chrono::seconds(60)).ok());
  }
  EXPECT_EQ(std::memcmp(out, back, kCount * kBytes), 0);
  std::free(memory);
}

// A full queue says so, and drains.
TEST_P(EveryByte, OfMoreTransfersThanMayBeUnderWay) {
  ASSERT_EQ(tier.open(at(dir.path, GetParam()).set("queue_depth", 1)), STRATA_OK);
  const strata_region region = tier.alloc(4096);
  alignas(4096) static char block[4096];
  std::vector<Event> done(3 * tier.caps().max_inflight);
  for (Event& each : done) {
    each = Event::create();
    strata_status code;
    while ((code = tier.read(region, 0, block, 4096, each.get())) == STRATA_AGAIN) sched_yield();
    ASSERT_EQ(code, STRATA_OK);
  }
  for (Event& each : done) EXPECT_TRUE(each->wait(std::chrono::seconds(60)).ok());
}

INSTANTIATE_TEST_SUITE_P(Io, EveryByte, testing::Values("io_uring", "threads"),
                         [](const auto& tested) { return tested.param; });

class Sectors : public testing::TestWithParam<int> {};
TEST_P(Sectors, AreKept) {
  LoopFs disk(64, GetParam());
  if (!disk.missing.empty()) GTEST_SKIP() << disk.missing;
  for (const char* io : {"auto", "threads"}) {
    Tier tier("offload_nvme");
    ASSERT_EQ(tier.open(at(disk.path, io, 30)), STRATA_OK);
    EXPECT_EQ(mentions(tier, "alignment " + std::to_string(GetParam()) + ","), 1u);
    EXPECT_EQ(mentions(tier, "page cache"), 0u);
    Shadow whole(tier, 5 * kMiB, 1), any(tier, 3 * kMiB + 777, 2);
    EXPECT_EQ(whole.random_calls(30, 4096), "");
    EXPECT_EQ(any.random_calls(30, 1), "");
  }
}
INSTANTIATE_TEST_SUITE_P(OfBytes, Sectors, testing::Values(512, 4096));

TEST(OffloadNvme, ServesTmpfsWithAWarning) {
  char path[] = "/dev/shm/strata-nvme-XXXXXX";
  if (!::mkdtemp(path)) GTEST_SKIP() << "no /dev/shm";
  {
    Tier tier("offload_nvme");
    ASSERT_EQ(tier.open(at(path)), STRATA_OK);
    EXPECT_EQ(mentions(tier, "is a tmpfs"), 1u);
    Shadow region(tier, 3 * kMiB, 1);
    EXPECT_EQ(region.random_calls(20, 1), "");
  }
  EXPECT_EQ(::rmdir(path), 0) << "something was left";
}

// ---- numbers and refusals ----------------------------------------------------------------------------------------

TEST(OffloadNvme, MeasuresEachDiskAndSaysSo) {
  DiskDir a, b;
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(a.path + "," + b.path, "auto", 60)), STRATA_OK);
  for (const std::string& path : {a.path, b.path}) {
    const auto& lines = tier.rank.log_lines;
    const auto line = std::find_if(lines.begin(), lines.end(), [&](const auto& l) {
      return l.find(path + ": ") != l.npos && l.find("share") != l.npos;
    });
    ASSERT_NE(line, lines.end());
    EXPECT_THAT(*line, testing::MatchesRegex(".*MB/s read [0-9]+, write [0-9]+, mixed [0-9]+; [0-9]+ us for.*"));
  }
  for (const auto& entry : fs::recursive_directory_iterator(a.path)) {
    EXPECT_NE(entry.path().filename(), "probe") << "it is needed at the start only";
  }
}

TEST(OffloadNvme, RefusesOptions) {
  DiskDir dir;
  Tier tier("offload_nvme");
  const auto refused = [&](Options options) {
    EXPECT_EQ(tier.open(std::move(options)), STRATA_INVALID_ARGUMENT);
    EXPECT_EQ(dir.entries(), 0u);
    return reason(STRATA_INVALID_ARGUMENT);
  };
  EXPECT_THAT(refused(Options()), HasSubstr("nvme_path names no directory"));
  const DiskDir other;
  const std::string same = fs::path(dir.path).parent_path() / "." / fs::path(dir.path).filename(),
                    link = other.path + "/l";
  fs::create_directory_symlink(dir.path, link);
  for (const std::string& twin : {dir.path, dir.path + "/", same, link}) {
    EXPECT_THAT(refused(at(dir.path + ", " + twin)), AllOf(HasSubstr("twice"), HasSubstr(" and " + twin)));
  }
  fs::remove(link);
  EXPECT_THAT(refused(at(dir.path, "posix")), HasSubstr("io = \"posix\""));
  EXPECT_THAT(refused(at(dir.path).set("budget_bytes", -1)), HasSubstr("budget_bytes = -1"));
  EXPECT_THAT(refused(at(dir.path).set("queue_depth", 0)), HasSubstr("queue_depth = 0"));
  EXPECT_THAT(refused(at(dir.path).set("segment_bytes", 4096)), HasSubstr("segment_bytes = 4096"));
  EXPECT_THAT(refused(at(dir.path).set("weights", "1, 2")), HasSubstr("2 numbers for 1 paths"));
  EXPECT_THAT(refused(at(dir.path).set("weights", "fast")), HasSubstr("\"fast\" is not a number above 0"));
}

TEST(OffloadNvme, RefusesPathsItCannotUse) {
  DiskDir dir;
  const std::string file = dir.path + "/file";
  std::ofstream(file) << "x";
  const std::pair<std::string, strata_status> wrong[] = {
      {dir.path + "/nowhere", STRATA_NOT_FOUND}, {file, STRATA_NOT_FOUND}, {"no/such/relative", STRATA_NOT_FOUND}};
  for (const auto& [path, code] : wrong) {
    Tier tier("offload_nvme");
    EXPECT_EQ(tier.open(at(path)), code) << path;
    EXPECT_THAT(reason(code),
                AllOf(HasSubstr(path), testing::AnyOf(HasSubstr("No such file"), HasSubstr("Not a dir"))));
  }
  Tier tier("offload_nvme");
  EXPECT_NE(tier.open(at("/proc")), STRATA_OK);  // cannot be written to
  EXPECT_EQ(dir.entries(), 1u);
}

TEST(OffloadNvme, RefusesAReadOnlyFileSystem) {
  LoopFs disk(16, 512);
  if (!disk.missing.empty() || !disk.remount_read_only()) GTEST_SKIP() << disk.missing;
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(disk.path)), STRATA_PERMISSION_DENIED);
  EXPECT_THAT(reason(STRATA_PERMISSION_DENIED), AllOf(HasSubstr(disk.path), HasSubstr("Read-only file system")));
}

// Two directories of one file system have its room once.
TEST(OffloadNvme, RoomIsThatOfTheFileSystem) {
  DiskDir a, b;
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(a.path).set("probe_ms", 0)), STRATA_OK);
  const auto alone = static_cast<double>(tier.caps().budget_bytes);
  tier.close();
  EXPECT_EQ(mentions(tier, "of one file system"), 0u);
  ASSERT_EQ(tier.open(at(a.path + ", " + b.path).set("probe_ms", 0)), STRATA_OK);
  EXPECT_EQ(mentions(tier, "of one file system: they share its room"), 1u);
  EXPECT_NEAR(static_cast<double>(tier.caps().budget_bytes) / alone, 1.0, 0.3);  // others write there, too
}

// Most of it is what the system gives a disk's directories and zeros; the index and the hashes grow with the regions.
TEST(OffloadNvme, SaysWhatItKeepsInHostMemory) {
  DiskDir a, b;
  for (const bool checksum : {false, true}) {
    Tier tier("offload_nvme");
    ASSERT_EQ(tier.open(at(a.path + "," + b.path).set("checksum", checksum)), STRATA_OK);
    EXPECT_EQ(tier.caps().host_bytes, 2 * kMiB + 2 * kMiB) << "zeros of each disk, one buffer";
    const uint64_t hashes = checksum ? kMiB / 4096 * 8 : 0, index = tier.caps().host_bytes_per_mib - hashes;
    EXPECT_GT(index, 16u);
    EXPECT_LT(index, 256u);
  }
}

// The measurement does not take more where the queue is deeper.
TEST(OffloadNvme, MeasuresWithLittleMemory) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's own memory is counted, too";
#endif
  const auto peak = [] {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("VmHWM:", 0) == 0) return std::stoull(line.substr(6)) * 1024;
    }
    return 0ull;
  };
  DiskDir dir;
  if (!(std::ofstream("/proc/self/clear_refs") << 5 << std::flush)) GTEST_SKIP() << "the peak cannot be reset";
  const uint64_t before = peak();
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(dir.path, "auto", 50).set("queue_depth", 1024)), STRATA_OK);
  EXPECT_GT(peak(), 0u);
  EXPECT_LT(peak() - before, 24 * kMiB);
}

TEST(OffloadNvme, KeepsItsBudget) {
  DiskDir dir;
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(dir.path).set("budget_bytes", 1'000'001)), STRATA_OK);
  EXPECT_EQ(tier.caps().budget_bytes, 1'000'001u);
  EXPECT_THAT(tier.caps().budget_reason, AllOf(HasSubstr("option budget_bytes, not the disks"), HasSubstr(dir.path)));
  tier.alloc(1'000'000);
  strata_region none = 0;
  ASSERT_EQ(tier.api->alloc(tier.self, 2, "layer7 master", &none), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED),
              AllOf(HasSubstr("layer7 master"), HasSubstr("2 bytes wanted"), HasSubstr("1000001"),
                    HasSubstr("option budget_bytes, not the disks"), HasSubstr(dir.path)));
  EXPECT_EQ(tier.api->alloc(tier.self, UINT64_MAX, "wraps around", &none), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_EQ(none, 0u);
  tier.alloc(1);
  EXPECT_EQ(tier.caps().used_bytes, 1'000'001u);
  tier.close();
  // More than the disk has is refused at the start.
  ASSERT_EQ(tier.open(at(dir.path).set("budget_bytes", int64_t{1} << 60)), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED),
              AllOf(HasSubstr(std::to_string(int64_t{1} << 60)), HasSubstr(dir.path), HasSubstr("bytes free")));
  EXPECT_EQ(dir.entries(), 0u);
}

TEST(OffloadNvme, SaysWhenTheDiskIsFull) {
  LoopFs disk(48, 512);
  if (!disk.missing.empty()) GTEST_SKIP() << disk.missing;
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(disk.path)), STRATA_OK);
  const uint64_t budget = tier.caps().budget_bytes;
  EXPECT_LT(budget, 48 * kMiB);
  EXPECT_THAT(tier.caps().budget_reason,
              AllOf(HasSubstr("what the disks have free"), HasSubstr(disk.path + " has " + std::to_string(budget)),
                    testing::Not(HasSubstr("budget_bytes"))));
  Shadow kept(tier, 8 * kMiB, 1);
  ASSERT_EQ(kept.write(0, 8 * kMiB), "");
  // Somebody else fills the disk.
  std::vector<char> junk(kMiB);
  std::ofstream other(disk.path + "/other", std::ios::binary);
  while (other.write(junk.data(), static_cast<std::streamsize>(junk.size())).flush()) {
  }
  strata_region none = 0;
  ASSERT_EQ(tier.api->alloc(tier.self, 16 * kMiB, "layer7 master", &none), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED), AllOf(HasSubstr("layer7 master"), HasSubstr("16777216 bytes"),
                                                       HasSubstr(disk.path), HasSubstr("No space left on device")));
  EXPECT_EQ(tier.caps().used_bytes, 8 * kMiB);
  // What was given keeps its room.
  EXPECT_EQ(kept.random_calls(10, 4096), "");
  other.close();
  fs::remove(disk.path + "/other");
  Shadow later(tier, 16 * kMiB, 2);
  EXPECT_EQ(later.random_calls(4, 4096), "");
}

TEST(OffloadNvme, ChecksumsNameTheRegionOfAFlippedBit) {
  DiskDir dir;
  Tier tier("offload_nvme");
  ASSERT_EQ(tier.open(at(dir.path).set("checksum", true)), STRATA_OK);
  tier.alloc(kMiB, "layer2 exp_avg");
  const strata_region region = tier.alloc(kMiB, "layer3 exp_avg_sq");
  void* memory = nullptr;
  ASSERT_EQ(posix_memalign(&memory, 4096, kMiB), 0);
  std::memset(memory, 'x', kMiB);
  ASSERT_EQ(tier.write(region, 0, memory, kMiB), STRATA_OK);
  for (const auto& entry : fs::recursive_directory_iterator(dir.path)) {
    if (entry.path().filename() != "segment-0") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(kMiB + 5 * 4096 + 17)).put('y');
  }
  EXPECT_EQ(tier.read(region, 0, memory, 5 * 4096), STRATA_OK);
  ASSERT_EQ(tier.read(region, 0, memory, kMiB), STRATA_DATA_LOSS);
  EXPECT_THAT(reason(STRATA_DATA_LOSS), AllOf(HasSubstr("layer3 exp_avg_sq"), HasSubstr("segment-0"),
                                              HasSubstr(std::to_string(kMiB + 5 * 4096)), HasSubstr("checksum")));
  // A new write makes it good.
  ASSERT_EQ(tier.write(region, 0, memory, kMiB), STRATA_OK);
  EXPECT_EQ(tier.read(region, 0, memory, kMiB), STRATA_OK);
  std::free(memory);
}

// ---- segments that somebody links --------------------------------------------------------------------------------

// Hard links to all segments there are, as a checkpoint makes them, and what they held then.
class Links {
 public:
  explicit Links(const std::vector<std::string>& paths, bool remember = true) {
    for (const std::string& path : paths) {
      for (const auto& entry : fs::recursive_directory_iterator(path)) {
        if (entry.path().filename().string().rfind("segment-", 0) != 0) continue;
        // Of another name on the same file system: beside the job's directory.
        const std::string link = path + "/kept-" + std::to_string(serial()++);
        fs::create_hard_link(entry.path(), link);
        held_[link] = remember ? content(link) : "";
      }
    }
  }
  ~Links() {
    for (const auto& [link, bytes] : held_) fs::remove(link);
  }
  Links(const Links&) = delete;

  size_t count() const { return held_.size(); }
  // Files whose bytes are others now.
  size_t changed() const {
    return static_cast<size_t>(
        std::count_if(held_.begin(), held_.end(), [](const auto& each) { return content(each.first) != each.second; }));
  }
  // Files that the tier still has, too.
  size_t shared() const {
    return static_cast<size_t>(std::count_if(held_.begin(), held_.end(), [](const auto& each) {
      const fs::path link = each.first;
      size_t others = 0;
      for (const auto& entry : fs::recursive_directory_iterator(link.parent_path())) {
        const bool is_segment = entry.path().filename().string().rfind("segment-", 0) == 0;
        others += is_segment && fs::equivalent(entry.path(), link);
      }
      return others > 0;
    }));
  }

 private:
  static int& serial() {
    static int next = 0;
    return next;
  }
  static std::string content(const std::string& path) {
    std::string bytes(fs::file_size(path), '\0');
    std::ifstream(path, std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return bytes;
  }
  std::map<std::string, std::string> held_;
};

class Linked : public EveryByte {};

TEST_P(Linked, SegmentsKeepTheirBytesAndReadsFindTheNewest) {
  DiskDir second;
  for (const bool checksum : {false, true}) {
    ASSERT_EQ(tier.open(at(dir.path + "," + second.path, GetParam())
                            .set("segment_bytes", int64_t(4 * kMiB))
                            .set("weights", "3, 1")
                            .set("checksum", checksum)),
              STRATA_OK);
    Shadow whole(tier, 9 * kMiB + 12288, 1), any(tier, 3 * kMiB + 777, 2);
    std::vector<std::unique_ptr<Links>> kept;
    for (int round = 0; round < 3; ++round) {
      kept.push_back(std::make_unique<Links>(std::vector{dir.path, second.path}));
      EXPECT_GT(kept.back()->count(), 2u);
      EXPECT_EQ(whole.random_calls(6, 4096), "");
      EXPECT_EQ(any.random_calls(6, 1), "");
      for (const auto& links : kept) ASSERT_EQ(links->changed(), 0u) << round;
    }
    // All is written once more: nothing in the old files is current, and the tier lets them go.
    EXPECT_EQ(whole.write(0, 9 * kMiB + 12288), "");
    EXPECT_EQ(any.write(0, 3 * kMiB + 777), "");
    for (const auto& links : kept) {
      EXPECT_EQ(links->shared(), 0u);
      EXPECT_EQ(links->changed(), 0u);
    }
    EXPECT_EQ(whole.read_all() + any.read_all(), "");
    EXPECT_EQ(tier.caps().used_bytes, 12 * kMiB + 12288 + 777) << "no spare space is left";
    const Links last({dir.path});
    tier.close();
    EXPECT_EQ(last.changed(), 0u) << "what is linked outlives the tier";
  }
}

TEST_P(Linked, SegmentsAreWrittenInPlaceAgainWhenTheLinkIsGone) {
  ASSERT_EQ(tier.open(at(dir.path, GetParam())), STRATA_OK);
  Shadow region(tier, 4 * kMiB, 1);
  const auto segments = [&] {
    std::map<std::string, uint64_t> sizes;
    for (const auto& entry : fs::recursive_directory_iterator(dir.path)) {
      const std::string name = entry.path().filename();
      if (name.rfind("segment-", 0) == 0) sizes[name] = entry.file_size();
    }
    return sizes;
  };
  const auto before = segments();
  { const Links links({dir.path}); }
  EXPECT_EQ(region.random_calls(10, 4096), "");
  EXPECT_EQ(segments(), before);
  const Links links({dir.path});
  EXPECT_EQ(region.write(kMiB, 4096), "");
  EXPECT_EQ(segments().size(), 2u) << "one stripe moved";
  EXPECT_EQ(segments()["segment-1"], kMiB);
}

// Nothing of a linked file is allotted: neither what was freed in it, nor by making it longer.
TEST_P(Linked, SegmentsAreNotUsedForOthers) {
  ASSERT_EQ(tier.open(at(dir.path, GetParam())), STRATA_OK);
  const strata_region freed = tier.alloc(2 * kMiB);
  Shadow kept(tier, 2 * kMiB, 1);
  ASSERT_EQ(kept.write(0, 2 * kMiB), "");
  tier.api->free(tier.self, freed);
  EXPECT_EQ(tier.caps().used_bytes, 2 * kMiB);
  const Links links({dir.path});
  EXPECT_EQ(tier.caps().used_bytes, 4 * kMiB) << "what is free in it is spare";
  for (int i = 0; i < 3; ++i) {
    Shadow other(tier, kMiB, 2);
    EXPECT_EQ(other.random_calls(3, 4096), "");
  }
  EXPECT_EQ(links.changed(), 0u);
  EXPECT_EQ(kept.read_all(), "");
}

// Whoever says that he will link is refused at the start, with the numbers, and not by a write after the link.
TEST_P(Linked, SpareSpaceIsKeptFromTheStartWhereLinksAreAnnounced) {
  const auto options = at(dir.path, GetParam()).set("budget_bytes", int64_t(20 * kMiB)).set("links", true);
  ASSERT_EQ(tier.open(options), STRATA_OK);
  const uint64_t budget = tier.caps().budget_bytes;
  EXPECT_GE(budget, 9 * kMiB);
  EXPECT_LE(budget, 10 * kMiB);
  EXPECT_THAT(tier.caps().budget_reason, AllOf(HasSubstr("option links keeps"), HasSubstr(std::to_string(20 * kMiB))));
  strata_region none = 0;
  ASSERT_EQ(tier.api->alloc(tier.self, budget + 1, "layer7 master", &none), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED), AllOf(HasSubstr("layer7 master"), HasSubstr("option links keeps")));
  Shadow region(tier, budget, 1);
  std::vector<std::unique_ptr<Links>> kept;
  for (int generation = 0; generation < 4; ++generation) {
    ASSERT_EQ(region.write(0, budget), "") << generation;
    EXPECT_LE(tier.caps().used_bytes, budget);
    kept.push_back(std::make_unique<Links>(std::vector<std::string>{dir.path}));
  }
  for (const auto& links : kept) EXPECT_EQ(links->changed(), 0u);
}

TEST_P(Linked, SegmentsCostSpareSpaceOfTheBudget) {
  ASSERT_EQ(tier.open(at(dir.path, GetParam()).set("budget_bytes", int64_t(10 * kMiB))), STRATA_OK);
  Shadow region(tier, 8 * kMiB, 1);
  ASSERT_EQ(region.write(0, 8 * kMiB), "");
  {
    const Links links({dir.path});
    EXPECT_EQ(tier.caps().used_bytes, 8 * kMiB);
    EXPECT_EQ(region.write(0, 2 * kMiB), "");
    EXPECT_EQ(tier.caps().used_bytes, 10 * kMiB);
    EXPECT_EQ(region.write(0, 2 * kMiB), "") << "what has moved does not move again";
    void* memory = nullptr;
    ASSERT_EQ(posix_memalign(&memory, 4096, 4096), 0);
    Event done = Event::create();
    ASSERT_EQ(tier.write(region.region, 2 * kMiB, memory, 4096, done.get()), STRATA_RESOURCE_EXHAUSTED);
    std::free(memory);
    EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED),
                AllOf(HasSubstr("layer3 exp_avg"), HasSubstr("1048576 bytes wanted"),
                      HasSubstr("option links = true keeps room"), HasSubstr("segment-0, which is linked"),
                      HasSubstr(std::to_string(10 * kMiB)), HasSubstr(dir.path)));
    EXPECT_FALSE(done->is_set());
    EXPECT_EQ(region.read_all(), "") << "what could not be written is as it was";
    EXPECT_EQ(links.changed(), 0u);
  }
  EXPECT_EQ(tier.caps().used_bytes, 8 * kMiB) << "the link is gone, and with it the spare space";
  EXPECT_EQ(region.write(2 * kMiB, 6 * kMiB), "");
}

// Links that come and go at any moment, in the middle of writes: what the tier holds is right. (The links may hold what
// was under way.)
TEST_P(Linked, AtAnyMomentOfManyWrites) {
  ASSERT_EQ(tier.open(at(dir.path, GetParam()).set("segment_bytes", int64_t(4 * kMiB))), STRATA_OK);
  constexpr uint64_t kPiece = 65536, kCount = 128;
  const strata_region region = tier.alloc(kCount * kPiece);
  void* memory = nullptr;
  ASSERT_EQ(posix_memalign(&memory, 4096, 2 * kCount * kPiece), 0);
  char *const out = static_cast<char*>(memory), *const back = out + kCount * kPiece;
  std::mt19937 random(4);
  for (int round = 0; round < 12; ++round) {
    for (uint64_t i = 0; i < kCount * kPiece; ++i)
      out[i] = static_cast<char>(i / 4096 * 37 + i + static_cast<uint64_t>(round));
    std::vector<uint64_t> order(kCount);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<Event> done;
    std::vector<std::unique_ptr<Links>> kept;
    for (const uint64_t piece : order) {
      done.push_back(Event::create());
      ASSERT_EQ(tier.write(region, piece * kPiece, out + piece * kPiece, kPiece, done.back().get()), STRATA_OK);
      if (random() % 16 == 0) kept.push_back(std::make_unique<Links>(std::vector{dir.path}, false));
      if (random() % 64 == 0) kept.clear();
    }
    for (Event& each : done) ASSERT_TRUE(each->wait(std::chrono::seconds(60)).ok());
    ASSERT_EQ(tier.read(region, 0, back, kCount * kPiece), STRATA_OK);
    ASSERT_EQ(std::memcmp(out, back, kCount * kPiece), 0) << round;
  }
  std::free(memory);
}

INSTANTIATE_TEST_SUITE_P(Io, Linked, testing::Values("io_uring", "threads"),
                         [](const auto& tested) { return tested.param; });

}  // namespace
}  // namespace strata::test
