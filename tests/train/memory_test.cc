// Memory the engine hands out: fetched weights are read-only, gradients find room in any order of units, and the plan
// is what is allocated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>

#include "core/plan.h"
#include "strata/draft/fault_control.h"
#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

uint16_t* view(strata_engine* e, strata_param param) {
  strata_tensor t;
  STRATA_INIT(&t);
  EXPECT_EQ(strata_param_view(e, param, &t), STRATA_OK) << last();
  return static_cast<uint16_t*>(t.data);
}

// ---- cases.md [06]: a write between fetch and release
// -----------------------------------------------------------------

struct Window {
  int stage;
  int64_t kept;        // max_reuse_distance: whether a released slab stays
  bool only_rank1;     // who writes
  strata_param param;  // 1 lies in the middle of unit 0; 2 is in a unit of its own
};

class ReadOnlyWindow : public testing::TestWithParam<Window> {};

TEST_P(ReadOnlyWindow, AWriteIsAnErrorOnAllRanksAndTheOldValuesStay) {
  const Window w = GetParam();
  Trial t;
  t.world = 2;
  t.stage = w.stage;
  t.overrides = {"check_weights=true"};
  if (w.stage == 3) {
    t.overrides.push_back("zero_optimization.param_persistence_threshold=0");
    t.overrides.push_back("zero_optimization.max_reuse_distance=" + std::to_string(w.kept));
  }
  Model m;
  m.units = {"first", "second"};
  m.params = {{"a", {10}, STRATA_BF16, 0, 0, false, -1},
              {"b", {3000}, STRATA_BF16, 0, 0, false, -1},
              {"c", {10}, STRATA_BF16, 1, 0, false, -1}};
  t.body = [&](int rank, strata_engine* e) {
    ASSERT_EQ(build_model(e, m), "");
    const strata_unit unit = w.param == 2 ? 1 : 0;
    const uint64_t count = m.params[w.param].numel();
    ASSERT_EQ(strata_fetch(e, unit, nullptr), STRATA_OK) << last();
    uint16_t* weights = view(e, w.param);
    const std::vector<uint16_t> before(weights, weights + count);
    if (rank == 1 || !w.only_rank1) std::fill(weights + count / 2, weights + count, uint16_t{0x40E0});  // 7.0
    EXPECT_EQ(strata_release(e, unit, nullptr), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says(m.units[unit])) << last();
    EXPECT_TRUE(says("\"" + m.params[w.param].name + "\"")) << last();
    EXPECT_TRUE(says(w.only_rank1 ? "it failed on rank 1: " : "it failed on all 2 ranks: ")) << last();
    // The engine goes on, with the old values.
    ASSERT_EQ(strata_fetch(e, unit, nullptr), STRATA_OK) << last();
    weights = view(e, w.param);
    EXPECT_EQ(std::vector<uint16_t>(weights, weights + count), before);
    EXPECT_EQ(strata_release(e, unit, nullptr), STRATA_OK) << last();
    EXPECT_EQ(micro_batch(e, m, 0, 0, rank, UINT32_MAX), "");
    EXPECT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    EXPECT_EQ(strata_wait(e), STRATA_OK) << last();
  };
  run(t);
}

INSTANTIATE_TEST_SUITE_P(Windows, ReadOnlyWindow,
                         testing::Values(Window{0, 0, true, 1}, Window{1, 0, false, 2}, Window{2, 0, true, 2},
                                         Window{3, 0, true, 1}, Window{3, 0, false, 2}, Window{3, 1000000000, true, 1},
                                         Window{3, 1000000000, false, 2}));

TEST(CheckWeights, ChangesNoBits) {
  Trial t;
  t.world = 2;
  t.stage = 3;
  t.overrides = {"zero_optimization.param_persistence_threshold=40"};
  const Result plain = run(t);
  t.overrides.push_back("check_weights=true");
  const Result checked = run(t);
  EXPECT_EQ(plain.error, "");
  EXPECT_EQ(checked.error, "");
  EXPECT_TRUE(checked == plain);
}

// ---- room for gradients
// -----------------------------------------------------------------------------------------------

