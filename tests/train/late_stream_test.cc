// Gradients of two micro-batches on a stream of the host's that stands still while the host runs ahead, and is slow
// then (tests/gpu_sim): the numbers must be those of a host that waits after every call.
#include <thread>

#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

using std::chrono::milliseconds;

// A gradient that is handed over: all its elements have the value.
struct Given {
  uint32_t param;
  float value;
  bool on_other_stream = false;
  bool ends_unit = false;  // then strata_grads_done
};

struct Outcome {
  double norm = 0;
  Result state;
};

struct TwoMicroBatches {
  Trial trial;
  std::vector<Given> given[2];

  // In memory of the engine's own, and in lent memory.
  void expect_the_same_numbers() const {
    const Outcome waited = run(true, false);
    for (const bool lend : {false, true}) {
      const Outcome late = run(false, lend);
      EXPECT_EQ(late.norm, waited.norm) << "stage " << trial.stage << ", lent " << lend;
      EXPECT_TRUE(late.state == waited.state) << "stage " << trial.stage << ", lent " << lend;
    }
  }

  Outcome run(bool host_waits, bool lend) const {
    static int serial = 0;
    const std::string job = "late-" + std::to_string(serial++);
    Trial t = trial;
    if (host_waits) t.gpu_delay_us = 0;
    Gpu gpu(t.gpu, job, 0, 1, t.gpu_delay_us);
    std::string error;
    strata_engine* e = open_rank(t, job, 0, &error, lend ? gpu.lender() : nullptr);
    EXPECT_EQ(error, "");
    if (!e) return {};
    EXPECT_EQ(build_model(e, trial.model), "");
    std::vector<strata_tensor> gradients[2];
    for (const int micro : {0, 1}) {
      for (const Given& g : given[micro]) {
        const ModelParam& p = trial.model.params[g.param];
        gradients[micro].push_back(gpu.tensor(std::vector<float>(p.numel(), g.value), p.shape, gpu.stream()));
      }
    }
    gpu.sync();
    if (!host_waits) gpu.hold_for(milliseconds(100));
    for (const int micro : {0, 1}) hand_over(e, gpu, given[micro], gradients[micro], host_waits);
    EXPECT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    strata_step_info info;
    STRATA_INIT(&info);
    EXPECT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
    Outcome outcome{info.grad_norm, {}};
    EXPECT_EQ(collect(e, trial.model, &outcome.state), "");
    gpu.sync();
    strata_close(e);
    gpu.wait();
    return outcome;
  }

  void hand_over(strata_engine* e, Gpu& gpu, const std::vector<Given>& all, const std::vector<strata_tensor>& gradients,
                 bool host_waits) const {
    for (size_t i = 0; i < all.size(); ++i) {
      const strata_stream* stream = all[i].on_other_stream ? gpu.other_stream() : gpu.stream();
      EXPECT_EQ(strata_grad(e, all[i].param, &gradients[i], stream), STRATA_OK) << last();
      const auto unit = static_cast<strata_unit>(trial.model.params[all[i].param].unit);
      if (all[i].ends_unit) {
        EXPECT_EQ(strata_grads_done(e, unit), STRATA_OK) << last();
      }
      if (host_waits) gpu.sync();
    }
    EXPECT_EQ(strata_end_backward(e), STRATA_OK) << last();
    // There is no call that waits for the reductions of a micro-batch.
    if (host_waits) std::this_thread::sleep_for(milliseconds(50));
  }
};

TEST(LateStreams, AMicroBatchOnAnotherStreamWaitsForTheOneBefore) {
  for (const int stage : {0, 1, 2}) {
    TwoMicroBatches two;
    two.trial.stage = stage;
    two.trial.micro_batches = 2;
    two.trial.gpu = "gpu_sim";
    two.trial.model = vectors({3000, 4000}, STRATA_BF16);
    for (uint32_t k : {0u, 1u}) {
      two.given[0].push_back({k, 1.0f + static_cast<float>(k)});
      two.given[1].push_back({k, 10.0f + static_cast<float>(k), true});
    }
    two.expect_the_same_numbers();
  }
}

// Two gradients of a param in one micro-batch are summed in fp32 beside the unit's buffer. Completing a unit of several
// params, which reads its sums, takes the device a while; the next micro-batch begins with that unit's last param.
TEST(LateStreams, Fp32SumsAreReadBeforeTheNextMicroBatchWritesThem) {
  constexpr uint32_t kMany = 4, kOthers = 9;  // params of unit 0, and one each of the other units
  TwoMicroBatches two;
  two.trial.stage = 2;
  two.trial.micro_batches = 2;
  two.trial.gpu = "gpu_sim";
  two.trial.gpu_delay_us = 2000;
  two.trial.overrides = {"zero_optimization.reduce_bucket_size=9000"};
  Model m = vectors({128}, STRATA_BF16);
  for (uint32_t k = 1; k < kMany; ++k)
    m.params.push_back({"p" + std::to_string(k), {128}, STRATA_BF16, 0, 0, false, -1});
  for (uint32_t k = 0; k < kOthers; ++k) {
    const auto unit = static_cast<int>(m.units.size());
    m.units.push_back("u" + std::to_string(unit));
    m.params.push_back({"q" + std::to_string(k), {4096}, STRATA_BF16, unit, 0, false, -1});
  }
  two.trial.model = m;
  const auto give = [&](int micro, uint32_t first, uint32_t last) {  // last first
    for (uint32_t p = last; p-- > first;) {
      const float value = static_cast<float>(p) + 100.0f * static_cast<float>(micro);
      two.given[micro].push_back({p, value + 1});
      two.given[micro].push_back({p, value + 2, false, p == 0 || p >= kMany});
    }
  };
  give(0, kMany, kMany + kOthers), give(0, 0, kMany);
  give(1, 0, kMany), give(1, kMany, kMany + kOthers);
  two.expect_the_same_numbers();
}

}  // namespace
}  // namespace strata::test
