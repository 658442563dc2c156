// What every tier promises, in words of strata.offload/1: zero contents, whole transfers, exact ranges, counted bytes.
// A tier that keeps nothing (null) is held to all but the keeping.
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

#include "offload_fixture.h"
#include "tests/support/disk_dirs.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct TierParam {
  std::string plugin;
  bool keeps;
};
void PrintTo(const TierParam& tier, std::ostream* out) { *out << tier.plugin; }

class Offload : public testing::TestWithParam<TierParam> {
 protected:
  void SetUp() override {
    ASSERT_NE(tier.api, nullptr);
    if (const std::string missing = missing_host_interface(GetParam().plugin); !missing.empty())
      GTEST_SKIP() << missing;
    Options options;
    if (GetParam().plugin == "offload_nvme") options.set("nvme_path", dir.path).set("probe_ms", 0);
    ASSERT_EQ(tier.open(std::move(options)), STRATA_OK);
  }
  std::vector<char> pattern(size_t bytes) {
    std::vector<char> data(bytes);
    for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 31 + i / 4096 + 1);
    return data;
  }
  DiskDir dir;
  Tier tier{GetParam().plugin};
};

TEST_P(Offload, SaysWhatItIs) {
  const strata_offload_caps caps = tier.caps();
  EXPECT_GE(caps.io_alignment, 1u);
  EXPECT_EQ(caps.io_alignment & (caps.io_alignment - 1), 0u);
  EXPECT_GE(caps.max_inflight, 1u);
  EXPECT_EQ(caps.used_bytes, 0u);
  EXPECT_EQ(caps.pinned_bytes, 0u);
  EXPECT_GT(caps.budget_bytes, 0u);
}

TEST_P(Offload, FreshRegionsAreZero) {
  for (uint64_t bytes : {uint64_t{4096}, uint64_t{1} << 20, (uint64_t{9} << 20) + 4096}) {
    const strata_region region = tier.alloc(bytes);
    std::vector<char> data(bytes, 'x');
    ASSERT_EQ(tier.read(region, 0, data.data(), bytes), STRATA_OK);
    EXPECT_EQ(std::count(data.begin(), data.end(), 0), static_cast<ptrdiff_t>(bytes));
    if (tier.caps().flags & STRATA_OFFLOAD_ADDRESSABLE) {
      void* address = nullptr;
      ASSERT_EQ(tier.api->map(tier.self, region, &address), STRATA_OK);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(address) % 4096, 0u);
      EXPECT_EQ(static_cast<char*>(address)[bytes - 1], 0);
    }
    // Memory that comes back from a freed region must be zero again.
    auto full = pattern(bytes);
    ASSERT_EQ(tier.write(region, 0, full.data(), bytes), STRATA_OK);
    tier.api->free(tier.self, region);
  }
}

TEST_P(Offload, KeepsWhatIsWritten) {
  constexpr uint64_t kBytes = (3 << 20) + 8192;
  auto data = pattern(kBytes);
  const strata_region region = tier.alloc(kBytes), other = tier.alloc(4096);
  ASSERT_EQ(tier.write(region, 0, data.data(), kBytes), STRATA_OK);
  const std::vector<char> expected = GetParam().keeps ? data : std::vector<char>(kBytes);
  std::vector<char> back(kBytes, 'x');
  for (uint64_t offset : {uint64_t{0}, uint64_t{4096}, uint64_t{1} << 20, kBytes - 4096}) {
    const uint64_t n = kBytes - offset;
    ASSERT_EQ(tier.read(region, offset, back.data(), n), STRATA_OK);
    EXPECT_EQ(std::memcmp(back.data(), expected.data() + offset, n), 0) << offset;
  }
  ASSERT_EQ(tier.read(other, 0, back.data(), 4096), STRATA_OK);
  EXPECT_EQ(std::count(back.begin(), back.begin() + 4096, 0), 4096);
}

