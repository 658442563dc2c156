// host_sums_test.cc - gradients of several micro-batches that are added up in host memory beside a device: the bits of
// sums on the device and of a run without one, what moves and what is planned, and what happens when a part fails.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <mutex>

#include "strata/draft/fault_control.h"
#include "tests/train/by_hand.h"
#include "tests/train/crossed.h"

namespace strata::test {
namespace {

const std::string kZero = "zero_optimization.", kOffload = kZero + "offload_optimizer.";

Trial on_gpu(int stage, int world, int micro_batches) {
  Trial t;
  t.stage = stage;
  t.world = world;
  t.micro_batches = micro_batches;
  t.clip = 0.05;
  t.gpu = "gpu_sim";
  t.offload_optimizer = "cpu";
  if (stage == 3) t.overrides = {kZero + "param_persistence_threshold=50"};
  return t;
}

Trial with(Trial t, const std::vector<std::string>& overrides) {
  t.overrides.insert(t.overrides.end(), overrides.begin(), overrides.end());
  for (const std::string& text : overrides) t.device_updates = t.device_updates || text.find(kOffload) == 0;
  return t;
}

// The same run on the CPU, where sums are added up where the update reads them.
Trial plain(Trial t) {
  t.gpu = "";
  t.offload_optimizer = "none";
  return t;
}

// ---- the same bits -----------------------------------------------------------------------------------------------

struct Shape {
  int stage, world, micro_batches;
  std::string wire;  // communication_data_type
};

std::string shape_name(const testing::TestParamInfo<Shape>& info) {
  const Shape& s = info.param;
  return "stage" + std::to_string(s.stage) + "_world" + std::to_string(s.world) + "_micro" +
         std::to_string(s.micro_batches) + "_" + (s.wire.empty() ? "own" : s.wire);
}

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  for (const int stage : {2, 3}) {
    for (const int world : {1, 2, 3}) {
      for (const char* wire : {"", "fp32", "bf16"}) all.push_back({stage, world, 2, wire});
      all.push_back({stage, world, 4, ""});
    }
  }
  return all;
}

class HostSumsKeepBits : public testing::TestWithParam<Shape> {
 protected:
  static std::vector<std::vector<std::string>> placements() {
    const std::string split = kOffload + "split_update=true", small = kZero + "sub_group_size=2048";
    return {{},
            {kOffload + "device_state_budget=20000"},  // no unit's state, but sums of some
            {kOffload + "device_state_budget=60000"},  // both of some
            {kOffload + "device_state_budget=1000000"},
            {kOffload + "ratio=0.5"},
            {split, small, kOffload + "split_share=0.5"},
            {split, small, kOffload + "device_state_budget=20000"},
            {kZero + "reduce_bucket_size=64"},
            {kZero + "overlap_comm=false", kZero + "contiguous_gradients=false"}};
  }