// Units whose gradients come in any order, several open at once, while earlier reductions are under way: as long as
// what is being filled stays within two of the largest unit, no order may be refused for want of room.
TEST(GradientRoom, NoOrderOfUnitsFragmentsTheBuffers) {
  constexpr int kPrograms = 60, kUnits = 6;
  constexpr uint64_t kBucket = 40000;
  for (int seed = 0; seed < kPrograms; ++seed) {
    std::mt19937 sizes(static_cast<unsigned>(seed));
    std::vector<int64_t> elements;
    for (int k = 0; k < kUnits; ++k) elements.push_back(static_cast<int64_t>(1 + sizes() % 12) * 4096);
    const auto largest = static_cast<uint64_t>(*std::max_element(elements.begin(), elements.end()));
    Trial t;
    t.world = 2;
    t.stage = 2;
    t.micro_batches = 3;
    t.overrides = {"zero_optimization.reduce_bucket_size=" + std::to_string(kBucket), "log_level=error"};
    const Model m = vectors(elements, STRATA_BF16);
    t.body = [&](int, strata_engine* e) {
      ASSERT_EQ(build_model(e, m), "");
      std::mt19937 random(static_cast<unsigned>(1000 + seed));
      std::vector<float> values(13 * 4096, 0.5f);
      for (int micro = 0; micro < 6; ++micro) {
        std::vector<uint32_t> waiting(kUnits), open;
        for (uint32_t k = 0; k < kUnits; ++k) waiting[k] = k;
        std::shuffle(waiting.begin(), waiting.end(), random);
        uint64_t open_elements = 0;
        auto close_one = [&] {
          const size_t k = random() % open.size();
          open_elements -= m.params[open[k]].numel();
          ASSERT_EQ(strata_grads_done(e, open[k]), STRATA_OK) << "program " << seed << ": " << last();
          open.erase(open.begin() + static_cast<std::ptrdiff_t>(k));
        };
        for (uint32_t unit : waiting) {
          const uint64_t more = m.params[unit].numel();
          while (!open.empty() && (open_elements + more > 2 * largest || random() % 3 == 0)) close_one();
          const strata_tensor g = tensor_of(values, m.params[unit].shape);
          ASSERT_EQ(strata_grad(e, unit, &g, nullptr), STRATA_OK) << "program " << seed << ": " << last();
          open.push_back(unit);
          open_elements += more;
        }
        ASSERT_EQ(strata_end_backward(e), STRATA_OK) << "program " << seed << ": " << last();
        if (micro % 3 == 2) {
          ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
        }
      }
      ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
    };
    run(t);
  }
}

// What a host was refused counts as not given, and nothing else is lost: the step reduces and updates every unit as if
// the refused calls had not been made, on ranks of which some have no gradients at all.
TEST(GradientRoom, ARefusedGradientCostsNothingElse) {
  const Model m = vectors(std::vector<int64_t>(10, 8192), STRATA_BF16);
  const auto body = [&m](bool too_many, Result* out) {
    return [&m, too_many, out](int rank, strata_engine* e) {
      ASSERT_EQ(build_model(e, m), "");
      for (int step = 0; step < 3; ++step) {
        std::vector<float> values(8192, static_cast<float>(step + 1));
        const auto give = [&](uint32_t k) {
          const strata_tensor g = tensor_of(values, m.params[k].shape);
          return strata_grad(e, k, &g, nullptr);
        };
        std::vector<bool> given(10, false);
        for (uint32_t k = 0; k < 10 && rank == 0; ++k) {
          if (k < 2 || too_many) given[k] = give(k) == STRATA_OK;  // several stay open: the later ones find no room
        }
        if (too_many && rank == 0) {
          EXPECT_FALSE(given[9]);
        }
        for (uint32_t k = 0; k < 10; ++k) {  // an order that is not that of the last step
          const uint32_t unit = (k * 3 + static_cast<uint32_t>(step)) % 10;
          ASSERT_EQ(strata_grads_done(e, unit), STRATA_OK) << last();
        }
        ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
        ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
        ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
        strata_step_info info;
        STRATA_INIT(&info);
        ASSERT_EQ(strata_get_step_info(e, &info), STRATA_OK);
        const double units = static_cast<double>(std::count(given.begin(), given.end(), true));
        if (rank == 0) {
          EXPECT_NEAR(info.grad_norm, std::sqrt(units * 8192) * (step + 1) / 2, 1e-6 * info.grad_norm);
        }
      }
      if (rank == 0) {
        EXPECT_EQ(collect(e, m, out), "");
      } else {
        Result ignored;
        EXPECT_EQ(collect(e, m, &ignored), "");
      }
    };
  };
  for (int stage : {0, 2, 3}) {
    Trial t;
    t.world = 2;
    t.stage = stage;
    t.overrides = {"zero_optimization.reduce_bucket_size=4096"};
    if (stage == 3) t.overrides.push_back("zero_optimization.param_persistence_threshold=0");
    Result few, many;
    t.body = body(false, &few);
    run(t);
    t.body = body(true, &many);
    run(t);
    for (const char* name : {"p0", "p1"}) EXPECT_EQ(few.master[name], many.master[name]) << name << " stage " << stage;
    // A unit whose gradient was refused keeps its weight and moments.
    Result untouched;
    untouched.master["p9"].resize(8192);
    for (uint64_t i = 0; i < 8192; ++i) untouched.master["p9"][i] = initial_value(9, i);
    EXPECT_EQ(many.master["p9"], untouched.master["p9"]) << "stage " << stage;
  }
}

