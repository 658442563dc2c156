// grads_test.cc - several gradients in one call, and the views of a unit: what one call each gives, in fewer calls; and
// the norm that a step is clipped to, given per step.
#include <gmock/gmock.h>

#include <cmath>
#include <cstddef>
#include <limits>

#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

// Six vectors in three units; gradients of every dtype, some params twice.
Model two_per_unit(strata_dtype dtype) {
  Model m;
  for (int k = 0; k < 6; ++k) {
    if (k % 2 == 0) m.units.push_back("u" + std::to_string(k / 2));
    m.params.push_back({"p" + std::to_string(k), {100 + 31 * k}, dtype, k / 2, 0, false, -1});
  }
  return m;
}

struct Given {
  strata_param param;
  std::vector<char> bytes;
  strata_dtype dtype;
};

std::vector<Given> gradients(const Model& m, int step) {
  std::vector<Given> all;
  for (const uint32_t k : {5u, 4u, 3u, 5u, 2u, 0u, 3u, 5u}) {  // 1 has none, 3 has two, 5 has three
    const strata_dtype dtype = all.size() % 3 == 0 ? STRATA_F32 : STRATA_BF16;
    Given g = {k, {}, dtype};
    for (uint64_t i = 0; i < m.params[k].numel(); ++i) {
      const float x = std::sin(static_cast<float>(i + 7 * all.size()) + static_cast<float>(step));
      const char* bytes = reinterpret_cast<const char*>(&x);
      g.bytes.insert(g.bytes.end(), bytes + (dtype == STRATA_F32 ? 0 : 2), bytes + 4);
    }
    all.push_back(std::move(g));
  }
  return all;
}

strata_tensor tensor_over(Given& g, const Model& m) {
  strata_tensor t;
  STRATA_INIT(&t);
  t.data = g.bytes.data();
  t.device_type = STRATA_CPU;
  t.dtype = g.dtype;
  t.ndim = 1;
  t.shape = m.params[g.param].shape.data();
  return t;
}

// A tensor of a caller that was built with a later minor.
struct LongerTensor {
  strata_tensor tensor;
  uint64_t appended[2];
};

std::vector<float> trained(Trial trial, strata_dtype dtype, bool together) {
  std::vector<float> out;
  trial.body = [&](int rank, strata_engine* e) {
    const Model m = two_per_unit(dtype);
    ASSERT_EQ(build_model(e, m), "");
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < trial.micro_batches; ++micro) {
        std::vector<Given> given = gradients(m, 2 * step + micro);
        std::vector<strata_param> params;
        std::vector<LongerTensor> tensors;
        for (Given& g : given) {
          params.push_back(g.param);
          tensors.push_back({tensor_over(g, m), {7, 7}});
          tensors.back().tensor.struct_size = sizeof(LongerTensor);
          if (together) continue;
          ASSERT_EQ(strata_grad(e, g.param, &tensors.back().tensor, nullptr), STRATA_OK) << last();
        }
        if (together) {
          ASSERT_EQ(strata_grads(e, params.data(), &tensors[0].tensor, params.size(), nullptr), STRATA_OK) << last();
        }
        ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
      }
      ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    }
    Result r;
    ASSERT_EQ(collect(e, m, &r), "");
    for (const auto& [name, values] : r.master) {
      if (rank == 0) out.insert(out.end(), values.begin(), values.end());
    }
  };
  EXPECT_EQ(run(trial).error, "");
  return out;
}

TEST(Grads, OneCallHasTheBitsOfManyEverywhere) {
  for (const strata_dtype dtype : {STRATA_F32, STRATA_BF16}) {
    for (const int stage : {0, 1, 3}) {
      for (const int micro : {1, 2}) {
        for (const char* contiguous : {"true", "false"}) {
          Trial t;
          t.world = 2;
          t.stage = stage;
          t.micro_batches = micro;
          t.overrides = {std::string("zero_optimization.contiguous_gradients=") + contiguous};
          const std::vector<float> single = trained(t, dtype, false);
          ASSERT_FALSE(single.empty());
          EXPECT_EQ(trained(t, dtype, true), single) << dtype << " stage " << stage << " micro " << micro;
        }
      }
    }
  }
}

// `null` is a device without fold.
TEST(Grads, ADeviceThatFoldsOneByOneHasThemToo) {
  Trial t;
  t.stage = 2;
  const std::vector<float> whole = trained(t, STRATA_BF16, true);
  t.overrides = {"plugins.device=\"null\""};
  EXPECT_EQ(trained(t, STRATA_BF16, true), whole);
  EXPECT_EQ(trained(t, STRATA_BF16, false), whole);
}

