// Calls in a wrong order, with wrong arguments, from a wrong place: refused with the reason, and nothing lost (numbers
// in brackets: cases of the project's list).
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

TEST(CallOrder, EveryWrongOrderIsRefusedWithItsReason) {
  Trial t;
  t.micro_batches = 2;
  run_body(t, [](int, strata_engine* e) {
    const Model m = odd_model();
    EXPECT_EQ(strata_fetch(e, 0, nullptr), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("strata_commit")) << last();
    ASSERT_EQ(build_model(e, m), "");
    strata_unit unit;
    EXPECT_EQ(strata_add_unit(e, "late", &unit), STRATA_FAILED_PRECONDITION);
    EXPECT_EQ(strata_commit(e), STRATA_FAILED_PRECONDITION);
    EXPECT_EQ(strata_fetch(e, 99, nullptr), STRATA_INVALID_ARGUMENT);
    EXPECT_EQ(strata_release(e, 0, nullptr), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("embed")) << last();
    EXPECT_EQ(strata_step(e, nullptr), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("0 of 2 micro-batches")) << last();
    ASSERT_EQ(micro_batch(e, m, 1, 0, 0, UINT32_MAX), "");
    EXPECT_EQ(strata_step(e, nullptr), STRATA_FAILED_PRECONDITION);
    EXPECT_EQ(strata_save(e, "/tmp", "x"), STRATA_FAILED_PRECONDITION);  // [51] between micro-batches
    EXPECT_TRUE(says("1 micro-batches")) << last();
    ASSERT_EQ(micro_batch(e, m, 1, 1, 0, UINT32_MAX), "");
    EXPECT_EQ(strata_end_backward(e), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("call strata_step")) << last();
    ASSERT_EQ(strata_fetch(e, 1, nullptr), STRATA_OK);
    EXPECT_EQ(strata_step(e, nullptr), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("still fetched")) << last();
    ASSERT_EQ(strata_release(e, 1, nullptr), STRATA_OK);
    ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
    EXPECT_EQ(strata_step(e, nullptr), STRATA_FAILED_PRECONDITION);  // a second one without gradients
  });
}

TEST(CallOrder, GroupSettingsAreOnePerGroup) {
  run_body({}, [](int, strata_engine* e) {
    const Model m = odd_model();  // two groups
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(micro_batch(e, m, 0, 0, 0, UINT32_MAX), "");
    const double rates[3] = {0.1, 0.2, 0.3};
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = 0.1;
    args.group_lr = rates;
    for (uint64_t count : {0, 1, 3}) {
      args.group_count = count;
      EXPECT_EQ(strata_step(e, &args), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says("there are 2 param groups")) << last();
    }
    auto settings = step_settings(2);
    args.group_lr = nullptr;
    args.groups = settings.data();
    args.group_count = 1;
    EXPECT_EQ(strata_step(e, &args), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("there are 2 param groups")) << last();
    args.group_count = 2;
    settings[1].struct_size = 3;
    EXPECT_EQ(strata_step(e, &args), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("groups: item 1: struct_size 3")) << last();
    settings[1] = settings[0];
    settings[1].beta1 = 1;
    EXPECT_EQ(strata_step(e, &args), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("strata_step, group 1") && says("beta")) << last();
    args.groups = nullptr;
    args.group_lr = rates;
    EXPECT_EQ(strata_step(e, &args), STRATA_OK) << last();
  });
}

// How far a step moved the params of group 1, whose own rate is 0.005: an AdamW that always sees the same gradient
// moves by its learning rate.
double step_of_group_1(strata_engine* e, const Model& m, const strata_step_args& args) {
  const auto read = [&] {
    std::vector<float> value(m.params[0].numel());
    strata_tensor out = tensor_of(value, m.params[0].shape);
    EXPECT_EQ(strata_read_param(e, 0, "master", &out), STRATA_OK) << last();
    return value[0];
  };
  const double before = read();
  give_gradient(e, m, 0, 2);
  EXPECT_EQ(strata_end_backward(e), STRATA_OK) << last();
  EXPECT_EQ(strata_step(e, &args), STRATA_OK) << last();
  return before - read();
}

