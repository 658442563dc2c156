// plugin_kit: whatever the body of a slot does, the caller gets a status and the host a text.
#include "plugin_kit/plugin_kit.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "core/plugins/host.h"
#include "plugin_kit/deadline.h"
#include "plugin_kit/dtypes.h"
#include "plugin_kit/parallel.h"

namespace strata::test {
namespace {

using namespace strata::plugin_kit;

class Kit : public testing::Test {
 protected:
  template <class Body>
  std::string said(strata_status expected, Body body) {
    (void)keep_failure({STRATA_INTERNAL, "an older text"});
    const strata_status code = guard(host.c(), "my_tier open", body);
    EXPECT_EQ(code, expected);
    return take_failure(code).text();
  }
  Host host{[](strata_log_level, const std::string&, const std::string&) {}, STRATA_LOG_DEBUG, 2};
};

TEST_F(Kit, GuardTakesWhateverABodyReturnsOrThrows) {
  EXPECT_EQ(said(STRATA_OK, [] {}), "");
  EXPECT_EQ(said(STRATA_OK, [] { return Error(); }), "");
  EXPECT_EQ(said(STRATA_OK, [] { return strata_status(STRATA_OK); }), "");
  EXPECT_EQ(said(STRATA_DATA_LOSS, [] { return Error(STRATA_DATA_LOSS, "block 7"); }), "my_tier open: block 7");
  EXPECT_EQ(said(STRATA_DATA_LOSS, [] { raise(STRATA_DATA_LOSS, "block ", 7); }), "my_tier open: block 7");
  EXPECT_EQ(said(STRATA_RESOURCE_EXHAUSTED, [] { throw std::bad_alloc(); }), "my_tier open: out of memory");
  EXPECT_EQ(said(STRATA_INTERNAL, [] { throw std::runtime_error("odd"); }), "my_tier open: odd");
  EXPECT_EQ(said(STRATA_INTERNAL, []() -> strata_status { throw 7; }), "my_tier open: an exception of unknown type");
}

TEST_F(Kit, GuardLeavesATextTheHostHasAlready) {
  const auto failing = [&] { return fail(host.c(), STRATA_ABORTED, "the callback's words"); };
  EXPECT_EQ(said(STRATA_ABORTED, failing), "the callback's words");
  EXPECT_EQ(said(STRATA_ABORTED, [&] { throw Error(failing(), ""); }), "the callback's words");
}

TEST_F(Kit, SetDoneEndsAnEventOnce) {
  EXPECT_TRUE(set_done(host.c(), nullptr).ok());
  Event done = Event::create();
  EXPECT_TRUE(set_done(host.c(), done.get()).ok());
  EXPECT_TRUE(done->is_set() && done->wait({}).ok());
}

TEST_F(Kit, PartsCoverARangeOnce) {
  const auto* executor = host_interface<strata_executor_api>(host.c(), STRATA_HOST_EXECUTOR);
  for (const uint64_t total : {0u, 1u, 9u, 10u, 11u, 95u}) {
    for (const auto* on : {executor, static_cast<const strata_executor_api*>(nullptr)}) {
      std::vector<int> seen(total, 0);
      for_parts(on, host.c()->ctx, total, 10, [&](uint64_t begin, uint64_t n) {
        for (uint64_t i = begin; i < begin + n; ++i) ++seen[i];
      });
      EXPECT_EQ(seen, std::vector<int>(total, 1)) << total;
    }
  }
}

TEST(Deadline, LongOnesDoNotOverflowAndPastOnesHavePassed) {
  const Deadline ever = Deadline::after(INT64_MAX), now = Deadline::after(0);
  EXPECT_FALSE(ever.passed());
  EXPECT_GT(ever.left_ns(), 0);
  EXPECT_EQ(ever.poll_ms(10), 10);
  EXPECT_TRUE(now.passed());
  EXPECT_EQ(now.left_ns(), 0);
  EXPECT_EQ(Deadline::after(1'050'000'000).text(), "1.050 s");
}

TEST(Names, StatusAndDtypes) {
  EXPECT_EQ(plugin_kit::status_name(STRATA_AGAIN), "AGAIN");
  EXPECT_EQ(plugin_kit::status_name(99), "99");
  EXPECT_STREQ(strata::status_name(STRATA_NOT_FOUND), plugin_kit::status_name(STRATA_NOT_FOUND).c_str());
  EXPECT_EQ(size_of(STRATA_F64), 8u);
  EXPECT_EQ(size_of(-1) + size_of(0) + size_of(99), 0u);
  EXPECT_STREQ(dtype_name(99), "unknown");
}

}  // namespace
}  // namespace strata::test
