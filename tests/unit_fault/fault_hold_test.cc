// Held calls of `fault`: nothing happens before the gate opens, nothing waits for ever, and closing lets all go.
#include <atomic>

#include "fault_fixture.h"

namespace strata::test {
namespace {

using std::string;
using testing::AllOf;
using testing::HasSubstr;

class FaultHold : public testing::Test {
 protected:
  OptionMap hold(const string& op_and_number) { return {{"rules", op_and_number + ":hold=" + gate}}; }
  uint64_t waiting() { return control()->waiting(gate.c_str()); }
  void open_gate() { control()->open_gate(gate.c_str()); }
  const string gate = unique("gate");
};

TEST_F(FaultHold, AHeldTransferHasNotBegunAndOthersPass) {
  FaultTier tier(hold("write:2"));
  ASSERT_EQ(tier.write('a'), STRATA_OK);
  Event done = Event::create();
  ASSERT_EQ(tier.write('b', 8, done.get()), STRATA_OK) << "the call returns, its event waits";
  ASSERT_TRUE(eventually([&] { return waiting() == 1; }));
  EXPECT_FALSE(done->is_set());
  EXPECT_EQ(tier.contents(), "aaaaaaaa");
  EXPECT_EQ(done->wait(std::chrono::milliseconds(20)).code(), STRATA_DEADLINE_EXCEEDED);
  open_gate();
  EXPECT_TRUE(done->wait(std::chrono::seconds(10)).ok());
  EXPECT_EQ(tier.contents(), "bbbbbbbb");
  EXPECT_EQ(waiting(), 0u);
}

TEST_F(FaultHold, AHeldCallWithoutAnEventWaitsInTheCall) {
  FaultTier tier(hold("write:*"));
  std::atomic<int> code{-1};
  std::thread caller([&] { code = tier.write('a'); });
  EXPECT_TRUE(eventually([&] { return waiting() == 1; }));
  EXPECT_EQ(code, -1);
  EXPECT_EQ(tier.contents(), string(8, '\0'));
  open_gate();
  caller.join();
  EXPECT_EQ(code, STRATA_OK);
  EXPECT_EQ(tier.contents(), "aaaaaaaa");
  EXPECT_EQ(tier.write('b'), STRATA_OK) << "an open gate stays open";
}

TEST_F(FaultHold, AGateCanBeClosedAgain) {
  open_gate();
  FaultTier tier(hold("write:*"));
  EXPECT_EQ(tier.write('a'), STRATA_OK);
  control()->close_gate(gate.c_str());
  Event done = Event::create();
  ASSERT_EQ(tier.write('b', 8, done.get()), STRATA_OK);
  ASSERT_TRUE(eventually([&] { return waiting() == 1; }));
  EXPECT_FALSE(done->is_set());
  open_gate();
  EXPECT_TRUE(done->wait(std::chrono::seconds(10)).ok());
}

TEST_F(FaultHold, OneGateHoldsAndReleasesManyCalls) {
  FaultTier tier(hold("write:*"));
  std::vector<Event> events;
  for (int i = 0; i < 5; ++i) {
    events.push_back(Event::create());
    ASSERT_EQ(tier.write('a', 8, events.back().get()), STRATA_OK);
  }
  ASSERT_TRUE(eventually([&] { return waiting() == 5; }));
  open_gate();
  for (Event& event : events) EXPECT_TRUE(event->wait(std::chrono::seconds(10)).ok());
}

TEST_F(FaultHold, EndsAtTheDeadlineUndone) {
  FaultTier tier(hold("write:*"), 0, 30'000'000);
  EXPECT_EQ(tier.write('a'), STRATA_DEADLINE_EXCEEDED);
  EXPECT_THAT(reason(STRATA_DEADLINE_EXCEEDED), AllOf(HasSubstr("write call 1"), HasSubstr("30 ms")));
  Event done = Event::create();
  ASSERT_EQ(tier.write('b', 8, done.get()), STRATA_OK);
  const Status status = done->wait(std::chrono::seconds(10));
  EXPECT_EQ(status.code(), STRATA_DEADLINE_EXCEEDED);
  EXPECT_THAT(status.text(), HasSubstr("write call 2"));
  EXPECT_EQ(tier.contents(), string(8, '\0'));
  EXPECT_EQ(waiting(), 0u);
}

TEST_F(FaultHold, ClosingCancelsWhatIsHeld) {
  FaultTier tier(hold("write:*"));
  Event done = Event::create();
  ASSERT_EQ(tier.write('a', 8, done.get()), STRATA_OK);
  ASSERT_TRUE(eventually([&] { return waiting() == 1; }));
  tier.close();
  ASSERT_TRUE(done->is_set());
  EXPECT_EQ(done->wait(std::chrono::seconds(0)).code(), STRATA_CANCELLED);
  EXPECT_EQ(waiting(), 0u);
}

TEST_F(FaultHold, AnErrorOfTheWrappedPluginArrivesByTheEvent) {
  FaultTier tier(hold("write:*"));
  Event done = Event::create();
  tier.data.assign(64, 'x');
  const strata_io_args io{sizeof(io), STRATA_ABI_MINOR, tier.region, 4, 64, tier.data.data()};
  ASSERT_EQ(tier.api->write(tier.self, &io, done.get()), STRATA_OK);
  open_gate();
  const Status status = done->wait(std::chrono::seconds(10));
  EXPECT_EQ(status.code(), STRATA_OUT_OF_RANGE);
  EXPECT_THAT(status.text(), HasSubstr("OUT_OF_RANGE"));
}

TEST_F(FaultHold, ManyThreadsAndManyLateCalls) {
  OptionMap options = {{"rules", string("write:*:late=1, read:*:late=1")}, {"tag", unique("tag")}};
  FaultTier tier(options);
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 25; ++i) {
        string data(2, 'x');
        const strata_io_args io{sizeof(io), STRATA_ABI_MINOR, tier.region, 0, 2, data.data()};
        Event done = Event::create();
        if (tier.api->read(tier.self, &io, done.get()) != STRATA_OK) ++failures;
        if (!done->wait(std::chrono::seconds(10)).ok()) ++failures;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(control()->count(unique("tag").c_str(), 0, "read"), 100u);
}

}  // namespace
}  // namespace strata::test
