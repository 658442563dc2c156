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
  const Status status = wait_for_all(&work, milliseconds(10000));
  EXPECT_TRUE(ended);
  EXPECT_EQ(status.code(), STRATA_DATA_LOSS);
  EXPECT_EQ(status.text(), "the first");
  EXPECT_TRUE(work.empty());
  later.join();
}

TEST(WaitForAll, IsOkWhereAllAre) {
  std::vector<Work> work = {Work::create(), Work::ending_at({})};
  work[0].enqueued({});
  EXPECT_TRUE(wait_for_all(&work, milliseconds(10000)).ok());
  EXPECT_TRUE(wait_for_all(&work, milliseconds(0)).ok());
}

}  // namespace
}  // namespace strata