TEST(GradientRoom, TooManyOpenUnitsAreRefusedWithTheKeyAndTheCall) {
  Trial t;
  t.overrides = {"zero_optimization.reduce_bucket_size=4096"};
  t.stage = 2;
  t.body = [](int, strata_engine* e) {
    const Model m = vectors(std::vector<int64_t>(12, 8192), STRATA_BF16);
    ASSERT_EQ(build_model(e, m), "");
    std::vector<float> values(8192, 1.0f);
    strata_status status = STRATA_OK;
    for (uint32_t k = 0; k < 12 && status == STRATA_OK; ++k) {
      const strata_tensor g = tensor_of(values, m.params[k].shape);
      status = strata_grad(e, k, &g, nullptr);
    }
    EXPECT_EQ(status, STRATA_RESOURCE_EXHAUSTED);
    EXPECT_TRUE(says("reduce_bucket_size") && says("strata_grads_done")) << last();
  };
  run(t);
}

// ---- contract 8: the plan against what device and offload plugin were asked for
// -----------------------------------------------------------------------

struct Held {
  uint64_t device = 0, host = 0;
  bool operator==(const Held&) const = default;
};
void PrintTo(const Held& h, std::ostream* out) { *out << h.device << " on the device, " << h.host << " of the host"; }

Held planned(strata_engine* e) {
  std::vector<strata_plan_item> items(64);
  uint64_t count = 0;
  EXPECT_EQ(strata_get_plan(e, items.data(), items.size(), &count), STRATA_OK) << last();
  Held held;
  for (uint64_t i = 0; i < count; ++i) (items[i].tier == 0 ? held.device : held.host) += items[i].bytes;
  return held;
}

strata_device_info device_of(strata_engine* e) {
  strata_device_info info;
  STRATA_INIT(&info);
  EXPECT_EQ(strata_get_device(e, &info), STRATA_OK) << last();
  return info;
}