TEST(Grads, OneThatIsRefusedRefusesAll) {
  Trial t;
  run_body(t, [](int, strata_engine* e) {
    const Model m = vectors({40, 50, 60});
    ASSERT_EQ(build_model(e, m), "");
    std::vector<float> a(40, 1), b(50, 1), c(60, 1);
    const std::vector<int64_t> wrong = {51};
    strata_tensor tensors[] = {tensor_of(a, m.params[0].shape), tensor_of(b, wrong), tensor_of(c, m.params[2].shape)};
    const strata_param params[] = {0, 1, 2};
    EXPECT_EQ(strata_grads(e, params, tensors, 3, nullptr), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("\"p1\"") && says("[51]")) << last();
    EXPECT_EQ(strata_grads(e, nullptr, tensors, 3, nullptr), STRATA_INVALID_ARGUMENT);
    EXPECT_EQ(strata_grads(e, params, nullptr, 3, nullptr), STRATA_INVALID_ARGUMENT);
    EXPECT_EQ(strata_grads(e, nullptr, nullptr, 0, nullptr), STRATA_OK);
    const strata_param unknown[] = {0, 99};
    EXPECT_EQ(strata_grads(e, unknown, tensors, 2, nullptr), STRATA_INVALID_ARGUMENT);
    tensors[2].struct_size = 3;
    EXPECT_EQ(strata_grads(e, params, tensors, 3, nullptr), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("item 2")) << last();
    // Nothing was added: what is given now is all there is.
    give_gradient(e, m, 1, 2);
    ASSERT_EQ(strata_end_backward(e), STRATA_OK);
    for (uint32_t k = 0; k < 3; ++k) {
      std::vector<float> got(m.params[k].numel(), -1);
      const strata_tensor out = tensor_of(got, m.params[k].shape);
      ASSERT_EQ(strata_read_param(e, k, "grad", &out), STRATA_OK) << last();
      EXPECT_THAT(got, testing::Each(k == 1 ? 2.0f : 0.0f)) << k;
    }
  });
}

TEST(UnitViews, AreTheViewsOfItsParams) {
  Trial t;
  t.stage = 3;
  t.world = 2;
  run_body(t, [](int, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    for (uint32_t u = 0; u < m.units.size(); ++u) {
      uint64_t count = 0;
      ASSERT_EQ(strata_unit_views(e, u, nullptr, 0, &count), STRATA_OK) << last();
      std::vector<LongerTensor> views(count + 1);
      for (LongerTensor& v : views) v = {{sizeof(LongerTensor), 0, nullptr, 0, 0, 0, 0, nullptr}, {7, 7}};
      if (count > 0) {
        EXPECT_EQ(strata_unit_views(e, u, &views[0].tensor, count, &count), STRATA_FAILED_PRECONDITION);
      }
      ASSERT_EQ(strata_fetch(e, u, nullptr), STRATA_OK) << last();
      ASSERT_EQ(strata_unit_views(e, u, &views[0].tensor, views.size(), &count), STRATA_OK) << last();
      size_t i = 0;
      for (uint32_t p = 0; p < m.params.size(); ++p) {
        if (m.params[p].unit != static_cast<int>(u)) continue;
        strata_tensor one;
        STRATA_INIT(&one);
        ASSERT_EQ(strata_param_view(e, p, &one), STRATA_OK) << last();
        const strata_tensor& view = views.at(i++).tensor;
        EXPECT_EQ(view.data, one.data) << m.params[p].name;
        EXPECT_EQ(view.shape, one.shape);
        EXPECT_EQ(view.dtype, one.dtype);
        EXPECT_EQ(view.struct_size, sizeof(LongerTensor));
      }
      EXPECT_EQ(i, count);
      EXPECT_EQ(views[count].tensor.ndim, 0);  // not written
      ASSERT_EQ(strata_release(e, u, nullptr), STRATA_OK);
    }
    uint64_t count = 0;
    EXPECT_EQ(strata_unit_views(e, 99, nullptr, 0, &count), STRATA_INVALID_ARGUMENT);
  });
}

// ---- max_norm ------------------------------------------------------------------------------------------------------

// 9 gradients of 2: the norm is 6.
strata_step_info step_with(strata_engine* e, const Model& m, const strata_step_args* args) {
  give_gradient(e, m, 0, 2);
  EXPECT_EQ(strata_end_backward(e), STRATA_OK) << last();
  EXPECT_EQ(strata_step(e, args), STRATA_OK) << last();
  strata_step_info info;
  STRATA_INIT(&info);
  EXPECT_EQ(strata_get_step_info(e, &info), STRATA_OK) << last();
  return info;
}

