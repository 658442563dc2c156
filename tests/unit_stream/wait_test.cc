// wait_for_all: memory that several transfers use must outlive all of them, also when the first one failed.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/stream.h"

namespace strata {
namespace {

using std::chrono::milliseconds;

TEST(WaitForAll, WaitsBehindAFailure) {
  std::vector<Work> work = {Work::create(), Work::create(), Work::create()};
  work[0].failed({STRATA_DATA_LOSS, "the first"});
  std::atomic<bool> ended{false};
  std::thread later([&, second = work[1], third = work[2]]() mutable {
    std::this_thread::sleep_for(milliseconds(50));
    third.failed({STRATA_INTERNAL, "the third"});
    std::this_thread::sleep_for(milliseconds(50));
    ended = true;
    second.enqueued({});
  });
  bool late = false;
  const Status status = wait_for_all(&work, milliseconds(10000), &late);
  EXPECT_TRUE(ended);
  EXPECT_FALSE(late);
  EXPECT_EQ(status.code(), STRATA_DATA_LOSS);
  EXPECT_EQ(status.text(), "the first");
  EXPECT_TRUE(work.empty());
  later.join();
}

TEST(WaitForAll, IsOkWhereAllAre) {
  std::vector<Work> work = {Work::create(), Work::ending_at({})};
  work[0].enqueued({});
  bool late = false;
  EXPECT_TRUE(wait_for_all(&work, milliseconds(10000), &late).ok());
  EXPECT_TRUE(wait_for_all(&work, milliseconds(0), &late).ok());
  EXPECT_FALSE(late);
}

// Behind another failure too, and whether it is this wait that was too short or who does it that gave up.
TEST(WaitForAll, SaysThatOneMayEndLater) {
  for (const bool given_up : {false, true}) {
    std::vector<Work> work = {Work::create(), Work::create()};
    work[0].failed({STRATA_DATA_LOSS, "the first"});
    if (given_up) work[1].failed({STRATA_DEADLINE_EXCEEDED, "the disk does not answer"});
    bool late = false;
    EXPECT_EQ(wait_for_all(&work, milliseconds(1), &late).code(), STRATA_DATA_LOSS);
    EXPECT_TRUE(late) << given_up;
  }
}

}  // namespace
}  // namespace strata