// After commit, and after steps in which everything was used that comes late: state read and written by hand, updates,
// a second gradient of a param in one micro-batch.
void expect_the_plan(Trial t) {
  static int serial = 0;
  const std::string job = "plan-" + std::to_string(serial++);
  t.gpu = "gpu_sim";
  t.overrides.insert(t.overrides.end(), {"plugins.device=fault", "plugins.offload_cpu=fault"});
  t.manifest_extra = "[plugin.fault]\nwraps = \"gpu_sim, offload_cpu\"\ntag = \"" + job + "\"\n";
  Gpu gpu(t.gpu, job, 0, 1, 0);
  std::string error;
  strata_engine* e = open_rank(t, job, 0, &error);
  ASSERT_EQ(error, "");
  const void* table = nullptr;
  ASSERT_EQ(strata_get_plugin_interface(e, "device", STRATA_FAULT_CONTROL, &table), STRATA_OK) << last();
  const auto* seen = static_cast<const strata_fault_control_api*>(table);
  const uint64_t free_before = device_of(e).free_bytes;
  const auto held = [&] {
    return Held{free_before - device_of(e).free_bytes,
                seen->bytes_seen(job.c_str(), 0, "alloc_pinned") + seen->bytes_seen(job.c_str(), 0, "offload.alloc")};
  };
  ASSERT_EQ(build_model(e, t.model), "");
  const Held committed = held();
  EXPECT_EQ(committed, planned(e));
  for (int step = 1; step <= 2; ++step) {
    for (int micro = 0; micro < t.micro_batches; ++micro) {
      give_gradient_on(gpu, e, t.model, 0);
      EXPECT_EQ(micro_batch(e, t.model, step, micro, 0, UINT32_MAX, &gpu), "");
    }
    EXPECT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
  }
  Result all;
  EXPECT_EQ(collect(e, t.model, &all), "");
  gpu.wait();
  const Held later = held();
  EXPECT_EQ(later, planned(e));
  EXPECT_EQ(later.device, device_of(e).held_bytes);
  EXPECT_GT(later.device, committed.device);  // sums of second gradients
  strata_close(e);
}

TEST(MemoryPlan, IsWhatIsAllocated) {
  load<strata_device_api>("fault", STRATA_DEVICE);
  const std::string z = "zero_optimization.", o = z + "offload_optimizer.", split = o + "split_update=true";
  for (const int stage : {2, 3}) {
    for (const int micro_batches : {1, 2}) {
      for (const std::vector<std::string>& part : std::vector<std::vector<std::string>>{
               {}, {o + "ratio=0.5"}, {o + "ratio=0"}, {split, z + "sub_group_size=4096"}}) {
        for (const char* params : {"none", "cpu"}) {
          if (stage < 3 && params == std::string("cpu")) continue;
          Trial t;
          t.stage = stage;
          t.micro_batches = micro_batches;
          t.model = vectors({40960, 8192, 20480}, STRATA_BF16);
          t.overrides = part;
          if (stage == 3) t.overrides.push_back(z + "param_persistence_threshold=10000");
          t.offload_optimizer = "cpu";
          t.offload_param = params;
          t.device_updates = !part.empty();
          SCOPED_TRACE("stage " + std::to_string(stage) + ", " + std::to_string(micro_batches) + " micro-batches, " +
                       (part.empty() ? "" : part[0]) + ", params on " + params);
          expect_the_plan(t);
        }
      }
    }
  }
}

// What offload_cpu and the engine page-locked up to the first step, and what the line of that step says of it.
struct Pinned {
  uint64_t bytes = 0;
  std::string said;
  std::map<std::string, uint64_t> planned;  // of host memory
};

Pinned pinned_of(Trial t) {
  static int serial = 0;
  const std::string job = "pinned-" + std::to_string(serial++);
  t.gpu = "gpu_sim";
  t.overrides.insert(t.overrides.end(), {"plugins.device=fault", "steps_per_print=1", "log_level=info"});
  t.manifest_extra = "[plugin.fault]\nwraps = \"gpu_sim\"\ntag = \"" + job + "\"\n";
  std::mutex lock;
  Pinned pinned;
  t.log = [&](strata_log_level, const std::string& text) {
    const std::lock_guard guard(lock);
    const size_t end = text.find(" pinned; ");
    if (end != text.npos) pinned.said = text.substr(text.rfind(", ", end) + 2, end - text.rfind(", ", end) - 2);
  };
  Gpu gpu(t.gpu, job, 0, 1, 0);
  std::string error;
  strata_engine* e = open_rank(t, job, 0, &error);
  EXPECT_EQ(error, "");
  EXPECT_EQ(build_model(e, t.model), "");
  const void* table = nullptr;
  EXPECT_EQ(strata_get_plugin_interface(e, "device", STRATA_FAULT_CONTROL, &table), STRATA_OK) << last();
  pinned.bytes = static_cast<const strata_fault_control_api*>(table)->bytes_seen(job.c_str(), 0, "alloc_pinned");
  std::vector<strata_plan_item> items(64);
  uint64_t count = 0;
  EXPECT_EQ(strata_get_plan(e, items.data(), items.size(), &count), STRATA_OK) << last();
  for (uint64_t i = 0; i < count; ++i) {
    if (items[i].tier == 1) pinned.planned[items[i].what] += items[i].bytes;
  }
  EXPECT_EQ(micro_batch(e, t.model, 1, 0, 0, UINT32_MAX, &gpu), "");
  EXPECT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
  EXPECT_EQ(strata_wait(e), STRATA_OK) << last();
  gpu.wait();
  strata_close(e);
  return pinned;
}

