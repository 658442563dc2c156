// collective_bytes_test.cc - what a rank takes from the others in a step, against the formulas of the ZeRO papers: per
// 16-bit param, times (N - 1) / N for N ranks, 2 bytes for each gather of the weights and 2 for each reduction.
#include <gtest/gtest.h>

#include "tests/train/by_hand.h"
#include "tests/train/crossed.h"

namespace strata::test {
namespace {

constexpr int kUnits = 4;
constexpr int64_t kOwned = 4096;  // elements that a rank owns of each unit: nothing is padded

struct Shape {
  std::string gpu;  // "": the CPU
  int stage, world, micro_batches;
};
void PrintTo(const Shape& s, std::ostream* out) {
  *out << (s.gpu.empty() ? "cpu" : s.gpu) << "Stage" << s.stage << "World" << s.world << "Micro" << s.micro_batches;
}

// Times that the weights are gathered in a step, and the gradients reduced.
struct Times {
  double gathers, reductions;
};

// At stage 3 a unit is gathered for the forward and for the backward; what is fetched twice in a row, where one follows
// on the other, is gathered once.
Times times_of(const Shape& s) {
  const double turns = (2.0 * s.micro_batches - 1) / kUnits;
  if (s.stage == 3) return {2.0 * s.micro_batches - turns, 1.0 * s.micro_batches};
  if (s.stage == 2) return {1, 1.0 * s.micro_batches};
  // Micro-batches are added up by each rank for itself, in fp32, and the sum is not rounded for the reduction.
  const double once = s.micro_batches > 1 ? 2 : 1;
  return s.stage == 1 ? Times{1, once} : Times{0, 2 * once};  // an all-reduce also gathers its result
}

class CollectiveBytes : public testing::TestWithParam<Shape> {};

TEST_P(CollectiveBytes, AreThoseOfTheFormula) {
  const Shape& s = GetParam();
  if (s.gpu == "device_cuda") {
    if (const std::string why = Gpu::absent(s.world); !why.empty()) GTEST_SKIP() << why;
  }
  Trial t;
  t.gpu = s.gpu;
  t.stage = s.stage;
  t.world = s.world;
  t.micro_batches = s.micro_batches;
  t.model = vectors(std::vector<int64_t>(kUnits, kOwned * s.world), STRATA_BF16);
  if (s.stage == 3) {
    t.overrides = {"zero_optimization.param_persistence_threshold=0", "zero_optimization.max_reuse_distance=0"};
  }
  const strata_counters step = of_a_step(t);
  const double sent = 2.0 * kUnits * kOwned * (s.world - 1);  // 2 bytes of every param, times (N - 1) / N
  EXPECT_EQ(static_cast<double>(step.gather_bytes), times_of(s).gathers * sent);
  EXPECT_EQ(static_cast<double>(step.reduce_bytes), times_of(s).reductions * sent);
}

std::vector<Shape> shapes(const std::string& gpu, const std::vector<int>& worlds) {
  std::vector<Shape> all;
  for (int stage = 0; stage <= 3; ++stage) {
    for (const int world : worlds) {
      for (const int micro_batches : {1, 3}) all.push_back({gpu, stage, world, micro_batches});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, CollectiveBytes, testing::ValuesIn(shapes("", {1, 2, 4})),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Simulated, CollectiveBytes, testing::ValuesIn(shapes("gpu_sim", {2})),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(Real, CollectiveBytes, testing::ValuesIn(shapes("device_cuda", {2})),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace strata::test