TEST_P(Offload, SetsTheEventOnce) {
  std::vector<char> data(8192);
  const strata_region region = tier.alloc(8192);
  for (bool is_write : {true, false}) {
    Event done = Event::create();
    ASSERT_EQ(is_write ? tier.write(region, 0, data.data(), 8192, done.get())
                       : tier.read(region, 0, data.data(), 8192, done.get()),
              STRATA_OK);
    EXPECT_TRUE(done->wait(std::chrono::seconds(10)).ok());
    EXPECT_TRUE(done->is_set());
  }
}

TEST_P(Offload, RangesAreExact) {
  constexpr uint64_t kBytes = 3 * 4096;
  const strata_region region = tier.alloc(kBytes);
  std::vector<char> data(2 * kBytes);
  EXPECT_EQ(tier.read(region, 0, data.data(), kBytes), STRATA_OK);
  EXPECT_EQ(tier.read(region, kBytes, data.data(), 0), STRATA_OK);
  EXPECT_EQ(tier.write(region, kBytes - 4096, data.data(), 4096), STRATA_OK);
  const std::pair<uint64_t, uint64_t> outside[] = {
      {0, kBytes + 4096},        {4096, kBytes},           {kBytes, 4096}, {kBytes + 4096, 0},
      {UINT64_MAX - 4095, 4096}, {4096, UINT64_MAX - 4095}};
  for (auto [offset, bytes] : outside) {
    Event done = Event::create();
    ASSERT_EQ(tier.read(region, offset, data.data(), bytes, done.get()), STRATA_OUT_OF_RANGE) << offset << " " << bytes;
    EXPECT_THAT(reason(STRATA_OUT_OF_RANGE),
                AllOf(HasSubstr("layer3 exp_avg"), HasSubstr(std::to_string(offset)), HasSubstr(std::to_string(bytes)),
                      HasSubstr(std::to_string(kBytes))));
    EXPECT_FALSE(done->is_set()) << "a call that fails leaves its event alone";
    EXPECT_EQ(tier.write(region, offset, data.data(), bytes), STRATA_OUT_OF_RANGE);
  }
}

TEST_P(Offload, RefusesWhatIsNotThere) {
  char byte = 0;
  strata_region region = 0;
  EXPECT_EQ(tier.read(0, 0, &byte, 0), STRATA_NOT_FOUND);
  EXPECT_EQ(tier.write(12345, 0, &byte, 1), STRATA_NOT_FOUND);
  EXPECT_THAT(reason(STRATA_NOT_FOUND), HasSubstr("12345"));
  EXPECT_EQ(tier.api->alloc(tier.self, 0, "empty unit", &region), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("empty unit"));
  region = tier.alloc(4096);
  EXPECT_EQ(tier.read(region, 0, nullptr, 4096), STRATA_INVALID_ARGUMENT);
  tier.api->free(tier.self, region);
  EXPECT_EQ(tier.read(region, 0, &byte, 0), STRATA_NOT_FOUND);
  tier.api->free(tier.self, region);  // said, not fatal
  EXPECT_THAT(tier.rank.log_lines.back(), HasSubstr("free"));
}

TEST_P(Offload, CountsBytesExactly) {
  const strata_region a = tier.alloc(4096), b = tier.alloc(3 << 20);
  EXPECT_NE(a, 0u);
  EXPECT_NE(a, b);
  EXPECT_EQ(tier.caps().used_bytes, 4096u + (3 << 20));
  tier.api->free(tier.self, a);
  EXPECT_EQ(tier.caps().used_bytes, 3u << 20);
  tier.api->free(tier.self, b);
  EXPECT_EQ(tier.caps().used_bytes, 0u);
}

// Hints change nothing that a caller sees, also those of a later version.
TEST_P(Offload, MakesTheSameRegionsWithHints) {
  if (!STRATA_HAS(tier.api, strata_offload_api, alloc_for) || !tier.api->alloc_for) {
    GTEST_SKIP() << "it makes all regions alike";
  }
  uint64_t used = 0;
  for (const uint32_t flags : {0u, uint32_t{STRATA_REGION_HOST_ONLY}, UINT32_MAX}) {
    strata_region region = 0;
    ASSERT_EQ(tier.api->alloc_for(tier.self, 8192, flags, "layer3 exp_avg", &region), STRATA_OK) << flags;
    EXPECT_EQ(tier.caps().used_bytes, used += 8192);
    std::vector<char> data(8192, 'x');
    ASSERT_EQ(tier.read(region, 0, data.data(), 8192), STRATA_OK);
    EXPECT_EQ(std::count(data.begin(), data.end(), 0), 8192);
    EXPECT_EQ(tier.api->alloc_for(tier.self, 0, flags, "empty unit", &region), STRATA_INVALID_ARGUMENT);
    EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("empty unit"));
  }
}

