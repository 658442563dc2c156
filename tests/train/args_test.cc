// What hosts hand over at the C API: structs of older and newer headers, counts and dimensions that were never set,
// calls from inside the engine's own calls of the host. Refused by name, or taken; never a crash.
#include <unistd.h>

#include <cstddef>
#include <cstring>

#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

// ---- structs that were shorter -------------------------------------------------------------------------------------

// `call` gets a zeroed struct of `size` bytes, in a buffer that is longer.
template <class T>
void expect_first_size(uint32_t first, const std::function<strata_status(T*)>& call) {
  struct Longer {
    T args;
    uint64_t more[4];
  };
  const uint32_t known = sizeof(T), longer = sizeof(Longer);
  for (uint32_t size : {0u, 8u, first - 8, first, known, longer}) {
    Longer buffer;
    std::memset(static_cast<void*>(&buffer), 0, sizeof(buffer));
    buffer.args.struct_size = size;
    const strata_status status = call(&buffer.args);
    const bool is_refused = status == STRATA_INVALID_ARGUMENT && says("struct_size " + std::to_string(size) + " ");
    EXPECT_EQ(is_refused, size < first) << size << " of " << first << ": " << last();
    EXPECT_TRUE(!is_refused || says("the first has " + std::to_string(first) + " bytes")) << last();
  }
}

// The numbers are those of the headers as they were first published. They never change.
TEST(FirstSizes, AreTakenAndAnythingShorterIsNot) {
  strata_engine* opened = nullptr;
  expect_first_size<strata_engine_args>(88, [&](strata_engine_args* a) { return strata_open(a, &opened); });
  run_body({}, [](int, strata_engine* e) {
    ASSERT_EQ(build_model(e, vectors({9})), "");
    uint32_t made = 0;
    uint64_t count = 0;
    expect_first_size<strata_ranks>(40, [&](strata_ranks* a) { return strata_get_ranks(e, a); });
    expect_first_size<strata_group_args>(48, [&](strata_group_args* a) { return strata_add_group(e, a, &made); });
    expect_first_size<strata_param_args>(48, [&](strata_param_args* a) { return strata_add_param(e, 0, a, &made); });
    expect_first_size<strata_tensor>(40, [&](strata_tensor* a) { return strata_write_param(e, 0, a, 0); });
    expect_first_size<strata_tensor>(40, [&](strata_tensor* a) { return strata_read_param(e, 0, "weight", a); });
    expect_first_size<strata_tensor>(40, [&](strata_tensor* a) { return strata_param_view(e, 0, a); });
    expect_first_size<strata_tensor>(40, [&](strata_tensor* a) { return strata_unit_views(e, 0, a, 1, &count); });
    expect_first_size<strata_tensor>(40, [&](strata_tensor* a) { return strata_grad(e, 0, a, nullptr); });
    expect_first_size<strata_step_args>(32, [&](strata_step_args* a) { return strata_step(e, a); });
    expect_first_size<strata_step_info>(56, [&](strata_step_info* a) { return strata_get_step_info(e, a); });
    expect_first_size<strata_counters>(
        136, [&](strata_counters* a) { return strata_get_counters(e, STRATA_COUNT_TOTAL, a); });
    expect_first_size<strata_device_info>(40, [&](strata_device_info* a) { return strata_get_device(e, a); });
  });
}

// A host of before gradient_memory: what lies behind its struct is nobody's.
TEST(FirstSizes, AnEngineOpensWithTheFirstArgs) {
  const std::string manifest = manifest_of({});
  strata_engine_args args;
  STRATA_INIT(&args);
  args.struct_size = offsetof(strata_engine_args, gradient_memory);
  args.gradient_memory = reinterpret_cast<const strata_lender*>(1);
  args.manifest_text = manifest.c_str();
  args.plugin_dir = STRATA_BUILD_PLUGIN_DIR;
  args.log = [](void*, strata_log_level, const char*, const char*) {};
  strata_engine* e = nullptr;
  ASSERT_EQ(strata_open(&args, &e), STRATA_OK) << last();
  EXPECT_EQ(build_model(e, odd_model()), "");
  strata_close(e);
}

