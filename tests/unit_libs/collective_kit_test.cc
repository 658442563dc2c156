// collective_kit: which calls are refused before any data moves, and the words for ranks that differ. (The plugins' own
// tests run the slots.)
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "collective_kit/call.h"

namespace strata::test {
namespace {

using namespace strata::collective_kit;
using testing::HasSubstr;

constexpr int kRank = 1, kWorld = 3;
alignas(64) char memory[4096];

struct Given {
  Op op;
  const void* in;
  void* out;
  uint64_t count = 16;
  strata_dtype in_dtype = STRATA_F32;
  strata_dtype out_dtype = STRATA_F32;
};

std::string refused(const Given& g, int root = 0) {
  const strata_coll_item item = {sizeof(item), STRATA_ABI_MINOR, g.in, g.out, g.count, g.in_dtype, g.out_dtype};
  strata_coll_args args{};
  args.struct_size = sizeof(args);
  args.items = &item;
  args.item_count = 1;
  args.item_stride = sizeof(item);
  args.label = "here";
  args.root = root;
  return Call(kRank, kWorld).read(7, g.op, args).text();
}

TEST(Call, TakesWhatTheInterfaceAllows) {
  char *const a = memory, *const b = memory + 2048;
  for (Op op : {Op::kAllGather, Op::kReduceScatter, Op::kAllReduce, Op::kBroadcast, Op::kAllToAll}) {
    EXPECT_EQ(refused({op, a, b}), "") << op_name(op);
    EXPECT_EQ(refused({op, nullptr, nullptr, 0}), "") << op_name(op);
  }
  EXPECT_EQ(refused({Op::kAllGather, a + 64, a}), "");      // its own slice
  EXPECT_EQ(refused({Op::kReduceScatter, a, a + 64}), "");  // the slice it gets
  EXPECT_EQ(refused({Op::kAllReduce, a, a}), "");
  EXPECT_EQ(refused({Op::kAllReduce, a, a, 16, STRATA_F32, STRATA_BF16}), "");
  EXPECT_EQ(refused({Op::kBroadcast, a, a}, kRank), "");
  EXPECT_EQ(refused({Op::kBroadcast, nullptr, a}), "") << "only the root's input is read";
}

TEST(Call, RefusesWithTheItemAndTheReason) {
  char* const a = memory;
  const std::pair<Given, const char*> wrong[] = {
      {{Op::kAllGather, a, a}, "overlap"},
      {{Op::kReduceScatter, a, a}, "overlap"},
      {{Op::kAllReduce, a, a + 4}, "overlap"},
      {{Op::kAllReduce, a, a, 16, STRATA_BF16, STRATA_F32}, "overlap"},
      {{Op::kAllToAll, a, a}, "overlap"},
      {{Op::kAllReduce, a, a + 2048, 16, STRATA_I64, STRATA_I64}, "sums take"},
      {{Op::kAllGather, a, a + 2048, 16, STRATA_F32, STRATA_BF16}, "must be the same"},
      {{Op::kAllGather, a, a + 2048, 16, 99, 99}, "unknown dtype"},
      {{Op::kAllGather, a, a + 2048, UINT64_MAX / 8}, "64 bits"},
      {{Op::kAllGather, a + 1, a + 2048}, "input is NULL or not aligned"},
      {{Op::kAllGather, a, nullptr}, "output is NULL or not aligned"},
  };
  for (const auto& [given, reason] : wrong) {
    const std::string text = refused(given);
    EXPECT_THAT(text, HasSubstr(reason)) << op_name(given.op);
    EXPECT_THAT(text, HasSubstr("call 7, " + std::string(op_name(given.op)) + " [here]: item 0 ("));
  }
  EXPECT_THAT(refused({Op::kBroadcast, a, a}, kWorld), HasSubstr("root 3 in a world of 3"));
}

TEST(Post, DifferenceNamesBothSides) {
  Post a{}, b{};
  a.call = b.call = 3;
  a.op = b.op = Op::kAllGather;
  a.items = b.items = 2;
  std::strcpy(a.label, "layer3");
  std::strcpy(b.label, "another label is no difference");
  EXPECT_TRUE(same(a, b));
  b.tag = 0x2f;
  EXPECT_FALSE(same(a, b));
  const std::string text = difference(a, 0, b, 2);
  for (const char* part : {"call 3: rank 0 is in all_gather [layer3]", "rank 2 in all_gather", "tag 0x2f", "2 items"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
  EXPECT_EQ(difference(1, Shape{8, STRATA_F32, STRATA_F32}, Shape{8, STRATA_F32, STRATA_F32}), "");
  EXPECT_EQ(difference(1, Shape{8, STRATA_F32, STRATA_F32}, Shape{4, STRATA_BF16, STRATA_F32}),
            "; item 1 is 8 x f32 to f32 there and 4 x bf16 to f32 here");
}

// Labels of the engine name units, and those in quotes.
TEST(Post, LabelsWithQuotesStayReadable) {
  const char* const label = "gather of unit \"layer3\"";
  Post a{}, b{};
  a.op = b.op = Op::kAllGather;
  b.tag = 1;
  std::strcpy(a.label, label);
  const std::string title = "all_gather [gather of unit \"layer3\"]";
  EXPECT_THAT(difference(a, 0, b, 1), testing::AllOf(HasSubstr("rank 0 is in " + title + " (0 bytes"),
                                                     HasSubstr("rank 1 in all_gather (0 bytes")));
  strata_coll_args args{};
  args.label = label;
  Call call(0, 1);
  EXPECT_EQ(call.read(5, Op::kAllGather, args).text(), "");
  EXPECT_EQ(call.what, "call 5, " + title);
  args.label = nullptr;
  EXPECT_EQ(call.read(6, Op::kBarrier, args).text(), "");
  EXPECT_EQ(call.what, "call 6, barrier");
}

}  // namespace
}  // namespace strata::test