// Time under way is never more than what the caller waited, and none passes between transfers.
TEST_P(Offload, KeepsHowLongItWasBusyOrSaysNothing) {
  constexpr uint64_t kBytes = 8 << 20;
  auto data = pattern(kBytes);
  const strata_region region = tier.alloc(kBytes);
  uint64_t seen = tier.caps().busy_ns;
  for (int i = 0; i < 6; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    Event done = Event::create();  // two at once are not twice the time
    ASSERT_EQ(tier.write(region, 0, data.data(), kBytes / 2, done.get()), STRATA_OK);
    ASSERT_EQ(tier.read(region, kBytes / 2, data.data() + kBytes / 2, kBytes / 2), STRATA_OK);
    ASSERT_TRUE(done->wait(std::chrono::seconds(10)).ok());
    const uint64_t busy = tier.caps().busy_ns;
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begin;
    if (busy == 0 && GetParam().plugin != "offload_nvme") GTEST_SKIP() << "it does not keep it";
    EXPECT_GT(busy, seen);
    EXPECT_LE(busy - seen, static_cast<uint64_t>(took.count()));
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    seen = tier.caps().busy_ns;
    EXPECT_EQ(seen, busy) << "nothing is under way";
  }
  strata_offload_caps older{};  // of a host that does not know the field
  older.struct_size = offsetof(strata_offload_caps, busy_ns);
  older.busy_ns = 12345;
  ASSERT_EQ(tier.api->caps(tier.self, &older), STRATA_OK);
  EXPECT_EQ(older.busy_ns, 12345u);
}

TEST_P(Offload, SaysTheSameOfItsOwnMemoryHoweverMuchIsInIt) {
  const strata_offload_caps empty = tier.caps();
  tier.alloc(5 << 20);
  const strata_offload_caps full = tier.caps();
  EXPECT_EQ(full.host_bytes, empty.host_bytes);
  EXPECT_EQ(full.host_bytes_per_mib, empty.host_bytes_per_mib);
  strata_offload_caps older{};  // of a host that does not know the fields
  older.struct_size = offsetof(strata_offload_caps, host_bytes);
  older.host_bytes = older.host_bytes_per_mib = 12345;
  ASSERT_EQ(tier.api->caps(tier.self, &older), STRATA_OK);
  EXPECT_EQ(older.host_bytes + older.host_bytes_per_mib, 24690u);
}

class RegisteredMemory : public Offload {
 protected:
  static constexpr uint64_t kBytes = 3 << 20, kBlock = 4096;
  void SetUp() override {
    Offload::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (!STRATA_HAS(tier.api, strata_offload_api, unregister_memory) || !tier.api->register_memory) {
      GTEST_SKIP() << "it gains nothing by registered memory";
    }
    ASSERT_EQ(posix_memalign(reinterpret_cast<void**>(&memory), kBlock, kBytes), 0);
  }
  void TearDown() override {
    std::free(memory);
    Offload::TearDown();
  }
  strata_status add(char* at, uint64_t bytes) { return tier.api->register_memory(tier.self, at, bytes); }
  void remove(char* at) { tier.api->unregister_memory(tier.self, at); }
  // Bytes of this memory go there and come back, by calls and by events, wherever they lie in it.
  void expect_exact(const char* when) {
    const strata_region region = tier.alloc(kBytes);
    for (const auto& [from, to] :
         {std::pair<uint64_t, uint64_t>{0, kBytes}, {kBlock, 2 * kBlock}, {kBytes / 3, kBytes / 2}}) {
      const uint64_t a = from / kBlock * kBlock, n = to / kBlock * kBlock - a;
      const std::vector<char> data = pattern(n + a);
      std::memcpy(memory + a, data.data() + a, n);
      Event done = Event::create();
      ASSERT_EQ(tier.write(region, a, memory + a, n, done.get()), STRATA_OK);
      EXPECT_TRUE(done->wait(std::chrono::seconds(10)).ok()) << when;
      std::memset(memory, 'x', kBytes);
      ASSERT_EQ(tier.read(region, a, memory + a, n), STRATA_OK);
      EXPECT_EQ(std::memcmp(memory + a, data.data() + a, n), 0) << when << ": " << a << " " << n;
      EXPECT_EQ(std::count(memory, memory + kBytes, 'x') >= static_cast<ptrdiff_t>(kBytes - n), true) << when;
    }
    tier.api->free(tier.self, region);
  }
  char* memory = nullptr;
};

