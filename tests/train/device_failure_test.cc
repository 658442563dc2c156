// A device call that fails on one rank ends the run on all of them, with one cause: no rank waits out its deadline, and
// none goes on with what is half done (contracts 3 and 6). The fault plugin fails each kind of call, early and late.
#include <gtest/gtest.h>

#include <barrier>
#include <thread>

#include "strata/draft/fault_control.h"
#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

// What a rank heard: of its first failing call, and of all it can still ask for.
struct Heard {
  std::string error, later;
  std::map<std::string, uint64_t> calls;  // of the device, by slot
};

const char* const kSlots[] = {"copy",
                              "fill",
                              "cast",
                              "accumulate",
                              "fold",
                              "square_sums",
                              "stream_wait_host",
                              "stream_record",
                              "marker_create",
                              "marker_record",
                              "stream_wait_marker",
                              "marker_wait_host"};

Trial on_faulty_device(Trial t, const std::string& tag, const std::string& rules) {
  const std::string device = t.gpu.empty() ? "device_host" : t.gpu;
  t.overrides.push_back("plugins.device=fault");
  t.manifest_extra += "[plugin.fault]\nwraps = \"" + device + "\"\ntag = \"" + tag + "\"\nrules = \"" + rules + "\"\n";
  return t;
}

std::string train_by_hand(strata_engine* e, const Trial& t, int rank, Gpu* gpu) {
  std::string error = build_model(e, t.model);
  for (int step = 1; error.empty() && step <= 2; ++step) {
    for (int micro = 0; error.empty() && micro < t.micro_batches; ++micro) {
      error = micro_batch(e, t.model, step, micro, rank, UINT32_MAX, gpu);
    }
    if (error.empty() && strata_step(e, nullptr) != STRATA_OK) error = "step: " + last();
  }
  Result ignored;
  if (error.empty()) error = collect(e, t.model, &ignored);
  if (error.empty() && strata_wait(e) != STRATA_OK) error = "wait: " + last();
  return error;
}

