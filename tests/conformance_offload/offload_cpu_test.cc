// offload_cpu's own promises: a budget kept to the byte, page-locked memory within its budget or ordinary memory with
// one warning (cases.md 18), and nothing left behind by opening and closing.
#include <sys/mman.h>

#include <fstream>
#include <iterator>
#include <map>
#include <vector>

#include "offload_fixture.h"
#include "strata/iface/device.h"

namespace strata::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// The part of a device plugin that offload_cpu asks: page-locked memory, out of a limited supply.
class PinningDevice {
 public:
  explicit PinningDevice(uint64_t supply = UINT64_MAX, strata_status refusal = STRATA_RESOURCE_EXHAUSTED)
      : supply_(supply), refusal_(refusal) {
    table.struct_size = sizeof(table);
    table.alloc_pinned = [](strata_device* self, uint64_t bytes, void** out) {
      return reinterpret_cast<PinningDevice*>(self)->alloc(bytes, out);
    };
    table.free_pinned = [](strata_device* self, void* p) { reinterpret_cast<PinningDevice*>(self)->free(p); };
  }
  void* self() { return this; }
  uint64_t pinned() const { return pinned_; }
  uint64_t most() const { return most_; }
  size_t blocks() const { return blocks_.size(); }
  uint64_t skew = 0;  // bytes off the 4096 boundary
  strata_device_api table{};

 private:
  // Mapped, not from malloc: a memory checker keeps freed blocks, which would look like a leak.
  strata_status alloc(uint64_t bytes, void** out) {
    if (bytes > supply_ - pinned_) return refusal_;
    void* p = mmap(nullptr, bytes + skew, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return refusal_;
    std::memset(p, 0xCC, bytes + skew);  // page-locked memory comes as it is
    *out = static_cast<char*>(p) + skew;
    blocks_[*out] = bytes;
    pinned_ += bytes;
    most_ = std::max(most_, pinned_);
    return STRATA_OK;
  }
  void free(void* p) {
    auto found = blocks_.find(p);
    ASSERT_NE(found, blocks_.end());
    pinned_ -= found->second;
    munmap(static_cast<char*>(p) - skew, found->second + skew);
    blocks_.erase(found);
  }
  uint64_t supply_, pinned_ = 0, most_ = 0;
  strata_status refusal_;
  std::map<void*, uint64_t> blocks_;
};

constexpr uint64_t kMiB = 1 << 20;

class OffloadCpu : public testing::Test {
 protected:
  std::vector<std::string> warnings() {
    std::vector<std::string> found;
    for (const std::string& line : tier.rank.log_lines) {
      if (line.find("pin_memory") != std::string::npos) found.push_back(line);
    }
    return found;
  }
  PinningDevice device;  // outlives the tier, as args->device does
  Tier tier{"offload_cpu"};
};

TEST_F(OffloadCpu, KeepsItsBudgetToTheByte) {
  ASSERT_EQ(tier.open(Options().set("budget_bytes", 1'000'001)), STRATA_OK);
  EXPECT_EQ(tier.caps().budget_bytes, 1'000'001u);
  const strata_region a = tier.alloc(1'000'000);
  tier.alloc(1);
  EXPECT_EQ(tier.caps().used_bytes, 1'000'001u);
  strata_region none = 0;
  ASSERT_EQ(tier.api->alloc(tier.self, 1, "layer7 master", &none), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED),
              AllOf(HasSubstr("layer7 master"), HasSubstr("1 bytes wanted"), HasSubstr("1000001")));
  EXPECT_EQ(none, 0u);
  tier.api->free(tier.self, a);
  EXPECT_EQ(tier.api->alloc(tier.self, 1'000'001, "too big by one", &none), STRATA_RESOURCE_EXHAUSTED);
  tier.alloc(1'000'000);
  EXPECT_EQ(tier.api->alloc(tier.self, UINT64_MAX, "wraps around", &none), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_EQ(tier.caps().used_bytes, 1'000'001u);
}

TEST_F(OffloadCpu, TellsWhenTheSystemRefuses) {
  ASSERT_EQ(tier.open(), STRATA_OK);
  EXPECT_EQ(tier.caps().budget_bytes, UINT64_MAX);
  strata_region none = 0;
  ASSERT_EQ(tier.api->alloc(tier.self, uint64_t{1} << 60, "vast", &none), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED),
              AllOf(HasSubstr("vast"), HasSubstr(std::to_string(uint64_t{1} << 60))));
  EXPECT_EQ(tier.caps().used_bytes, 0u);
}

TEST_F(OffloadCpu, RefusesNegativeBudgets) {
  EXPECT_EQ(tier.open(Options().set("budget_bytes", -1)), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("budget_bytes = -1"));
  EXPECT_EQ(tier.open(Options().set("pinned_budget_bytes", -2)), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("pinned_budget_bytes = -2"));
}

