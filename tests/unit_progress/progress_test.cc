// How busy a tier was, in the line of a step: the share of the steps' own time, of a tier that says it, at whatever
// moment it can be asked. What the rest of the line says is tested with the whole engine (tests/train/trace_test.cc).
#include "core/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

namespace strata::test {
namespace {

using testing::HasSubstr;
using testing::Not;
using namespace std::chrono_literals;

// A tier that says what the test wants.
struct Said {
  std::chrono::nanoseconds busy{0};
  bool answers = true;
};
const strata_offload_api* table() {
  static const strata_offload_api api = [] {
    strata_offload_api a{};
    a.open = [](const strata_open_args* args, strata_offload** out) -> strata_status {
      *out = static_cast<strata_offload*>(args->device_self);
      return STRATA_OK;
    };
    a.close = [](strata_offload*) {};
    a.caps = [](strata_offload* self, strata_offload_caps* out) -> strata_status {
      const Said& said = *reinterpret_cast<const Said*>(self);
      out->busy_ns = static_cast<uint64_t>(said.busy.count());
      return said.answers ? STRATA_OK : STRATA_UNAVAILABLE;
    };
    return a;
  }();
  return &api;
}

class Busy : public testing::Test {
 protected:
  Busy() {
    strata_open_args args{};
    args.device_self = &said_;
    EXPECT_TRUE(offload_.open(table(), args).ok());
    tier_ = std::make_unique<Tier>(kNvmeTier, offload_, counters_);
    said_.busy = 1h;  // before the engine was committed
  }
  void start(uint64_t every = 1) {
    progress_ =
        std::make_unique<Progress>(Progress::Run{every, 0, 1}, device_, std::vector<const Tier*>{tier_.get()}, Plan(),
                                   counters_.snapshot(), [this](const std::string& line) { line_ = line; });
  }
  // A step of this length, in which the tier is busy for so long, and its line.
  std::string step(std::chrono::nanoseconds length, std::chrono::nanoseconds busy) {
    std::this_thread::sleep_for(length);
    said_.busy += busy;
    add(counters_.tier_read[kNvmeTier], 4096);
    line_.clear();
    if (const auto line = progress_->step(++steps_, 1, nullptr)) {
      StepOutcome outcome;
      outcome.counted = counters_.snapshot();
      progress_->print(*line, outcome);
    }
    return line_;
  }
  static double percent(const std::string& line) {
    const size_t at = line.find("nvme read 4.00 KiB written 0.00 B, busy ");
    EXPECT_NE(at, line.npos) << line;
    EXPECT_TRUE(line.ends_with(" %")) << line;
    return at == line.npos ? -1 : std::stod(line.substr(line.find("busy ") + 5));
  }

  Said said_;
  Counters counters_;
  Device device_;
  Offload offload_;
  std::unique_ptr<Tier> tier_;
  std::unique_ptr<Progress> progress_;
  std::string line_;
  uint64_t steps_ = 0;
};

TEST_F(Busy, IsTheShareOfTheStepsTime) {
  start();
  EXPECT_EQ(percent(step(1ms, 0s)), 0) << "not what was before";
  // A step takes its sleep at least, so the share is this at most.
  const double half = percent(step(40ms, 20ms));
  EXPECT_GT(half, 0);
  EXPECT_LE(half, 50);
  EXPECT_EQ(percent(step(1ms, 1h)), 100) << "transfers and steps are not read at one moment";
  EXPECT_EQ(percent(step(1ms, 0s)), 0);
}

TEST_F(Busy, IsOfAllStepsOfTheLine) {
  start(2);
  EXPECT_EQ(step(1ms, 1h), "");
  EXPECT_THAT(step(1ms, 0s), HasSubstr("busy 100 %"));
  EXPECT_EQ(step(1ms, 0s), "");
  EXPECT_THAT(step(1ms, 0s), HasSubstr("busy 0 %"));
}

TEST_F(Busy, IsNotOfCallsBetweenSteps) {
  start();
  {
    const Progress::Pause before_the_first(progress_.get());
    said_.busy += 1h;
  }
  EXPECT_EQ(percent(step(1ms, 0s)), 0);
  {
    const Progress::Pause save(progress_.get());
    said_.busy += 1h;
  }
  EXPECT_EQ(percent(step(1ms, 0s)), 0);
  said_.busy += 1h;  // of the step, before a save
  { const Progress::Pause save(progress_.get()); }
  EXPECT_EQ(percent(step(1ms, 0s)), 100);
}

TEST_F(Busy, IsLeftOutWhereTheTierDoesNotKeepIt) {
  said_.busy = 0s;
  start();
  EXPECT_THAT(step(1ms, 0s), Not(HasSubstr("busy")));
  EXPECT_THAT(line_, HasSubstr("nvme read 4.00 KiB"));
}

TEST_F(Busy, WaitsForATierThatCannotSayIt) {
  start();
  said_.answers = false;
  EXPECT_EQ(percent(step(1ms, 1h)), 0);
  said_.answers = true;
  EXPECT_EQ(percent(step(1ms, 0s)), 100);
  EXPECT_EQ(percent(step(1ms, 0s)), 0);
}

}  // namespace
}  // namespace strata::test