TEST(CallOrder, TheMoreParticularLearningRateWins) {
  run_body({}, [](int, strata_engine* e) {
    Model m = vectors({9});
    m.params[0].group = 1;
    ASSERT_EQ(build_model(e, m), "");
    struct Longer {  // as of a later minor: items lie the first one's struct_size apart
      strata_group_args args;
      double more;
    };
    const double none = std::nan("");
    constexpr uint32_t kSize = sizeof(Longer);
    Longer settings[2] = {{{kSize, 0, 0.1, 0.9, none, none, none}, 7}, {{kSize, 0, none, none, none, none, none}, 7}};
    double rates[2] = {0.2, none};
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = 0.5;
    args.group_count = 2;
    EXPECT_NEAR(step_of_group_1(e, m, args), 0.005, 1e-6);
    args.group_lr = rates;
    args.groups = &settings[0].args;
    EXPECT_NEAR(step_of_group_1(e, m, args), 0.005, 1e-6);
    rates[1] = 0.25;
    EXPECT_NEAR(step_of_group_1(e, m, args), 0.25, 1e-6);
    settings[1].args.lr = 0.125;
    EXPECT_NEAR(step_of_group_1(e, m, args), 0.125, 1e-6);
    args.struct_size = offsetof(strata_step_args, groups);  // of before groups: what lies behind it is nobody's
    EXPECT_NEAR(step_of_group_1(e, m, args), 0.25, 1e-6);
  });
}

TEST(CallOrder, AStructSizeWithinAFieldIsRefused) {
  run_body({}, [](int, strata_engine* e) {
    for (uint32_t size : {0u, 1u, 7u, 8u, 9u, 16u, 21u, static_cast<uint32_t>(sizeof(strata_param_args)) - 8}) {
      strata_param_args args;
      STRATA_INIT(&args);
      args.struct_size = size;
      strata_param param;
      EXPECT_EQ(strata_add_param(e, 0, &args, &param), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says("struct_size")) << last();
    }
  });
}

TEST(CallOrder, ATiedNameCannotContradictItsOwner) {
  run_body({}, [](int, strata_engine* e) {
    strata_group_args group;
    STRATA_INIT(&group);
    group.lr = 0.5;
    strata_group other;
    ASSERT_EQ(strata_add_group(e, &group, &other), STRATA_OK) << last();
    strata_unit unit;
    ASSERT_EQ(strata_add_unit(e, "u", &unit), STRATA_OK);
    const int64_t shape[] = {4};
    strata_param_args args;
    STRATA_INIT(&args);
    args.name = "owner";
    args.shape = shape;
    args.ndim = 1;
    args.dtype = STRATA_F32;
    strata_param owner, tied;
    ASSERT_EQ(strata_add_param(e, unit, &args, &owner), STRATA_OK);
    args.tied = 1;
    args.tied_to = owner;
    args.name = "in another group";
    args.group = other;
    EXPECT_EQ(strata_add_param(e, unit, &args, &tied), STRATA_INVALID_ARGUMENT);
    args.group = 0;
    args.flags = STRATA_PARAM_FROZEN;
    EXPECT_EQ(strata_add_param(e, unit, &args, &tied), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("owner")) << last();
    args.flags = 0;
    args.tied = 2;
    EXPECT_EQ(strata_add_param(e, unit, &args, &tied), STRATA_INVALID_ARGUMENT);
    args.tied = 1;
    args.name = "\xff";
    EXPECT_EQ(strata_add_param(e, unit, &args, &tied), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("UTF-8")) << last();
    EXPECT_EQ(strata_set_meta(e, "note", "\xc3("), STRATA_INVALID_ARGUMENT);
    EXPECT_EQ(strata_set_meta(e, "note", "\xc3\xa9"), STRATA_OK);
    EXPECT_EQ(strata_set_meta(e, "note", nullptr), STRATA_OK);
    const char* value = nullptr;
    EXPECT_EQ(strata_get_meta(e, "note", &value), STRATA_NOT_FOUND);
    strata_counters counters;
    STRATA_INIT(&counters);
    EXPECT_EQ(strata_get_counters(e, 77, &counters), STRATA_INVALID_ARGUMENT);
    args.name = "tied";
    EXPECT_EQ(strata_add_param(e, unit, &args, &tied), STRATA_OK) << last();
  });
}

TEST(CallOrder, AGradientHalfWayThroughAccumulationIsNotReadable) {
  for (int stage : {0, 1, 2}) {
    Trial t;
    t.stage = stage;
    t.micro_batches = 2;
    run_body(t, [stage](int, strata_engine* e) {
      const Model m = vectors({300});
      ASSERT_EQ(build_model(e, m), "");
      give_gradient(e, m, 0, 1.0f);
      ASSERT_EQ(strata_end_backward(e), STRATA_OK);
      std::vector<float> values(300);
      const strata_tensor out = tensor_of(values, m.params[0].shape);
      EXPECT_EQ(strata_read_param(e, 0, "grad", &out), stage < 2 ? STRATA_FAILED_PRECONDITION : STRATA_OK) << last();
      give_gradient(e, m, 0, 2.0f);
      ASSERT_EQ(strata_end_backward(e), STRATA_OK);
      EXPECT_EQ(strata_read_param(e, 0, "grad", &out), STRATA_OK) << last();
      EXPECT_EQ(values[299], 3.0f);
    });
  }
}