// ---- counts and dimensions -----------------------------------------------------------------------------------------

constexpr uint64_t kAbsurd[] = {(1ull << 24) + 1, 1ull << 32, 1ull << 60, UINT64_MAX};

TEST(Counts, OfGradientsAreCheckedBeforeThereIsRoomForThem) {
  run_body({}, [](int, strata_engine* e) {
    const Model m = vectors({40});
    ASSERT_EQ(build_model(e, m), "");
    std::vector<float> data(40, 1);
    // The second item was never set.
    strata_tensor tensors[2] = {tensor_of(data, m.params[0].shape), {}};
    const strata_param params[2] = {0, 0};
    EXPECT_EQ(strata_grads(e, params, tensors, 1u << 24, nullptr), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("item 1: struct_size 0")) << last();
    for (uint64_t count : kAbsurd) {
      EXPECT_EQ(strata_grads(e, params, tensors, count, nullptr), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says("count is " + std::to_string(count))) << last();
    }
    EXPECT_EQ(strata_grads(e, params, tensors, 1, nullptr), STRATA_OK) << last();
  });
}

TEST(Counts, OfOverridesAreChecked) {
  const std::string manifest = manifest_of({});
  const char* const override_text = "zero_optimization.stage=1";
  strata_engine_args args;
  STRATA_INIT(&args);
  args.manifest_text = manifest.c_str();
  args.overrides = &override_text;
  for (uint64_t count : kAbsurd) {
    args.override_count = count;
    strata_engine* e = nullptr;
    EXPECT_EQ(strata_open(&args, &e), STRATA_INVALID_ARGUMENT);
    EXPECT_TRUE(says("override_count is " + std::to_string(count))) << last();
  }
  args.override_count = 1;
  args.overrides = nullptr;
  strata_engine* e = nullptr;
  EXPECT_EQ(strata_open(&args, &e), STRATA_INVALID_ARGUMENT);
  EXPECT_TRUE(says("override 0 of 1 is NULL")) << last();
}

TEST(Counts, OfGroupsMustBeTheirNumber) {
  run_body({}, [](int, strata_engine* e) {
    const Model m = vectors({40});
    ASSERT_EQ(build_model(e, m), "");
    give_gradient(e, m, 0, 1);
    ASSERT_EQ(strata_end_backward(e), STRATA_OK) << last();
    const double rates[2] = {0.1, 0.1};
    strata_step_args args;
    STRATA_INIT(&args);
    args.lr = 0.1;
    args.group_lr = rates;
    for (uint64_t count : kAbsurd) {
      args.group_count = count;
      EXPECT_EQ(strata_step(e, &args), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says(std::to_string(count)) && says("there are 2 param groups")) << last();
    }
    args.group_count = 2;
    EXPECT_EQ(strata_step(e, &args), STRATA_OK) << last();
  });
}

// A capacity is only how much there may be.
TEST(Counts, AnyCapacityIsEnoughRoom) {
  run_body({}, [](int, strata_engine* e) {
    const Model m = vectors({40});
    ASSERT_EQ(build_model(e, m), "");
    ASSERT_EQ(strata_fetch(e, 0, nullptr), STRATA_OK) << last();
    for (uint64_t capacity : kAbsurd) {
      uint64_t count = 0;
      strata_tensor view;
      STRATA_INIT(&view);
      EXPECT_EQ(strata_unit_views(e, 0, &view, capacity, &count), STRATA_OK) << last();
      EXPECT_EQ(count, 1u);
      std::vector<strata_plan_item> items(64);
      EXPECT_EQ(strata_get_plan(e, items.data(), capacity, &count), STRATA_OK) << last();
      EXPECT_LT(count, items.size());
    }
    EXPECT_EQ(strata_release(e, 0, nullptr), STRATA_OK) << last();
  });
}