TEST_P(RegisteredMemory, KeepsEveryByte) {
  expect_exact("before");
  ASSERT_EQ(add(memory, kBytes / 2), STRATA_OK);
  expect_exact("half of it");
  ASSERT_EQ(add(memory + kBytes / 2, kBlock), STRATA_OK);
  expect_exact("and a block of its own behind that");
  remove(memory);
  expect_exact("the block alone");
  ASSERT_EQ(add(memory, kBytes / 2), STRATA_OK);
  expect_exact("as before");
  remove(memory + kBytes / 2);
  remove(memory);
  expect_exact("none");
  // What is still registered goes with the tier; many come and go.
  for (int i = 0; i < 3000; ++i) {
    ASSERT_EQ(add(memory + i % 3 * kBlock, kBlock), STRATA_OK) << i;
    if (i < 2999) remove(memory + i % 3 * kBlock);
  }
}

TEST_P(RegisteredMemory, RefusesWhatIsNoBlock) {
  const auto refused = [&](char* at, uint64_t bytes, strata_status code) {
    EXPECT_EQ(add(at, bytes), code) << bytes;
    EXPECT_THAT(reason(code), HasSubstr(std::to_string(bytes)));
  };
  refused(nullptr, kBlock, STRATA_INVALID_ARGUMENT);
  refused(memory, 0, STRATA_INVALID_ARGUMENT);
  refused(memory + 512, kBlock, STRATA_INVALID_ARGUMENT);
  refused(memory, kBlock + 512, STRATA_INVALID_ARGUMENT);
  refused(memory, UINT64_MAX / kBlock * kBlock, STRATA_INVALID_ARGUMENT);
  ASSERT_EQ(add(memory + 2 * kBlock, 2 * kBlock), STRATA_OK);
  refused(memory + 2 * kBlock, 2 * kBlock, STRATA_ALREADY_EXISTS);
  refused(memory + 3 * kBlock, kBlock, STRATA_ALREADY_EXISTS);
  refused(memory, 3 * kBlock, STRATA_ALREADY_EXISTS);
  refused(memory, 8 * kBlock, STRATA_ALREADY_EXISTS);
  EXPECT_EQ(add(memory, 2 * kBlock), STRATA_OK) << "neighbours do not overlap";
  EXPECT_EQ(add(memory + 4 * kBlock, kBlock), STRATA_OK);
  tier.rank.log_lines.clear();
  remove(memory + 3 * kBlock);  // said, not fatal
  ASSERT_EQ(tier.rank.log_lines.size(), 1u);
  EXPECT_THAT(tier.rank.log_lines.back(), HasSubstr("unregister_memory"));
  expect_exact("after refusals");
}

std::vector<TierParam> tiers() {
  std::vector<TierParam> all = {{"offload_cpu", true}, {"null", false}, {"offload_nvme", true}};
  if (!plugin_from_outside().empty()) all.push_back({plugin_from_outside(), true});
  return all;
}
std::string name_of(const testing::TestParamInfo<TierParam>& tested) { return plugin_id(tested.param.plugin); }
INSTANTIATE_TEST_SUITE_P(Tiers, Offload, testing::ValuesIn(tiers()), name_of);
INSTANTIATE_TEST_SUITE_P(Tiers, RegisteredMemory, testing::ValuesIn(tiers()), name_of);

}  // namespace
}  // namespace strata::test