// Rank 1's device follows the rules.
std::vector<Heard> run_with(const Trial& t, const std::string& rules) {
  static int serial = 0;
  const std::string job = "device-failure-" + std::to_string(serial++);
  std::vector<Heard> heard(static_cast<size_t>(t.world));
  std::vector<std::thread> ranks;
  std::barrier all(t.world);
  for (int r = 0; r < t.world; ++r) {
    ranks.emplace_back([&, r] {
      Heard& mine = heard[static_cast<size_t>(r)];
      const std::string tag = job + "-" + std::to_string(r);
      std::unique_ptr<Gpu> gpu;
      if (!t.gpu.empty()) gpu = std::make_unique<Gpu>(t.gpu, job, r, t.world, t.gpu_delay_us);
      strata_engine* e = open_rank(on_faulty_device(t, tag, r == 1 ? rules : ""), job, r, &mine.error);
      if (e) mine.error = train_by_hand(e, t, r, gpu.get());
      const void* table = nullptr;
      ASSERT_EQ(strata_get_plugin_interface(e, "device", STRATA_FAULT_CONTROL, &table), STRATA_OK) << last();
      const auto* counts = static_cast<const strata_fault_control_api*>(table);
      for (const char* slot : kSlots) mine.calls[slot] = counts->count(tag.c_str(), r, slot);
      all.arrive_and_wait();  // a rank that is through by then has one more call to hear it in
      Result ignored;
      if (e && mine.error.empty()) mine.error = collect(e, t.model, &ignored);
      if (e && !mine.error.empty()) {
        EXPECT_NE(strata_drop_gradients(e), STRATA_OK);
        mine.later = last();
      }
      if (gpu) gpu->sync();
      strata_close(e);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return heard;
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void every_call_fails(const Trial& t) {
  const std::vector<Heard> fine = run_with(t, "");
  ASSERT_EQ(fine[0].error + fine[1].error, "");
  constexpr uint64_t kSamples = 4;
  for (const auto& [slot, calls] : fine[1].calls) {
    for (uint64_t k = 0; k < std::min(kSamples, calls); ++k) {
      const uint64_t n = 1 + k * (calls - 1) / std::max<uint64_t>(1, std::min(kSamples, calls) - 1);
      const std::string rule = slot + ":" + std::to_string(n) + ":fail=DATA_LOSS";
      const std::vector<Heard> heard = run_with(t, rule);
      const std::string where =
          rule + ", stage " + std::to_string(t.stage) + " " + t.gpu + ", on rank 1 " + heard[1].error + ": ";
      if (heard[1].error.empty()) {  // of a call that only a run that ends makes
        EXPECT_EQ(heard[0].error, "") << where;
        continue;
      }
      EXPECT_TRUE(has(heard[1].error, "fails with DATA_LOSS")) << where << heard[1].error;
      EXPECT_TRUE(has(heard[0].error, "rank 1: ") && has(heard[0].error, "fails with DATA_LOSS"))
          << where << heard[0].error;
      // A commit that was refused changed nothing.
      if (has(heard[0].error, "commit: ") && has(heard[0].error, "it failed on rank 1: ")) continue;
      for (const Heard& h : heard) {
        EXPECT_TRUE(has(h.later, "the engine has FAILED") && has(h.later, "fails with DATA_LOSS")) << where << h.later;
      }
    }
  }
}

Trial two_ranks(int stage, std::vector<std::string> overrides = {}) {
  Trial t;
  t.world = 2;
  t.stage = stage;
  t.model = vectors({5000, 77, 3000}, STRATA_BF16);
  t.model.params.push_back({"again", {5000}, STRATA_BF16, 1, 0, false, 0});  // two gradients of one param
  t.overrides = std::move(overrides);
  t.overrides.push_back("zero_optimization.reduce_bucket_size=4000");
  return t;
}

TEST(DeviceFailure, OfOneRankIsHeardByAll) {
  every_call_fails(two_ranks(1));
  Trial t = two_ranks(3, {"zero_optimization.param_persistence_threshold=0", "check_weights=true"});
  t.micro_batches = 2;
  every_call_fails(t);
}

TEST(DeviceFailure, OfOneRankWithAGpuIsHeardByAll) {
  load<strata_device_api>("fault", STRATA_DEVICE);
  const std::string offload = "zero_optimization.offload_optimizer.";
  Trial t = two_ranks(2);
  t.gpu = "gpu_sim";
  t.micro_batches = 2;
  every_call_fails(t);
  t = two_ranks(3, {offload + "split_update=true", offload + "split_share=0.5", "zero_optimization.sub_group_size=2048",
                    "zero_optimization.param_persistence_threshold=0"});
  t.gpu = "gpu_sim";
  t.offload_optimizer = t.offload_param = "cpu";
  t.device_updates = true;
  every_call_fails(t);
}

// Calls of a slot until the first gradient, and in all.
struct Counted {
  uint64_t before = 0, all = 0;
};

// A step whose gradients are on a stream of the host's that stands still, whatever each call answers.
Counted step_on_a_late_stream(const std::string& slot, const std::string& rules) {
  static int serial = 0;
  const std::string job = "late-failure-" + std::to_string(serial++);
  Trial t = two_ranks(2);
  t.world = 1;
  t.gpu = "gpu_sim";
  Gpu gpu(t.gpu, job, 0, 1, 0);
  std::string error;
  strata_engine* e = open_rank(on_faulty_device(t, job, rules), job, 0, &error);
  EXPECT_EQ(error, "");
  EXPECT_EQ(build_model(e, t.model), "");
  const void* table = nullptr;
  EXPECT_EQ(strata_get_plugin_interface(e, "device", STRATA_FAULT_CONTROL, &table), STRATA_OK) << last();
  const auto calls = [&] {
    return static_cast<const strata_fault_control_api*>(table)->count(job.c_str(), 0, slot.c_str());
  };
  Counted counted{calls(), 0};
  std::vector<strata_tensor> given;
  for (const ModelParam& p : t.model.params) {
    given.push_back(gpu.tensor(std::vector<float>(p.numel(), 1.0f), p.shape, gpu.stream()));
  }
  gpu.sync();
  gpu.hold_for(std::chrono::milliseconds(20));
  for (uint32_t k = 0; k < given.size(); ++k) (void)strata_grad(e, k, &given[k], gpu.stream());
  for (strata_unit u = 0; u < t.model.units.size(); ++u) (void)strata_grads_done(e, u);
  (void)strata_end_backward(e);
  const strata_status dropped = strata_drop_gradients(e);
  EXPECT_EQ(dropped == STRATA_OK, rules.empty()) << rules;
  EXPECT_TRUE(rules.empty() || says("fails with DATA_LOSS")) << rules << last();
  counted.all = calls();
  gpu.sync();
  strata_close(e);
  gpu.wait();
  return counted;
}

// Nothing that a failing call was about to wait for is taken as waited for: no later call uses what the host's stream
// has not written yet (as ThreadSanitizer sees it).
TEST(DeviceFailure, OfAMarkerLeavesNoUnitReady) {
  for (const std::string slot : {"marker_create", "marker_record", "stream_wait_marker"}) {
    const Counted fine = step_on_a_late_stream(slot, "");
    ASSERT_GT(fine.all, fine.before);
    for (uint64_t n = fine.before + 1; n <= fine.all; ++n) {
      step_on_a_late_stream(slot, slot + ":" + std::to_string(n) + ":fail=DATA_LOSS");
    }
  }
}

}  // namespace
}  // namespace strata::test