TEST(Dimensions, MoreThanACheckpointHoldsAreRefusedUnread) {
  run_body({}, [](int, strata_engine* e) {
    strata_unit unit;
    strata_param param;
    const int64_t shape[] = {4};
    for (int32_t ndim : {33, INT32_MAX, -1, INT32_MIN}) {
      strata_param_args args;
      STRATA_INIT(&args);
      args.name = "w";
      args.shape = shape;
      args.ndim = ndim;
      args.dtype = STRATA_F32;
      (void)strata_add_unit(e, "u", &unit);
      EXPECT_EQ(strata_add_param(e, 0, &args, &param), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says("\"w\"") && says(std::to_string(ndim) + " dimensions, at most 32")) << last();
    }
  });
  run_body({}, [](int, strata_engine* e) {
    const Model m = vectors({40});
    ASSERT_EQ(build_model(e, m), "");
    std::vector<float> data(40, 1);
    for (int32_t ndim : {33, INT32_MAX, -1, INT32_MIN}) {
      strata_tensor t = tensor_of(data, m.params[0].shape);
      t.ndim = ndim;
      const std::string dimensions = "[" + std::to_string(ndim) + " dimensions]";
      EXPECT_EQ(strata_grad(e, 0, &t, nullptr), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says(dimensions)) << last();
      EXPECT_EQ(strata_write_param(e, 0, &t, 0), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says(dimensions)) << last();
      EXPECT_EQ(strata_read_param(e, 0, "weight", &t), STRATA_INVALID_ARGUMENT);
      EXPECT_TRUE(says(dimensions)) << last();
    }
  });
}

// ---- calls from inside gradient_memory -----------------------------------------------------------------------------

// Lends what the GPU's own lender lends, and calls the engine every time.
struct CallingLender {
  const strata_lender* real = nullptr;
  strata_engine* engine = nullptr;
  int lent = 0, taken_back = 0;
  strata_lender table = {sizeof(strata_lender), STRATA_ABI_MINOR, this, lend, take_back};

  void call(const std::string& from) const {
    strata_step_info info;
    STRATA_INIT(&info);
    EXPECT_EQ(strata_get_step_info(engine, &info), STRATA_FAILED_PRECONDITION);
    EXPECT_TRUE(says("inside " + from + " of gradient_memory")) << last();
    EXPECT_EQ(strata_fetch(engine, 0, nullptr), STRATA_FAILED_PRECONDITION);
    strata_engine_args args;
    STRATA_INIT(&args);
    strata_engine* other = nullptr;
    EXPECT_EQ(strata_open(&args, &other), STRATA_FAILED_PRECONDITION);
    strata_close(engine);  // nothing happens: the engine is used afterwards
    EXPECT_TRUE(says("inside " + from)) << last();
  }
  static void* STRATA_CALL lend(void* self, uint64_t bytes, const strata_stream* stream) {
    auto* lender = static_cast<CallingLender*>(self);
    ++lender->lent;
    lender->call("lend");
    return lender->real->lend(lender->real->ctx, bytes, stream);
  }
  static void STRATA_CALL take_back(void* self, void* memory, const strata_stream* stream) {
    auto* lender = static_cast<CallingLender*>(self);
    ++lender->taken_back;
    lender->call("take_back");
    lender->real->take_back(lender->real->ctx, memory, stream);
  }
};

TEST(Callbacks, OfGradientMemoryCannotCallTheEngine) {
  alarm(60);  // a call that is let through waits for its own caller
  Trial t;
  t.stage = 2;
  t.gpu = "gpu_sim";
  t.model = vectors({4096, 4096}, STRATA_BF16);
  Gpu gpu(t.gpu, "calling-lender", 0, 1, 0);
  CallingLender lender;
  lender.real = gpu.lender();
  std::string error;
  strata_engine* e = open_rank(t, "calling-lender", 0, &error, &lender.table);
  ASSERT_NE(e, nullptr) << error;
  lender.engine = e;
  ASSERT_EQ(build_model(e, t.model), "");
  for (int step = 1; step <= 2; ++step) {
    ASSERT_EQ(micro_batch(e, t.model, step, 0, 0, UINT32_MAX, &gpu), "");
    ASSERT_EQ(strata_step(e, nullptr), STRATA_OK) << last();
  }
  ASSERT_EQ(strata_wait(e), STRATA_OK) << last();
  strata_close(e);
  EXPECT_GT(lender.lent, 0);
  EXPECT_EQ(lender.taken_back, lender.lent);
  alarm(0);
}

}  // namespace
}  // namespace strata::test