// State that the host alone works on is never copied by the device: all of it, or all but the share that is streamed.
TEST(MemoryPlan, PinMemoryLocksWhatTheDeviceCopies) {
  load<strata_device_api>("fault", STRATA_DEVICE);
  const std::string z = "zero_optimization.", o = z + "offload_optimizer.";
  const std::pair<std::string, uint64_t> shares[] = {{"", 4}, {"0", 0}, {"0.25", 1}, {"0.5", 2}, {"1", 4}};  // quarters
  for (const auto& [share, quarters] : shares) {
    for (const std::string params : {"none", "cpu"}) {
      SCOPED_TRACE("share \"" + share + "\", params on " + params);
      Trial t;
      t.stage = 3;
      t.model = vectors({40960, 8192, 16384}, STRATA_BF16);
      t.overrides = {z + "param_persistence_threshold=10000", o + "split_update=true"};
      if (!share.empty()) t.overrides.push_back(o + "split_share=" + share);
      t.offload_optimizer = "cpu";
      t.offload_param = params;
      t.device_updates = true;
      const Pinned plain = pinned_of(t);
      t.overrides.push_back(o + "pin_memory=true");
      const Pinned pinned = pinned_of(t);
      EXPECT_EQ(pinned.said, size_text(pinned.bytes)) << "the plan";
      std::map<std::string, uint64_t> planned = pinned.planned;
      EXPECT_GT(planned["optimizer state"], 0u);
      EXPECT_GT(planned["reduced gradients"], 0u);
      EXPECT_EQ(pinned.bytes - plain.bytes,
                planned["reduced gradients"] + planned["weight shards"] + planned["optimizer state"] / 4 * quarters);
    }
  }
  Trial t;
  t.stage = 3;
  t.offload_optimizer = "cpu";
  const Pinned plain = pinned_of(t);
  t.overrides.push_back(o + "pin_memory=true");
  const Pinned pinned = pinned_of(t);
  EXPECT_EQ(pinned.said, size_text(pinned.bytes)) << "without split_update";
  std::map<std::string, uint64_t> planned = pinned.planned;
  EXPECT_EQ(pinned.bytes - plain.bytes, planned["reduced gradients"]);
}

// Buffers that new weights go through do not grow with the largest unit. Nothing of this size is allocated: the plan is
// refused.
TEST(MemoryPlan, BuffersOfNewWeightsAreBounded) {
  for (const auto& [largest, said] : {std::pair{int64_t{1} << 27, "256.00 MiB"}, {int64_t{1} << 20, "24.00 MiB"}}) {
    Trial t;
    t.gpu = "gpu_sim";
    t.stage = 3;
    t.offload_optimizer = "cpu";
    t.model = vectors({largest, 4096}, STRATA_BF16);
    t.overrides = {"log_level=info", "host_memory_limit=1000000"};
    std::string plan;
    t.log = [&plan](strata_log_level, const std::string& text) { plan += text + "\n"; };
    t.body = [&](int, strata_engine* e) {
      EXPECT_THAT(build_model(e, t.model), testing::HasSubstr("host_memory_limit"));
    };
    run(t);
    EXPECT_NE(plan.find(std::string("update buffers ") + said), std::string::npos) << plan;
  }
}

