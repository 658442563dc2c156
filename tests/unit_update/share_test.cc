// share_test.cc - the measured share of the split update: where it goes, by the rates of both sides, and the whole
// parts that a step meets it with. That no share changes a bit is proven in tests/train.
#include "core/update/share.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/spread.h"

namespace strata {
namespace {

using Side = UpdateShare::Side;

constexpr uint64_t kElements = 1'000'000;

// What both sides of a step took, at these rates in elements a second.
void step(UpdateShare* share, double host_rate, double device_rate) {
  const double on_device = share->share() * kElements, on_host = kElements - on_device;
  share->measured({static_cast<uint64_t>(on_host), on_host / host_rate},
                  {static_cast<uint64_t>(on_device), on_device / device_rate});
}

double settled(UpdateShare share, double host_rate, double device_rate) {
  for (int i = 0; i < 60; ++i) step(&share, host_rate, device_rate);
  return share.share();
}

TEST(UpdateShare, EndsWhereBothSidesEndTogether) {
  for (const auto& [host, device] : {std::pair{1e9, 1e9}, {3e9, 1e9}, {1e9, 3e9}, {7e8, 4.2e8}, {12.0, 5.0}}) {
    const double share = settled(UpdateShare(-1), host, device);
    EXPECT_NEAR((1 - share) / host, share / device, 1e-6 / host) << host << " and " << device;
  }
}

TEST(UpdateShare, GoesHalfWayEachStep) {
  UpdateShare share(-1);
  double before = share.share();
  for (int i = 0; i < 5; ++i) {
    step(&share, 1e9, 1e9);
    EXPECT_NEAR(share.share(), (before + 0.5) / 2, 1e-5) << i;
    before = share.share();
  }
}

TEST(UpdateShare, FollowsRatesThatChange) {
  UpdateShare share(-1);
  for (int i = 0; i < 60; ++i) step(&share, 4e9, 1e9);
  EXPECT_NEAR(share.share(), 0.2, 1e-5);
  for (int i = 0; i < 60; ++i) step(&share, 1e9, 4e9);
  EXPECT_NEAR(share.share(), 0.8, 1e-5);
}

// A side that is left without work could never show that it has become faster.
TEST(UpdateShare, LeavesBothSidesSomeWork) {
  for (const auto& [host, device] : {std::pair{1e12, 1.0}, {1.0, 1e12}, {1e300, 1e-300}, {1e-300, 1e300}}) {
    const double share = settled(UpdateShare(-1), host, device);
    EXPECT_GT(share, host > device ? 0.01 : 0.9) << host << " and " << device;
    EXPECT_LT(share, host > device ? 0.1 : 0.99) << host << " and " << device;
  }
}

// Before the first step nothing is known; after it, a side may have had less to do than the clock shows.
TEST(UpdateShare, StaysWhereNothingIsKnown) {
  UpdateShare share(-1);
  const double first = share.share();
  EXPECT_GT(first, 0);
  EXPECT_LT(first, 1);
  for (const auto& [host, device] : std::vector<std::pair<Side, Side>>{
           {{}, {}}, {{kElements, 0.1}, {kElements, 0}}, {{kElements, 0}, {kElements, 0.1}}, {{0, 0.1}, {0, 0.1}}}) {
    share.measured(host, device);
    EXPECT_EQ(share.share(), first);
  }
  share.measured({kElements, 0.1}, {kElements, 0.1});
  EXPECT_NE(share.share(), first);
}

// The share is met by whole parts: of a few, a share near 0 or 1 is none or all of them, of both sides' rates whatever.
TEST(UpdateShare, ASideWithoutAPartIsHeardAgain) {
  for (const auto& [host, device] : {std::pair{1.0, 1e3}, {1e3, 1.0}}) {
    UpdateShare share(-1);
    int heard = 0;
    for (int i = 0; i < 60; ++i) {
      const uint64_t on_device = static_cast<uint64_t>(std::lround(4 * share.share())), on_host = 4 - on_device;
      share.measured({on_host, static_cast<double>(on_host) / host},
                     {on_device, static_cast<double>(on_device) / device});
      if (i >= 30 && on_host > 0 && on_device > 0) ++heard;
    }
    EXPECT_GE(heard, 10) << host << " and " << device;
  }
}

TEST(UpdateShare, AFixedOneStays) {
  for (const double fixed : {0.0, 0.4, 1.0}) {
    UpdateShare share(fixed);
    EXPECT_FALSE(share.measures());
    for (int i = 0; i < 3; ++i) share.measured({kElements, 1}, {kElements, 1e-3});
    EXPECT_EQ(share.share(), fixed);
  }
  EXPECT_TRUE(UpdateShare(-1).measures());
}

// ---- the parts a share is met with -------------------------------------------------------------------------------

uint64_t chosen_of(double share, const std::vector<uint64_t>& parts) {
  Spread spread(share);
  uint64_t chosen = 0;
  for (const uint64_t elements : parts) chosen += spread.next(elements) ? elements : 0;
  return chosen;
}

TEST(Spread, MeetsAShareByWholePartsToHalfAPart) {
  for (const double share : {0.0, 0.02, 0.25, 0.3, 0.5, 0.61, 0.95, 1.0}) {
    for (const size_t count : {1u, 2u, 7u, 100u}) {
      const std::vector<uint64_t> parts(count, 2048);
      const uint64_t chosen = chosen_of(share, parts);
      EXPECT_EQ(chosen % 2048, 0u);
      EXPECT_NEAR(static_cast<double>(chosen), share * 2048 * static_cast<double>(count), 1024)
          << share << ' ' << count;
    }
  }
  EXPECT_EQ(chosen_of(0, {2048, 2048}), 0u);
  EXPECT_EQ(chosen_of(1, {4096, 2048, 8192}), 14336u);
}

// Both sides work all the time: no side's parts come all first.
TEST(Spread, LiesEvenlyOverTheParts) {
  Spread spread(0.25);
  double chosen = 0;
  for (int part = 1; part <= 400; ++part) {
    chosen += spread.next(2048) ? 1 : 0;
    EXPECT_NEAR(chosen, 0.25 * part, 0.76) << part;
  }
}

}  // namespace
}  // namespace strata