TEST(CallOrder, AGradientSaysWhereItLies) {
  run_body({}, [](int, strata_engine* e) {
    const Model m = vectors({4});
    ASSERT_EQ(build_model(e, m), "");
    std::vector<float> values(4, 1.0f);
    for (int32_t type : {0, 2, 7}) {
      strata_tensor t = tensor_of(values, m.params[0].shape);
      t.device_type = type;
      EXPECT_EQ(strata_grad(e, 0, &t, nullptr), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says("device_type")) << last();
    }
  });
}

TEST(CallOrder, OverridesMayNotBeNull) {
  strata_engine_args args;
  STRATA_INIT(&args);
  args.manifest_text = "";
  args.override_count = 1;
  strata_engine* e = nullptr;
  EXPECT_EQ(strata_open(&args, &e), STRATA_INVALID_ARGUMENT);
  const char* none[] = {nullptr};
  args.overrides = none;
  EXPECT_EQ(strata_open(&args, &e), STRATA_INVALID_ARGUMENT);
}

TEST(CallOrder, AGradientAfterItsUnitIsDoneIsRefusedByName) {  // [11]
  run_body({.stage = 2}, [](int, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(strata_grads_done(e, 1), STRATA_OK);
    std::vector<float> g(64 * 97);
    const strata_tensor t = tensor_of(g, m.params[2].shape);
    EXPECT_EQ(strata_grad(e, 2, &t, nullptr), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("layer0.weight")) << last();
    EXPECT_EQ(strata_grads_done(e, 1), STRATA_FAILED_PRECONDITION);
    const std::vector<int64_t> wrong = {97, 64};
    const strata_tensor turned = tensor_of(g, wrong);
    EXPECT_EQ(strata_grad(e, 5, &turned, nullptr), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("shape")) << last();
    EXPECT_EQ(strata_grad(e, 7, &t, nullptr), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("frozen")) << last();
  });
}

TEST(CallOrder, AReleasedParamHasShapeButNoData) {  // [05]
  Trial t;
  t.stage = 3;
  t.world = 2;
  t.overrides = {"zero_optimization.param_persistence_threshold=0"};
  run_body(t, [](int, strata_engine* e) {
    const Model m = odd_model();
    ASSERT_EQ(build_model(e, m), "");
    strata_tensor view;
    STRATA_INIT(&view);
    EXPECT_EQ(strata_param_view(e, 2, &view), STRATA_FAILED_PRECONDITION);
    EXPECT_EQ(view.data, nullptr);
    ASSERT_EQ(view.ndim, 2);
    EXPECT_EQ(view.shape[0], 64);
    EXPECT_EQ(view.shape[1], 97);
    ASSERT_EQ(strata_fetch(e, 1, nullptr), STRATA_OK) << last();
    EXPECT_EQ(strata_param_view(e, 2, &view), STRATA_OK);
    EXPECT_NE(view.data, nullptr);
    ASSERT_EQ(strata_release(e, 1, nullptr), STRATA_OK);
    EXPECT_EQ(strata_param_view(e, 2, &view), STRATA_FAILED_PRECONDITION);
    EXPECT_EQ(view.data, nullptr);
  });
}

TEST(CallOrder, CallsFromALogCallbackAreRefused) {
  struct Seen {
    strata_engine* engine = nullptr;
    std::atomic<int> refused{0};
  } seen;
  const std::string manifest = manifest_of({});
  strata_engine_args args;
  STRATA_INIT(&args);
  args.manifest_text = manifest.c_str();
  const char* debug = "log_level=debug";
  args.overrides = &debug;
  args.override_count = 1;
  args.plugin_dir = STRATA_BUILD_PLUGIN_DIR;
  args.log_ctx = &seen;
  args.log = [](void* ctx, strata_log_level, const char*, const char*) {
    auto* s = static_cast<Seen*>(ctx);
    strata_step_info info;
    STRATA_INIT(&info);
    if (s->engine && strata_get_step_info(s->engine, &info) == STRATA_FAILED_PRECONDITION) ++s->refused;
    if (!s->engine) return;
    strata_close(s->engine);  // nothing happens: the engine is used afterwards
    strata_engine_args inner;
    STRATA_INIT(&inner);
    inner.manifest_text = "";
    strata_engine* another = nullptr;
    EXPECT_EQ(strata_open(&inner, &another), STRATA_FAILED_PRECONDITION);
  };
  ASSERT_EQ(strata_open(&args, &seen.engine), STRATA_OK) << last();
  EXPECT_EQ(build_model(seen.engine, odd_model()), "");
  strata_close(seen.engine);
  EXPECT_GT(seen.refused, 0);
}

}  // namespace
}  // namespace strata::test