// ---- cases.md [18]: pinned memory runs out -----------------------------------------------------------------------

// A run with page-locked memory for offloaded state, and what was locked, on all ranks, when each line was said.
struct Locking {
  Result result;
  std::vector<std::pair<std::string, uint64_t>> lines;
  uint64_t locked = 0;
  std::vector<std::pair<std::string, uint64_t>> said(const std::string& begin) const {
    std::vector<std::pair<std::string, uint64_t>> found;
    for (const auto& line : lines) {
      if (line.first.rfind(begin, 0) == 0) found.push_back(line);
    }
    return found;
  }
};

Locking locking(int world, const std::string& budget) {
  static int serial = 0;
  const std::string tag = "locking-" + std::to_string(serial++);
  const auto* seen = load<strata_fault_control_api>("fault", STRATA_FAULT_CONTROL);
  const auto locked = [&] { return seen->bytes_seen(tag.c_str(), -1, "alloc_pinned"); };
  Trial t;
  t.gpu = "gpu_sim";
  t.world = world;
  t.stage = 3;
  t.offload_optimizer = t.offload_param = "cpu";
  t.overrides = {"plugins.device=fault", "log_level=info", "zero_optimization.param_persistence_threshold=0"};
  t.manifest_extra = "[plugin.fault]\nwraps = \"gpu_sim\"\ntag = \"" + tag + "\"\n";
  if (!budget.empty()) {
    t.overrides.push_back("zero_optimization.offload_param.pin_memory=true");
    t.overrides.push_back("plugin.offload_cpu.pinned_budget_bytes=" + budget);
  }
  std::mutex lock;
  Locking run_of;
  t.log = [&](strata_log_level, const std::string& text) {
    const std::lock_guard guard(lock);
    run_of.lines.emplace_back(text, locked());
  };
  run_of.result = run(t);
  run_of.locked = locked();
  EXPECT_EQ(run_of.result.error, "");
  return run_of;
}

TEST(PinnedBudget, IsSaidBeforeItIsTakenAndKeptWithTheSameNumbers) {
  load<strata_device_api>("fault", STRATA_DEVICE);
  for (const int world : {1, 2}) {
    const auto ranks = static_cast<uint64_t>(world);
    const Locking plain = locking(world, "");
    const uint64_t wanted = (locking(world, "-1").locked - plain.locked) / ranks;  // per rank
    ASSERT_GT(wanted, 1u << 15);
    for (const uint64_t budget : {uint64_t{0}, uint64_t{4096}, wanted / 2, wanted - 1, wanted}) {
      SCOPED_TRACE("world " + std::to_string(world) + ", " + std::to_string(budget) + " of " + std::to_string(wanted));
      const Locking limited = locking(world, std::to_string(budget));
      EXPECT_TRUE(limited.result == plain.result) << "the numbers changed";
      EXPECT_LE(limited.locked - plain.locked, budget * ranks);
      // All that is needed, before any of it is taken: the plan.
      const auto needed = limited.said("plan: cpu: in all ");
      ASSERT_GE(needed.size(), 1u);
      EXPECT_EQ(needed[0].second, 0u);
      // What one region needs and what is allowed, once on each rank.
      const auto warnings = limited.said("pin_memory: ");
      ASSERT_EQ(warnings.size(), budget < wanted ? ranks : 0u);
      for (const auto& [text, locked] : warnings) {
        uint64_t wants = 0, allowed = 0, used = 0;
        const size_t at = text.find(" wants ");
        ASSERT_NE(at, text.npos) << text;
        ASSERT_EQ(std::sscanf(text.c_str() + at,
                              " wants %lu bytes, but the pinned budget is %lu bytes, %lu used (option "
                              "pinned_budget_bytes); it and later",
                              &wants, &allowed, &used),
                  3)
            << text;
        EXPECT_EQ(allowed, budget);
        EXPECT_GT(wants + used, allowed);
        EXPECT_LE(used, allowed);
        if (world == 1) {
          EXPECT_LE(locked, plain.locked + used) << "it was taken before it was said";
        }
      }
    }
  }
}

}  // namespace
}  // namespace strata::test
