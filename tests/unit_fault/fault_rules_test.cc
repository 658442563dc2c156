// Rules of `fault`: which calls they hit, what fail, short and late do, what is counted, and which rules are refused.
#include <filesystem>

#include "fault_fixture.h"
#include "tests/support/disk_dirs.h"

namespace strata::test {
namespace {

using std::string;
using testing::AllOf;
using testing::HasSubstr;

TEST(FaultRules, PassesEverythingOnWithoutRules) {
  FaultTier tier({{"tag", unique("tag")}});
  ASSERT_TRUE(tier.opened.ok()) << tier.opened.text();
  EXPECT_EQ(tier.write('a'), STRATA_OK);
  EXPECT_EQ(tier.contents(), "aaaaaaaa");
  strata_offload_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_EQ(tier.api->caps(tier.self, &caps), STRATA_OK);
  EXPECT_EQ(caps.flags, STRATA_OFFLOAD_ADDRESSABLE);
  EXPECT_EQ(caps.used_bytes, 8u);
  EXPECT_EQ(caps.budget_bytes, 1u << 20) << "the wrapped plugin keeps its own options";
  void* address = nullptr;
  ASSERT_EQ(tier.api->map(tier.self, tier.region, &address), STRATA_OK);
  EXPECT_EQ(string(static_cast<char*>(address), 8), "aaaaaaaa");
}

TEST(FaultRules, FailsTheNthCallOnlyAndDoesNotPassItOn) {
  FaultTier tier({{"rules", string("write:2:fail=DATA_LOSS")}});
  EXPECT_EQ(tier.write('a'), STRATA_OK);
  Event done = Event::create();
  ASSERT_EQ(tier.write('b', 8, done.get()), STRATA_DATA_LOSS);
  EXPECT_THAT(reason(STRATA_DATA_LOSS),
              AllOf(HasSubstr("write call 2"), HasSubstr("offload_cpu"), HasSubstr("write:2:fail=DATA_LOSS")));
  EXPECT_FALSE(done->is_set());
  EXPECT_EQ(tier.contents(), "aaaaaaaa");
  EXPECT_EQ(tier.write('c'), STRATA_OK);
  EXPECT_EQ(tier.contents(), "cccccccc");
}

TEST(FaultRules, CountsFromNOnAndEveryCall) {
  FaultTier tier({{"rules", string("write:3+:fail=UNAVAILABLE, offload.map:*:fail, read:2:fail=8")}});
  EXPECT_EQ(tier.write('a'), STRATA_OK);
  EXPECT_EQ(tier.write('b'), STRATA_OK);
  EXPECT_EQ(tier.write('c'), STRATA_UNAVAILABLE);
  EXPECT_EQ(tier.write('d'), STRATA_UNAVAILABLE);
  void* address;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(tier.api->map(tier.self, tier.region, &address), STRATA_INTERNAL);
  EXPECT_EQ(tier.contents(), "bbbbbbbb");
  const strata_io_args io{sizeof(io), STRATA_ABI_MINOR, tier.region, 0, 8, tier.data.data()};
  EXPECT_EQ(tier.api->read(tier.self, &io, nullptr), STRATA_RESOURCE_EXHAUSTED);
}

TEST(FaultRules, ShortMovesHalfAndReportsTheLoss) {
  FaultTier tier({{"rules", string("write:2+:short, read:2:short")}});
  EXPECT_EQ(tier.write('a'), STRATA_OK);
  ASSERT_EQ(tier.write('b'), STRATA_DATA_LOSS);
  EXPECT_THAT(reason(STRATA_DATA_LOSS), HasSubstr("half of its 8 bytes"));
  EXPECT_EQ(tier.contents(), "bbbbaaaa");
  Event done = Event::create();
  ASSERT_EQ(tier.write('c', 4, done.get()), STRATA_OK) << "with an event the loss comes by the event";
  const Status status = done->wait(std::chrono::seconds(10));
  EXPECT_EQ(status.code(), STRATA_DATA_LOSS);
  EXPECT_THAT(status.text(), HasSubstr("write call 3"));
  string text = "........";
  const strata_io_args io{sizeof(io), STRATA_ABI_MINOR, tier.region, 0, 8, text.data()};
  EXPECT_EQ(tier.api->read(tier.self, &io, nullptr), STRATA_DATA_LOSS);
  EXPECT_EQ(text, "ccbb....");
}

TEST(FaultRules, LateCallsStillHappen) {
  FaultTier tier({{"rules", string("write:*:late=30, read:1:late=1, open:1:late=1, close:1:late=1, free:*:late=0")}});
  Event done = Event::create();
  ASSERT_EQ(tier.write('a', 8, done.get()), STRATA_OK);
  EXPECT_TRUE(done->wait(std::chrono::seconds(10)).ok());
  EXPECT_EQ(tier.contents(), "aaaaaaaa");
  EXPECT_EQ(tier.write('b'), STRATA_OK);
  EXPECT_EQ(tier.contents(), "bbbbbbbb");
  tier.api->free(tier.self, tier.region);
}

TEST(FaultRules, LateBeyondTheDeadlineIsAnError) {
  FaultTier tier({{"rules", string("write:1:late=600000")}}, 0, 20'000'000);
  EXPECT_EQ(tier.write('a'), STRATA_DEADLINE_EXCEEDED);
  EXPECT_THAT(reason(STRATA_DEADLINE_EXCEEDED), AllOf(HasSubstr("write call 1"), HasSubstr("20 ms")));
}

TEST(FaultRules, TheFirstMatchingRuleCounts) {
  FaultTier tier({{"rules", string("write:1:fail=ABORTED, write:*:fail=UNKNOWN")}});
  EXPECT_EQ(tier.write('a'), STRATA_ABORTED);
  EXPECT_EQ(tier.write('a'), STRATA_UNKNOWN);
}

TEST(FaultRules, OpenCanFail) {
  FaultTier tier({{"rules", string("offload.open:1:fail=UNAVAILABLE")}});
  EXPECT_EQ(tier.opened.code(), STRATA_UNAVAILABLE);
  EXPECT_THAT(tier.opened.text(), HasSubstr("open call 1"));
}

TEST(FaultRules, HidesTheMap) {
  FaultTier tier({{"hide_map", true}});
  strata_offload_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_EQ(tier.api->caps(tier.self, &caps), STRATA_OK);
  EXPECT_EQ(caps.flags & STRATA_OFFLOAD_ADDRESSABLE, 0u);
  void* address = nullptr;
  EXPECT_EQ(tier.api->map(tier.self, tier.region, &address), STRATA_UNIMPLEMENTED);
  EXPECT_EQ(tier.write('a'), STRATA_OK);
  EXPECT_EQ(tier.contents(), "aaaaaaaa");
}

TEST(FaultRules, PassesRegisteredMemoryOn) {
  const string tag = unique("tag");
  FaultTier tier({{"tag", tag}, {"rules", string("register_memory:2:fail=RESOURCE_EXHAUSTED")}});
  alignas(4096) char memory[8192];
  EXPECT_EQ(tier.api->register_memory(tier.self, memory, 4096), STRATA_OK) << "the default of what is wrapped";
  EXPECT_EQ(tier.api->register_memory(tier.self, memory + 4096, 4096), STRATA_RESOURCE_EXHAUSTED);
  tier.api->unregister_memory(tier.self, memory);
  EXPECT_EQ(control()->bytes_seen(tag.c_str(), 0, "offload.register_memory"), 8192u);
  EXPECT_EQ(control()->count(tag.c_str(), 0, "unregister_memory"), 1u);
}

// Whether what is wrapped knows hints or not, it is one call of alloc.
TEST(FaultRules, PassesHintsOnAsAlloc) {
  const string tag = unique("tag");
  for (const string wraps : {"offload_cpu", "null"}) {
    FaultTier tier({{"tag", tag + wraps}, {"wraps", wraps}, {"rules", string("alloc:3:fail=RESOURCE_EXHAUSTED")}});
    strata_region region = 0;
    EXPECT_EQ(tier.api->alloc_for(tier.self, 8, STRATA_REGION_HOST_ONLY, "x", &region), STRATA_OK) << wraps;
    EXPECT_NE(region, 0u);
    EXPECT_EQ(tier.api->alloc_for(tier.self, 8, STRATA_REGION_HOST_ONLY, "x", &region), STRATA_RESOURCE_EXHAUSTED);
    EXPECT_EQ(control()->bytes_seen((tag + wraps).c_str(), 0, "offload.alloc"), 24u);
  }
}

TEST(FaultRules, PassesTheTimeUnderWayOn) {
  if (!std::filesystem::exists(this_build().directories[0] / "offload_nvme.so")) GTEST_SKIP() << "no offload_nvme";
  const DiskDir dir;
  FaultRank rank({{"fault", {{"wraps", string("offload_nvme")}}},
                  {"offload_nvme", {{"nvme_path", dir.path}, {"probe_ms", int64_t{0}}}}});
  const strata_offload_api* api = nullptr;
  strata_offload* self = nullptr;
  ASSERT_TRUE(rank.open(STRATA_OFFLOAD, &api, &self).ok());
  strata_region region = 0;
  ASSERT_EQ(api->alloc(self, 4096, "written with zeros", &region), STRATA_OK);
  strata_offload_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_EQ(api->caps(self, &caps), STRATA_OK);
  EXPECT_GT(caps.busy_ns, 0u);
  api->close(self);
}

TEST(FaultRules, CountsCallsAndBytesByTagAndRank) {
  const string tag = unique("tag");
  FaultTier first({{"tag", tag}, {"rules", string("write:2:fail")}}, 0), second({{"tag", tag}}, 1);
  first.write('a');
  first.write('b', 4);
  second.write('c');
  second.contents();
  EXPECT_EQ(control()->count(tag.c_str(), 0, "write"), 2u) << "a failed call is a call";
  EXPECT_EQ(control()->count(tag.c_str(), 1, "offload.write"), 1u);
  EXPECT_EQ(control()->count(tag.c_str(), -1, "write"), 3u);
  EXPECT_EQ(control()->count(tag.c_str(), -1, "checkpoint.write"), 0u);
  EXPECT_EQ(control()->bytes_seen(tag.c_str(), 0, "offload.write"), 12u);
  EXPECT_EQ(control()->bytes_seen(tag.c_str(), -1, "write"), 20u);
  EXPECT_EQ(control()->bytes_seen(tag.c_str(), -1, "read"), 8u);
  EXPECT_EQ(control()->bytes_seen(tag.c_str(), -1, "alloc"), 16u);
  EXPECT_EQ(control()->count(tag.c_str(), 0, "open"), 1u);
  EXPECT_EQ(control()->count("nobody", -1, "write"), 0u);
  EXPECT_EQ(control()->count(tag.c_str(), -1, "wrtie"), 0u);
  first.close();
  EXPECT_EQ(control()->count(tag.c_str(), 0, "write"), 2u) << "counters outlive the instance";
  EXPECT_EQ(control()->count(tag.c_str(), 0, "close"), 1u);
}

TEST(FaultRules, RefusesWrongRules) {
  const std::pair<const char*, const char*> wrong[] = {
      {"write", "OP:N:KIND"},          {"write:1", "OP:N:KIND"},         {"wrtie:1:fail", "no interface has a slot"},
      {"device.write:1:fail", "slot"}, {"write:0:fail", "call number"},  {"write:-1:fail", "call number"},
      {"write:x:fail", "call number"}, {"write:1x:fail", "call number"}, {"write:+:fail", "call number"},
      {"write:1:explode", "none of"},  {"write:1:fail=NOPE", "none of"}, {"write:1:fail=0", "none of"},
      {"write:1:late", "none of"},     {"write:1:late=-5", "none of"},   {"write:1:hold", "none of"},
      {"write:1:hold=", "none of"},    {"write:1:short=2", "none of"},   {"free:1:fail", "cannot fail"},
      {"alloc:1:short", "short"},      {"write:1:fail,", "OP:N:KIND"},   {",", "OP:N:KIND"}};
  for (auto [rules, word] : wrong) {
    FaultTier tier({{"rules", string(rules)}});
    EXPECT_EQ(tier.opened.code(), STRATA_INVALID_ARGUMENT) << rules;
    EXPECT_THAT(tier.opened.text(), AllOf(HasSubstr("rules"), HasSubstr(word))) << rules;
  }
}

TEST(FaultRules, RefusesWrongWraps) {
  EXPECT_EQ(FaultTier({{"wraps", string("")}}).opened.code(), STRATA_INVALID_ARGUMENT);
  EXPECT_EQ(FaultTier({{"wraps", string("fault")}}).opened.code(), STRATA_INVALID_ARGUMENT);
  FaultTier absent({{"wraps", string("no_such_plugin")}});
  EXPECT_EQ(absent.opened.code(), STRATA_NOT_FOUND);
  EXPECT_THAT(absent.opened.text(), HasSubstr("no_such_plugin"));
  EXPECT_FALSE(FaultTier({{"wraps", string("device_host")}}).opened.ok()) << "has no offload";
  FaultTier several({{"wraps", string("device_host, offload_cpu , null")}});
  ASSERT_TRUE(several.opened.ok()) << several.opened.text();
  EXPECT_EQ(several.write('a'), STRATA_OK);
  EXPECT_EQ(several.contents(), "aaaaaaaa") << "null would have forgotten";
}

TEST(FaultRules, NeedsAHostThatFindsPlugins) {
  Rank rank;
  Options options;
  const strata_open_args args = rank.args(&options.set("wraps", "offload_cpu"));
  strata_offload* self = nullptr;
  EXPECT_EQ(load<strata_offload_api>("fault", STRATA_OFFLOAD)->open(&args, &self), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(reason(STRATA_FAILED_PRECONDITION), HasSubstr(STRATA_HOST_PLUGINS));
}

}  // namespace
}  // namespace strata::test