TEST_F(OffloadCpu, PinsWithinItsBudgetAndWarnsOnceBeyond) {
  ASSERT_EQ(tier.open(Options().set("pin_memory", true).set("pinned_budget_bytes", int64_t(8 * kMiB)), &device.table,
                      device.self()),
            STRATA_OK);
  // Four buffers of a million fp32 each, 16 MB, against 8 MiB (cases.md 18).
  std::vector<strata_region> regions;
  for (int i = 0; i < 4; ++i) {
    regions.push_back(tier.alloc(4'000'000, "buffer"));
    EXPECT_LE(tier.caps().pinned_bytes, 8 * kMiB);
    EXPECT_EQ(tier.caps().pinned_bytes, device.pinned());
  }
  EXPECT_EQ(device.pinned(), 8'000'000u);
  EXPECT_EQ(tier.caps().used_bytes, 16'000'000u);
  ASSERT_EQ(warnings().size(), 1u);
  EXPECT_THAT(warnings()[0], AllOf(HasSubstr("4000000"), HasSubstr("8388608"), HasSubstr("8000000")));
  for (strata_region region : regions) {
    std::vector<char> data(4'000'000, 'x');
    ASSERT_EQ(tier.read(region, 0, data.data(), data.size()), STRATA_OK);
    EXPECT_EQ(std::count(data.begin(), data.end(), 0), 4'000'000);
  }
  // Freed room can be pinned again.
  tier.api->free(tier.self, regions[0]);
  EXPECT_EQ(device.pinned(), 4'000'000u);
  tier.alloc(4 * kMiB, "reborn");
  EXPECT_EQ(device.pinned(), 4'000'000u + 4 * kMiB);
  EXPECT_LE(device.most(), 8 * kMiB);
  tier.close();
  EXPECT_EQ(device.blocks(), 0u);
}

TEST_F(OffloadCpu, DoesNotPinWhatNoDeviceCopies) {
  ASSERT_EQ(tier.open(Options().set("pin_memory", true).set("pinned_budget_bytes", int64_t(2 * kMiB)), &device.table,
                      device.self()),
            STRATA_OK);
  strata_region region = 0;
  for (int i = 0; i < 3; ++i) {  // nor does it use up the budget, or warn
    ASSERT_EQ(tier.api->alloc_for(tier.self, 2 * kMiB, STRATA_REGION_HOST_ONLY, "layer3 exp_avg", &region), STRATA_OK);
  }
  EXPECT_EQ(device.most(), 0u);
  EXPECT_EQ(tier.caps().used_bytes, 6 * kMiB);
  ASSERT_EQ(tier.api->alloc_for(tier.self, 2 * kMiB, 0, "gradients", &region), STRATA_OK);
  EXPECT_EQ(device.pinned(), 2 * kMiB);
  EXPECT_TRUE(warnings().empty());
}

TEST_F(OffloadCpu, PinnedBudgetZeroPinsNothing) {
  ASSERT_EQ(tier.open(Options().set("pin_memory", true).set("pinned_budget_bytes", 0), &device.table, device.self()),
            STRATA_OK);
  tier.alloc(kMiB);
  tier.alloc(kMiB);
  EXPECT_EQ(device.most(), 0u);
  EXPECT_EQ(tier.caps().pinned_bytes, 0u);
  EXPECT_EQ(warnings().size(), 1u);
}

TEST_F(OffloadCpu, UsesOrdinaryMemoryWhereTheDeviceCannotPin) {
  PinningDevice out_of_supply(kMiB), cannot(0, STRATA_UNIMPLEMENTED), crooked;
  crooked.skew = 512;
  strata_device_api without_slot = cannot.table;
  without_slot.alloc_pinned = nullptr;
  const strata_device_api* tables[] = {&out_of_supply.table, &cannot.table, &crooked.table, &without_slot, nullptr};
  void* selves[] = {out_of_supply.self(), cannot.self(), crooked.self(), cannot.self(), nullptr};
  for (size_t i = 0; i < std::size(tables); ++i) {
    Tier t("offload_cpu");
    ASSERT_EQ(t.open(Options().set("pin_memory", true), tables[i], selves[i]), STRATA_OK);
    t.alloc(2 * kMiB);
    t.alloc(2 * kMiB);
    EXPECT_EQ(t.caps().pinned_bytes, 0u);
    EXPECT_EQ(t.caps().used_bytes, 4 * kMiB);
    ASSERT_EQ(t.rank.log_lines.size(), 1u) << i;
    EXPECT_THAT(t.rank.log_lines[0], HasSubstr("ordinary memory"));
  }
  EXPECT_EQ(crooked.blocks(), 0u);
}

TEST_F(OffloadCpu, DoesNotHideOtherErrorsOfTheDevice) {
  PinningDevice broken(0, STRATA_INTERNAL);  // pins nothing, so it may go before the tier
  ASSERT_EQ(tier.open(Options().set("pin_memory", true), &broken.table, broken.self()), STRATA_OK);
  strata_region none = 0;
  EXPECT_EQ(tier.api->alloc(tier.self, kMiB, "state", &none), STRATA_INTERNAL);
  EXPECT_EQ(tier.caps().used_bytes, 0u);
}

TEST_F(OffloadCpu, DoesNotPinUnasked) {
  ASSERT_EQ(tier.open({}, &device.table, device.self()), STRATA_OK);
  tier.alloc(kMiB);
  EXPECT_EQ(device.most(), 0u);
  EXPECT_TRUE(warnings().empty());
}

uint64_t mapped_bytes() {
  std::ifstream statm("/proc/self/statm");
  uint64_t pages = 0;
  statm >> pages;
  return pages * 4096;
}

TEST_F(OffloadCpu, LeavesNothingBehindInFiftyCycles) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "AddressSanitizer maps memory of its own; its leak check covers this";
#endif
  uint64_t before = 0;
  for (int cycle = 0; cycle < 50; ++cycle) {
    if (cycle == 2) before = mapped_bytes();
    ASSERT_EQ(tier.open(Options().set("pin_memory", true).set("pinned_budget_bytes", int64_t(4 * kMiB)), &device.table,
                        device.self()),
              STRATA_OK);
    tier.alloc(3 * kMiB, "pinned");
    tier.alloc(16 * kMiB, "ordinary");
    tier.alloc(100, "small");
    tier.close();
    ASSERT_EQ(device.blocks(), 0u);
  }
  EXPECT_LT(mapped_bytes(), before + 16 * kMiB) << "one leaked region per cycle would be 48 times as much";
}

}  // namespace
}  // namespace strata::test