TEST(MaxNorm, IsOfOneStep) {
  Trial t;
  t.clip = 3;
  t.stage = 2;
  t.world = 2;
  run_body(t, [](int, strata_engine* e) {
    const Model m = vectors({9});
    ASSERT_EQ(build_model(e, m), "");
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = 0.1;
    const double none = std::numeric_limits<double>::infinity(), nan = std::nan("");
    for (const auto& [max_norm, clip] :
         {std::pair<double, double>{0, 0.5}, {1.5, 0.25}, {nan, 0.5}, {none, 1}, {600, 1}, {0, 0.5}}) {
      args.max_norm = max_norm;
      const strata_step_info info = step_with(e, m, &args);
      EXPECT_DOUBLE_EQ(info.grad_norm, 6);
      EXPECT_NEAR(info.clip_factor, clip, 1e-6) << max_norm;
    }
    EXPECT_NEAR(step_with(e, m, nullptr).clip_factor, 0.5, 1e-6);
    // A struct of before max_norm: what lies behind it is nobody's.
    args.struct_size = offsetof(strata_step_args, max_norm);
    args.max_norm = 1.5;
    EXPECT_NEAR(step_with(e, m, &args).clip_factor, 0.5, 1e-6);
  });
}

// Ranks say the same thing in different words.
TEST(MaxNorm, InfinityIsNoClippingOnEveryRank) {
  const double none = std::numeric_limits<double>::infinity();
  struct {
    double clip, max_norm[2];
  } const cases[] = {{0, {none, 0}}, {0, {std::nan(""), none}}, {0, {0, -0.0}}, {3, {3, 0}}};
  for (const auto& c : cases) {
    Trial t;
    t.world = 2;
    t.clip = c.clip;
    run_body(t, [&](int rank, strata_engine* e) {
      const Model m = vectors({9});
      ASSERT_EQ(build_model(e, m), "");
      strata_step_args args;
      STRATA_INIT(&args);
      args.lr = 0.1;
      args.max_norm = c.max_norm[rank];
      EXPECT_NEAR(step_with(e, m, &args).clip_factor, c.clip == 0 ? 1 : 0.5, 1e-6);
      EXPECT_EQ(strata_wait(e), STRATA_OK) << last();
    });
  }
}

TEST(MaxNorm, BelowZeroIsRefused) {
  run_body({}, [](int, strata_engine* e) {
    const Model m = vectors({9});
    ASSERT_EQ(build_model(e, m), "");
    give_gradient(e, m, 0, 2);
    ASSERT_EQ(strata_end_backward(e), STRATA_OK);
    strata_step_args args;
    STRATA_INIT(&args);
    args.max_norm = -1;
    EXPECT_EQ(strata_step(e, &args), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("max_norm is -1")) << last();
    args.max_norm = 1;
    EXPECT_EQ(strata_step(e, &args), STRATA_OK) << last();
  });
}

TEST(MaxNorm, RanksThatDifferAreRefused) {
  Trial t;
  t.world = 2;
  run_body(t, [](int rank, strata_engine* e) {
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = 0.1;
    args.max_norm = 1 + rank;
    expect_step_refused(e, args, "max_norm");
  });
}

TEST(DeviceInfo, SaysWhereTheWeightsAreAndWhatTheyTake) {
  run_body({}, [](int, strata_engine* e) {
    strata_device_info info;
    STRATA_INIT(&info);
    ASSERT_EQ(strata_get_device(e, &info), STRATA_OK) << last();
    EXPECT_EQ(info.type, STRATA_CPU);
    EXPECT_EQ(info.device_id, 0);
    EXPECT_GT(info.total_bytes, info.free_bytes);
    EXPECT_GT(info.free_bytes, 0u);
    EXPECT_EQ(info.held_bytes, 0u);
    ASSERT_EQ(build_model(e, odd_model()), "");
    uint64_t count = 0, device = 0;
    ASSERT_EQ(strata_get_plan(e, nullptr, 0, &count), STRATA_OK);
    std::vector<strata_plan_item> items(count);
    ASSERT_EQ(strata_get_plan(e, items.data(), count, &count), STRATA_OK);
    for (const strata_plan_item& item : items) device += item.tier == 0 ? item.bytes : 0;
    ASSERT_EQ(strata_get_device(e, &info), STRATA_OK);
    EXPECT_EQ(info.held_bytes, device);
    EXPECT_EQ(strata_get_device(e, nullptr), STRATA_INVALID_ARGUMENT);
  });
}

}  // namespace
}  // namespace strata::test