  static void compare(const std::string& gpu, const std::vector<int>& delays) {
    const Shape& shape = GetParam();
    Trial base = on_gpu(shape.stage, shape.world, shape.micro_batches);
    base.gpu = gpu;
    base.steps = 3;
    if (!shape.wire.empty()) base.overrides.push_back("communication_data_type=" + shape.wire);
    const Result wanted = run(plain(base));
    ASSERT_EQ(wanted.error, "");
    for (const auto& placement : placements()) {
      for (const int delay : delays) {
        Trial t = with(base, placement);
        t.gpu_delay_us = delay;
        t.lend = delay > 0;
        const Result got = run(t);
        const std::string what = testing::PrintToString(placement) + " late by " + std::to_string(delay);
        ASSERT_EQ(got.error, "") << what;
        EXPECT_TRUE(got == wanted) << what;
      }
    }
  }
};

TEST_P(HostSumsKeepBits, Simulated) { compare("gpu_sim", {0, 200}); }

TEST_P(HostSumsKeepBits, Real) {
  const std::string absent = Gpu::absent(GetParam().world);
  if (!absent.empty()) GTEST_SKIP() << absent;
  compare("device_cuda", {0});
}

INSTANTIATE_TEST_SUITE_P(Matrix, HostSumsKeepBits, testing::ValuesIn(shapes()), shape_name);

// Sums where updates and tiers cannot reach them directly, with a device of host memory that folds one by one, and
// units that get no gradient.
TEST(HostSums, KeepBitsInOtherPlaces) {
  for (const int world : {1, 2}) {
    Trial t = on_gpu(3, world, 2);
    t.skip_unit = 1;
    const Result wanted = run(plain(t));
    ASSERT_EQ(wanted.error, "");
    t.offload_param = "cpu";
    Trial hidden = with(t, {"plugins.offload_cpu=fault"});
    hidden.manifest_extra = "[plugin.fault]\nwraps = \"offload_cpu\"\nhide_map = true\n";
    Trial single = with(t, {"plugins.host_device=fault"});
    single.manifest_extra = "[plugin.fault]\nwraps = \"device_host\"\nrules = \"fold:*:fail=UNIMPLEMENTED\"\n";
    for (const Trial& other : {t, hidden, single}) {
      const Result got = run(other);
      ASSERT_EQ(got.error, "") << world;
      EXPECT_TRUE(got == wanted) << world;
    }
  }
}

// More than a slot of the ring holds, and more pieces than it has slots.
TEST(HostSums, KeepBitsWhereTheRingIsTooSmall) {
  Trial large = on_gpu(2, 1, 2), many = on_gpu(2, 2, 3);
  large.model = vectors({(2 << 20) + 5000}, STRATA_BF16);
  large.steps = 1;
  many.model = vectors(std::vector<int64_t>(150, 2000), STRATA_BF16);
  many.steps = 2;
  for (Trial t : {large, many}) {
    const Result wanted = run(plain(t));
    ASSERT_EQ(wanted.error, "");
    for (const int delay : {0, 100}) {
      t.gpu_delay_us = delay;
      const Result got = run(t);
      ASSERT_EQ(got.error, "") << delay;
      EXPECT_TRUE(got == wanted) << t.model.units.size() << " units, late by " << delay;
    }
  }
}

// ---- bytes -------------------------------------------------------------------------------------------------------

constexpr uint64_t kParams = 4 * 16384;

Trial even(int world, int micro_batches) {
  Trial t = on_gpu(2, world, micro_batches);
  t.model = vectors(std::vector<int64_t>(4, kParams / 4), STRATA_BF16);
  return t;
}

// Bytes per owned param and step from the device to host memory.
double out_per_step(const Trial& t) { return crossed(t, kParams / static_cast<uint64_t>(t.world)).out; }

TEST(HostSums, MoveTheWireDtypeOfARankAloneAndFp32OfOthers) {
  for (const int micro_batches : {2, 3}) {
    EXPECT_DOUBLE_EQ(out_per_step(even(1, micro_batches)), 2 * micro_batches);
    EXPECT_DOUBLE_EQ(out_per_step(even(2, micro_batches)), 4 * micro_batches);
    EXPECT_DOUBLE_EQ(out_per_step(with(even(1, micro_batches), {"communication_data_type=fp32"})), 4 * micro_batches);
    // Room for sums of two units on the device, which leave it once.
    EXPECT_DOUBLE_EQ(out_per_step(with(even(1, micro_batches), {kOffload + "device_state_budget=190000"})),
                     (2 * micro_batches + 4) / 2.0);
  }
}

struct Memory {
  std::map<std::string, uint64_t> plan;
  uint64_t on_device = 0;  // in use, by the device's own account
};

Memory memory_of(const Trial& t) {
  Memory memory;
  std::mutex mutex;
  run_body(t, [&](int rank, strata_engine* e) {
    ASSERT_EQ(build_model(e, t.model), "");
    if (rank > 0) return;
    const std::lock_guard lock(mutex);
    strata_plan_item items[64];
    for (strata_plan_item& item : items) STRATA_INIT(&item);
    uint64_t count = 0;
    ASSERT_EQ(strata_get_plan(e, items, 64, &count), STRATA_OK) << last();
    for (uint64_t i = 0; i < count; ++i)
      memory.plan[std::to_string(items[i].tier) + " " + items[i].what] += items[i].bytes;
    strata_device_info info;
    STRATA_INIT(&info);
    ASSERT_EQ(strata_get_device(e, &info), STRATA_OK) << last();
    memory.on_device = info.total_bytes - info.free_bytes;
    EXPECT_EQ(info.held_bytes, memory.on_device) << "planned";
  });
  return memory;
}

TEST(HostSums, TheDeviceHasFourBytesPerParamLess) {
  Trial t = even(1, 4);
  t.model = vectors({kParams}, STRATA_BF16);
  Memory host = memory_of(t), device = memory_of(with(t, {kOffload + "device_state_budget=270000"}));
  EXPECT_EQ(host.plan["0 arriving gradients"], 0u);
  EXPECT_EQ(host.plan["1 gradients on their way to sums"], 2 * kParams);
  EXPECT_EQ(device.plan["0 arriving gradients"], 4 * kParams);
  EXPECT_EQ(device.plan["1 gradients on their way to sums"], 0u);
  EXPECT_EQ(device.plan["0 optimizer state"], 0u);
  EXPECT_EQ(device.on_device - host.on_device, 4 * kParams);
  for (const Memory& m : {host, device}) {
    EXPECT_EQ(m.plan.at("1 reduced gradients"), 4 * kParams);
    EXPECT_EQ(m.plan.count("0 reduction scratch"), 0u) << "a rank alone has nothing to reduce";
  }
}

TEST(HostSums, WhatIsLeftOfTheBudgetIsForSumsOfWholeUnits) {
  const uint64_t state = 3 * kParams, sums = kParams;  // of a unit, in bytes
  for (const auto& [budget, states, units] : {std::tuple{sums - 1, 0u, 0u},
                                              {2 * sums, 0u, 2u},
                                              {state, 1u, 0u},
                                              {state + sums, 1u, 1u},
                                              {5 * state, 4u, 0u}}) {
    auto plan = memory_of(with(even(1, 2), {kOffload + "device_state_budget=" + std::to_string(budget)})).plan;
    EXPECT_EQ(plan["0 optimizer state"], states * state) << budget;
    EXPECT_EQ(plan["0 arriving gradients"], units * sums) << budget;
    EXPECT_EQ(plan["1 gradients on their way to sums"], (4 - states - units) * sums / 2) << budget;
  }
  auto plan = memory_of(with(even(1, 2), {kOffload + "ratio=0.6"})).plan;  // room for a unit's state, and for sums
  EXPECT_EQ(plan["0 optimizer state"], state);
  EXPECT_EQ(plan["0 arriving gradients"], 0u);
}

// 40 slots of 4 MiB at the most: neither the number of reductions nor their size makes it grow.
TEST(HostSums, TheRingIsBounded) {
  const char* const ring = "1 gradients on their way to sums";
  Trial t = even(1, 2);
  t.model = vectors(std::vector<int64_t>(150, 2000), STRATA_BF16);
  EXPECT_EQ(memory_of(t).plan[ring], 40u * 8192);
  t.model = vectors({(5 << 20) + 5000}, STRATA_BF16);
  EXPECT_EQ(memory_of(t).plan[ring], 3u * (4 << 20));
}

// Where nothing of a micro-batch stays on the device, the host has its memory back in the next one's forward, which
// waits for the reductions: what they read is overwritten right after that.
TEST(HostSums, LentMemoryGoesBackBetweenMicroBatches) {
  std::vector<double> norms;
  for (const bool device_keeps_sums : {false, true}) {
    Trial t = even(1, 3);
    t.gpu_delay_us = 2000;
    if (device_keeps_sums) t = with(t, {kOffload + "device_state_budget=1000000"});
    Gpu gpu(t.gpu, "lent", 0, 1, t.gpu_delay_us);
    std::string error;
    strata_engine* e = open_rank(t, "lent", 0, &error, gpu.lender());
    ASSERT_NE(e, nullptr) << error;
    ASSERT_EQ(build_model(e, t.model), "");
    for (int micro = 0; micro < 3; ++micro) {
      for (uint32_t unit = 0; unit < 4; ++unit) {
        EXPECT_EQ(gpu.on_loan() > 0, micro > 0) << "micro-batch " << micro << ", before unit " << unit;
        ASSERT_EQ(strata_fetch(e, unit, gpu.stream()), STRATA_OK) << last();
        ASSERT_EQ(strata_release(e, unit, gpu.stream()), STRATA_OK) << last();
      }
      EXPECT_EQ(gpu.on_loan() > 0, micro > 0 && device_keeps_sums) << "micro-batch " << micro;
      for (size_t k = 4; k-- > 0;) give_gradient_on(gpu, e, t.model, k);
      EXPECT_GT(gpu.on_loan(), 0);
      ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
    }
    ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    strata_step_info info;
    STRATA_INIT(&info);
    ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
    norms.push_back(info.grad_norm);
    gpu.sync();
    strata_close(e);
    gpu.wait();
  }
  EXPECT_EQ(norms[0], norms[1]);
}

// ---- by hand -----------------------------------------------------------------------------------------------------

using RankBody = std::function<void(int rank, Gpu& gpu, strata_engine* e)>;

// Every rank with a GPU of its own; `trial` may be another for each.
void each_rank(int world, const std::function<Trial(int)>& trial, const RankBody& body) {
  static int serial = 0;
  const std::string job = "host-sums-" + std::to_string(serial++);
  std::vector<std::thread> ranks;
  for (int r = 0; r < world; ++r) {
    ranks.emplace_back([&, r] {
      const Trial t = trial(r);
      Gpu gpu(t.gpu, job, r, world, t.gpu_delay_us);
      std::string error;
      strata_engine* e = open_rank(t, job, r, &error);
      ASSERT_NE(e, nullptr) << error;
      body(r, gpu, e);
      gpu.sync();
      strata_close(e);
      gpu.wait();
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

// Gradients of the last `count` units, of one value each.
strata_status give(Gpu& gpu, strata_engine* e, const Model& m, size_t count, float value) {
  const size_t units = m.units.size();
  for (size_t k = units; k-- > units - count;) {
    const ModelParam& p = m.params[k];
    const strata_tensor t =
        gpu.tensor(std::vector<float>(p.numel(), value + static_cast<float>(k)), p.shape, gpu.stream());
    strata_status status = strata_grad(e, static_cast<strata_param>(k), &t, gpu.stream());
    if (status == STRATA_OK) status = strata_grads_done(e, static_cast<strata_unit>(k));
    if (status != STRATA_OK) return status;
  }
  return STRATA_OK;
}

const Model& five() {
  static const Model m = vectors({5000, 77, 3000, 4100, 9}, STRATA_BF16);
  return m;
}

Trial of_five(int world) {
  Trial t = on_gpu(2, world, 2);
  t.model = five();
  t.gpu_delay_us = 200;
  return t;
}

void micro_batch_of(Gpu& gpu, strata_engine* e, float value) {
  ASSERT_EQ(give(gpu, e, five(), 5, value), STRATA_OK) << last();
  ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
}

// Two steps, with whatever else `between` does before each.
Result two_steps(const Trial& t, const RankBody& between) {
  Result out;
  each_rank(
      t.world, [&](int) { return t; },
      [&](int rank, Gpu& gpu, strata_engine* e) {
        ASSERT_EQ(build_model(e, five()), "");
        Result mine;
        for (int step = 0; step < 2; ++step) {
          between(rank, gpu, e);
          for (const float value : {0.25f, 0.5f}) micro_batch_of(gpu, e, value + static_cast<float>(rank + step));
          ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
          strata_step_info info;
          STRATA_INIT(&info);
          ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
          mine.norms.push_back(info.grad_norm);
        }
        ASSERT_EQ(collect(e, five(), &mine), "");
        if (rank == 0) out = std::move(mine);
      });
  return out;
}

TEST(HostSums, DroppedGradientsLeaveNothing) {
  for (const int world : {1, 2}) {
    const Trial t = of_five(world);
    const Result clean = two_steps(t, [](int, Gpu&, strata_engine*) {});
    ASSERT_FALSE(clean.master.empty());
    for (const bool whole : {false, true}) {
      const Result got = two_steps(t, [&](int rank, Gpu& gpu, strata_engine* e) {
        if (whole || rank == 1) micro_batch_of(gpu, e, 1e4f);
        ASSERT_EQ(give(gpu, e, five(), 3, -1e4f), STRATA_OK) << last();
        ASSERT_EQ(strata_drop_gradients(e), STRATA_OK) << last();
      });
      EXPECT_TRUE(got == clean) << "world " << world << ", a whole micro-batch " << whole;
    }
  }
}

TEST(HostSums, AStepThatIsNotFiniteIsSkippedAndLeavesNothing) {
  for (const int world : {1, 2}) {
    const Trial t = of_five(world);
    const Result clean = two_steps(t, [](int, Gpu&, strata_engine*) {});
    ASSERT_FALSE(clean.master.empty());
    const Result got = two_steps(t, [&](int rank, Gpu& gpu, strata_engine* e) {
      micro_batch_of(gpu, e, rank == 0 ? std::numeric_limits<float>::infinity() : 1.0f);
      micro_batch_of(gpu, e, 1.0f);
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
      strata_step_info info;
      STRATA_INIT(&info);
      ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
      EXPECT_EQ(info.was_applied, 0u);
    });
    EXPECT_TRUE(got == clean) << "world " << world;
  }
}

TEST(HostSums, AreReadBetweenMicroBatches) {
  Trial t = of_five(2);
  t.overrides.push_back("plugins.host_device=fault");
  t.manifest_extra = "[plugin.fault]\nwraps = \"device_host\"\nrules = \"fold:*:late=20\"\n";
  each_rank(
      2, [&](int) { return t; },
      [](int rank, Gpu& gpu, strata_engine* e) {
        ASSERT_EQ(build_model(e, five()), "");
        float sum = 0;
        for (const float value : {1.0f, 8.0f}) {
          micro_batch_of(gpu, e, value);
          sum += 2 * value;
          for (size_t k = 0; k < 5; ++k) {
            std::vector<float> seen(five().params[k].numel());
            const strata_tensor grad = tensor_of(seen, five().params[k].shape);
            ASSERT_EQ(strata_read_param(e, static_cast<strata_param>(k), "grad", &grad), STRATA_OK) << last();
            const float wanted = sum + (value == 1.0f ? 2.0f : 4.0f) * static_cast<float>(k);
            EXPECT_EQ(seen, std::vector<float>(seen.size(), wanted)) << "rank " << rank << ", unit " << k;
          }
        }
      });
}

// The update of a step reads sums that the next step's first micro-batch replaces, and where they lie, while that
// begins loans. Held, it comes after all of that; late, in the middle: the thread sanitizer sees what no lock orders.
TEST(HostSums, WaitForTheUpdateThatReadsThem) {
  const auto trained = [](const std::string& how, bool lend) {
    const bool held = how == "held";
    const std::string gate = "host_sums_" + how + (lend ? "_lent" : "");
    const std::string rule = held ? "optimizer.step:3:hold=" + gate : how == "late" ? "optimizer.step:*:late=10" : "";
    Trial t = of_five(1);
    t.lend = lend;
    t.gpu_delay_us = 0;
    t.overrides.push_back("plugins.optimizer=fault");
    t.manifest_extra = "[plugin.fault]\nwraps = \"optim_adamw\"\ntag = \"" + gate + "\"\nrules = \"" + rule + "\"\n";
    Result out;
    each_rank(
        1, [&](int) { return t; },
        [&](int, Gpu& gpu, strata_engine* e) {
          ASSERT_EQ(build_model(e, five()), "");
          const void* table = nullptr;
          ASSERT_EQ(strata_get_plugin_interface(e, "optimizer", STRATA_FAULT_CONTROL, &table), STRATA_OK) << last();
          const auto* gates = static_cast<const strata_fault_control_api*>(table);
          for (const float value : {1.0f, 2.0f}) micro_batch_of(gpu, e, value);
          ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
          for (int ms = 0; held && ms < 5000 && gates->waiting(gate.c_str()) == 0; ++ms) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          EXPECT_EQ(gates->waiting(gate.c_str()), held ? 1u : 0u);
          micro_batch_of(gpu, e, 100.0f);
          gpu.sync();
          std::this_thread::sleep_for(std::chrono::milliseconds(50));  // time enough to do it wrong
          gates->open_gate(gate.c_str());
          ASSERT_EQ(strata_drop_gradients(e), STRATA_OK) << last();
          ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
          ASSERT_EQ(collect(e, five(), &out), "");
        });
    return out;
  };
  const Result free = trained("free", false);
  ASSERT_FALSE(free.master.empty());
  for (const bool lend : {false, true}) {
    EXPECT_TRUE(trained("held", lend) == free) << lend;
    EXPECT_TRUE(trained("late", lend) == free) << lend;
  }
}

TEST(HostSums, ClosingInABackwardLeavesThem) {
  for (const int world : {1, 2}) {
    Trial t = of_five(world);
    t.gpu_delay_us = 5000;
    each_rank(
        world, [&](int) { return t; },
        [](int, Gpu& gpu, strata_engine* e) {
          ASSERT_EQ(build_model(e, five()), "");
          micro_batch_of(gpu, e, 1.0f);
          ASSERT_EQ(give(gpu, e, five(), 4, 1.0f), STRATA_OK) << last();
        });
  }
}

// ---- failures ----------------------------------------------------------------------------------------------------

std::string steps_until_an_error(Gpu& gpu, strata_engine* e) {
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < 2; ++micro) {
      if (give(gpu, e, five(), 5, 1.0f) != STRATA_OK || strata_end_backward(e) != STRATA_OK) return last();
    }
    if (strata_step(e, nullptr) != STRATA_OK || strata_wait(e) != STRATA_OK) return last();
  }
  return "";
}

TEST(HostSums, AFailingKernelEndsTheStepOnAllRanks) {
  for (const int world : {1, 2, 3}) {
    for (const char* kernel : {"fold:1", "fold:4"}) {
      SCOPED_TRACE(std::string(kernel) + " at world " + std::to_string(world));
      const auto trial = [&](int rank) {
        Trial t = of_five(world);
        if (rank > 0) return t;
        t.overrides.push_back("plugins.host_device=fault");
        t.manifest_extra =
            "[plugin.fault]\nwraps = \"device_host\"\nrules = \"" + std::string(kernel) + ":fail=DATA_LOSS\"\n";
        return t;
      };
      each_rank(world, trial, [&](int rank, Gpu& gpu, strata_engine* e) {
        ASSERT_EQ(build_model(e, five()), "");
        const std::string error = steps_until_an_error(gpu, e);
        EXPECT_THAT(error, testing::HasSubstr(rank == 0 ? "gradient sums in host memory: from unit \"u" : "rank 0"))
            << rank;
      });
    }
  }
}

// Whichever call of the device fails: an error on all ranks, or nothing at all, and an end.
TEST(HostSums, AnyFailingCallOfTheDeviceIsAnError) {
  for (const char* call : {"copy", "marker_record", "marker_wait_host", "alloc_pinned"}) {
    bool failed = true;
    for (int n = 1; failed && n < 400; n += 1 + n / 4) {
      const auto trial = [&](int rank) {
        Trial t = of_five(2);
        t.gpu_delay_us = 0;
        if (rank > 0) return t;
        t.overrides.push_back("plugins.device=fault");
        t.manifest_extra = "[plugin.fault]\nwraps = \"gpu_sim\"\nrules = \"device." + std::string(call) + ":" +
                           std::to_string(n) + "+:fail=DATA_LOSS\"\n";
        return t;
      };
      std::vector<std::string> errors(2);
      each_rank(2, trial, [&](int rank, Gpu& gpu, strata_engine* e) {
        std::string& error = errors[static_cast<size_t>(rank)];
        error = build_model(e, five());
        if (error.empty()) error = steps_until_an_error(gpu, e);
      });
      failed = !errors[0].empty();
      // A rank that has come through its last update before the other failed in its own has nothing more to ask. The
      // failed one says so itself, or that it has failed meanwhile.
      const bool late = errors[0].find("update of step 3") != std::string::npos;
      EXPECT_TRUE(late || errors[1].empty() == !failed) << call << " " << n << ": " << errors[0] << " / " << errors[1];
    }
  }
}

// Nothing to add where trained params have no elements, of the model or of what the device leaves to the host.
TEST(HostSums, OfNoElements) {
  Trial t;
  t.micro_batches = 2;
  t.gpu = "gpu_sim";
  t.offload_optimizer = "cpu";
  Trial empty = t;
  empty.stage = 2;
  empty.model = vectors({0}, STRATA_BF16);
  EXPECT_EQ(run(empty).error, "");
  t.stage = 3;
  t.device_updates = true;
  for (const char* kept : {"device_state_budget=1e9", "ratio=0"}) {
    t.overrides = {kOffload + kept, kZero + "param_persistence_threshold=0"};
    EXPECT_EQ(run(t).error, "") << kept;
  }
}

TEST(HostSums, NeedADeviceOfHostMemory) {
  EXPECT_THAT(run(with(of_five(1), {"plugins.host_device=gpu_sim"})).error,
              testing::HasSubstr("plugins.host_device = \"gpu_sim\" works on memory of a device"));
}

}  // namespace
}  // namespace strata::test
