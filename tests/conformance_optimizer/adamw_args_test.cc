// adamw_args_test.cc - options, layout, events, and what is refused: every refusal names the thing and the numbers,
// and leaves the slice as it was.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "tests/conformance_optimizer/adamw_fixture.h"

namespace strata::test {
namespace {

using ::testing::HasSubstr;

const strata_optim_group plain = group(1e-3, 0.9, 0.999, 1e-8, 0.1);

Status open_with(Options options) {
  Rank rank;
  const auto* api = load<strata_optimizer_api>("optim_adamw", STRATA_OPTIMIZER);
  const strata_open_args a = rank.args(&options);
  strata_optim* self = nullptr;
  const Status status = take_failure(api->open(&a, &self));
  EXPECT_EQ(status.ok(), self != nullptr);
  if (self != nullptr) api->close(self);
  return status;
}

TEST(AdamwOptions, AreCheckedAndNamed) {
  EXPECT_TRUE(open_with(Options()).ok());
  const auto refused = [](Options options, const std::string& text) {
    const Status status = open_with(std::move(options));
    EXPECT_EQ(status.code(), STRATA_INVALID_ARGUMENT) << status.text();
    EXPECT_THAT(status.text(), HasSubstr(text));
  };
  refused(Options().set("layout", "halves"), "layout is \"halves\"");
  refused(Options().set("isa", "sse9"), "isa is \"sse9\"");
  refused(Options().set("layout", 1), "layout must be a string");
  refused(Options().set("decoupled", "yes"), "decoupled must be a bool");
  refused(Options().set("adam_w_mode", true), "unknown option 'adam_w_mode'");
}

TEST(AdamwOptions, AnInstructionSetTheCpuLacksIsAnError) {
  for (const std::string isa : {"scalar", "avx2", "avx512"}) {
    const bool has = std::find(isas().begin(), isas().end(), isa) != isas().end();
    const Status status = open_with(Options().set("isa", isa));
    EXPECT_EQ(status.code(), has ? STRATA_OK : STRATA_FAILED_PRECONDITION) << isa;
    EXPECT_THAT(status.text(), HasSubstr(has ? "" : isa));
  }
}

TEST(AdamwOptions, TheChosenPathIsLoggedOncePerInstance) {
  for (const std::string& isa : isas()) {
    Adamw adamw(Options().set("isa", isa).set("decoupled", false));
    Data data({STRATA_F32, STRATA_F32, false}, 10);
    for (uint64_t step = 1; step < 4; ++step) adamw.step(data, adamw.scalars(plain, step));
    ASSERT_EQ(adamw.rank.log_lines.size(), 1u);
    EXPECT_THAT(adamw.rank.log_lines[0], HasSubstr("with " + isa + " "));
    EXPECT_THAT(adamw.rank.log_lines[0], HasSubstr("Adam with L2"));
  }
  Adamw automatic;
  EXPECT_THAT(automatic.rank.log_lines.at(0), HasSubstr("with " + isas().back() + " "));
}

TEST(AdamwLayout, DeclaresWhatIsKept) {
  struct Want {
    strata_dtype weight;
    bool split;
    std::vector<std::string> arrays;
    uint32_t bytes;
  };
  for (const Want& want : {Want{STRATA_F32, false, {"master", "exp_avg", "exp_avg_sq"}, 12},
                           Want{STRATA_BF16, false, {"master", "exp_avg", "exp_avg_sq"}, 12},
                           Want{STRATA_F16, false, {"master", "exp_avg", "exp_avg_sq"}, 12},
                           Want{STRATA_F32, true, {"exp_avg", "exp_avg_sq"}, 8},
                           Want{STRATA_BF16, true, {"master_low", "exp_avg", "exp_avg_sq"}, 10}}) {
    Adamw adamw(options_for({STRATA_F32, want.weight, want.split}));
    strata_optim_layout layout{};
    layout.struct_size = sizeof(layout);
    ASSERT_EQ(adamw.api->layout(adamw.self, want.weight, &layout), STRATA_OK);
    std::vector<std::string> arrays;
    uint32_t bytes = 0;
    for (uint32_t k = 0; k < layout.array_count; ++k) {
      arrays.push_back(layout.arrays[k].name);
      bytes += layout.arrays[k].bytes_per_element;
      EXPECT_EQ(layout.arrays[k].dtype, arrays[k] == "master_low" ? STRATA_U16 : STRATA_F32);
    }
    EXPECT_EQ(arrays, want.arrays);
    EXPECT_EQ(bytes, want.bytes);
    EXPECT_EQ(layout.flags == STRATA_OPTIM_WEIGHT_IS_STATE, want.split);
    ASSERT_EQ(layout.canonical_count, 3u);
    EXPECT_STREQ(layout.canonical[0], "master");
    EXPECT_STREQ(layout.canonical[1], "exp_avg");
    EXPECT_STREQ(layout.canonical[2], "exp_avg_sq");
  }
}

TEST(AdamwLayout, SplitHasNoFp16) {
  Adamw adamw(Options().set("layout", "split"));
  strata_optim_layout layout{};
  layout.struct_size = sizeof(layout);
  const Status status = take_failure(adamw.api->layout(adamw.self, STRATA_F16, &layout));
  EXPECT_EQ(status.code(), STRATA_UNIMPLEMENTED);
  EXPECT_THAT(status.text(), HasSubstr("whole"));
  layout.struct_size = 16;
  EXPECT_EQ(adamw.api->layout(adamw.self, STRATA_F32, &layout), STRATA_INVALID_ARGUMENT);
  layout.struct_size = sizeof(layout);
  EXPECT_EQ(adamw.api->layout(adamw.self, STRATA_I64, &layout), STRATA_INVALID_ARGUMENT);
}

TEST(AdamwScalars, RangesAreCheckedByName) {
  Adamw adamw;
  const auto refused = [&](const strata_optim_group& g, uint64_t step, const std::string& text) {
    float out[STRATA_OPTIM_SCALARS];
    const Status status = take_failure(adamw.api->scalars(adamw.self, &g, step, out));
    EXPECT_EQ(status.code(), STRATA_INVALID_ARGUMENT);
    EXPECT_THAT(status.text(), HasSubstr(text));
  };
  refused(group(-1e-3, 0.9, 0.999, 1e-8, 0), 1, "lr is -0.001");
  refused(group(NAN, 0.9, 0.999, 1e-8, 0), 1, "lr is nan");
  refused(group(INFINITY, 0.9, 0.999, 1e-8, 0), 1, "lr is inf");
  refused(group(1e-3, 1.0, 0.999, 1e-8, 0), 1, "beta1 is 1");
  refused(group(1e-3, NAN, 0.999, 1e-8, 0), 1, "beta1 is nan");
  refused(group(1e-3, 0.9, -0.1, 1e-8, 0), 1, "beta2 is -0.1");
  refused(group(1e-3, 0.9, 1.5, 1e-8, 0), 1, "beta2 is 1.5");
  refused(group(1e-3, 0.9, 0.999, -1, 0), 1, "eps is -1");
  refused(group(1e-3, 0.9, 0.999, 1e-8, -0.1), 1, "weight_decay is -0.1");
  refused(group(1e-3, 0.9, 0.999, 1e-8, 0.1), 0, "step is 0");
  refused(group(1e40, 0.9, 0.999, 1e-8, 0), 1, "out of its range");
  refused(group(1e-3, 0.9, 0.999, 1e-60, 0), 1, "out of its range");  // would be no eps at all
  EXPECT_EQ(adamw.scalars(group(0, 0, 0, 0, 0), 1).size(), STRATA_OPTIM_SCALARS);
  EXPECT_TRUE(std::isfinite(adamw.scalars(group(1e-3, 0.9, 0.999, 1e-8, 0.1), UINT64_MAX)[2]));
}

TEST(AdamwStep, RefusesWhatItCannotDoAndChangesNothing) {
  const Kind kind = {STRATA_BF16, STRATA_BF16, false};
  Adamw adamw(options_for(kind)), split(options_for({STRATA_BF16, STRATA_BF16, true}));
  Data data(kind, 100);
  fill_ordinary(data, 1);
  const auto before = data.bytes();
  const auto scalars = adamw.scalars(plain, 1);
  using Change = std::function<void(strata_optim_args&)>;
  const auto refused = [&](Adamw& on, strata_status code, const std::string& text, const Change& change) {
    const std::vector<strata_optim_span> spans = {{0, 50, 0, 0}, {50, 50, 0, 0}};
    strata_optim_args a = adamw.args(data, scalars, spans);
    change(a);
    Event done = Event::create();
    const Status status = take_failure(on.api->step(on.self, &a, done.get()));
    EXPECT_EQ(status.code(), code) << status.text();
    EXPECT_THAT(status.text(), HasSubstr(text));
    EXPECT_FALSE(done->is_set());
    EXPECT_EQ(data.bytes(), before);
  };
  const strata_optim_span beyond[] = {{0, 1, 0, 0}, {UINT64_MAX - 3, 10, 0, 0}},
                          no_set[] = {{0, 1, 0, 0}, {7, 1, 1, 0}};
  const strata_stream cuda = {sizeof(cuda), STRATA_ABI_MINOR, STRATA_CUDA, 0, nullptr};
  void* const no_state[3] = {data.pointers[0], nullptr, data.pointers[2]};
  const auto bad = STRATA_INVALID_ARGUMENT;
  refused(adamw, bad, "grad is NULL", [](auto& a) { a.grad = nullptr; });
  refused(adamw, bad, "weight is NULL", [](auto& a) { a.weight = nullptr; });
  refused(adamw, bad, "state is NULL", [](auto& a) { a.state = nullptr; });
  refused(adamw, bad, "state array 1 of 3", [&](auto& a) { a.state = no_state; });
  refused(adamw, bad, "scalars is NULL", [](auto& a) { a.scalars = nullptr; });
  refused(adamw, bad, "grad_scale is NULL", [](auto& a) { a.grad_scale = nullptr; });
  refused(adamw, bad, "dtype 6", [](auto& a) { a.grad_dtype = STRATA_I64; });
  refused(adamw, bad, "dtype 4", [](auto& a) { a.weight_dtype = STRATA_U8; });
  refused(adamw, bad, "span 1 {offset 18446744073709551612", [&](auto& a) { a.spans = beyond; });
  refused(adamw, bad, "there are 1", [&](auto& a) { a.spans = no_set; });
  refused(adamw, bad, "stride is 8", [](auto& a) { a.span_stride = 8; });
  refused(adamw, bad, "struct_size", [](auto& a) { a.struct_size = 40; });
  refused(adamw, STRATA_UNIMPLEMENTED, "device type 2", [&](auto& a) { a.stream = &cuda; });
  refused(adamw, bad, "overlap", [](auto& a) { a.grad = static_cast<char*>(a.weight) + 2; });
  refused(adamw, bad, "overlap", [](auto& a) { a.grad = a.weight, a.grad_dtype = STRATA_F32; });
  refused(split, bad, "split", [](auto& a) { a.grad = a.weight; });
  refused(split, STRATA_UNIMPLEMENTED, "F16", [](auto& a) { a.weight_dtype = STRATA_F16; });
}

TEST(AdamwStep, SetsItsEventOnce) {
  const Kind kind = {STRATA_F32, STRATA_BF16, true};
  Adamw adamw(options_for(kind));
  Data data(kind, 1'000);
  fill_ordinary(data, 1);
  const auto scalars = adamw.scalars(plain, 1);
  const strata_optim_args a = adamw.args(data, scalars);
  Event done = Event::create();
  ASSERT_EQ(adamw.api->step(adamw.self, &a, done.get()), STRATA_OK);
  EXPECT_TRUE(done->wait(std::chrono::seconds(5)).ok());
  EXPECT_FALSE(done->set(Ok()));
}

TEST(AdamwStep, NothingToDoIsOrdinary) {
  Adamw adamw;
  strata_optim_args a{};
  a.struct_size = sizeof(a);
  a.grad_dtype = a.weight_dtype = STRATA_BF16;
  EXPECT_EQ(adamw.api->step(adamw.self, &a, nullptr), STRATA_OK);
  const strata_optim_span empty = {0, 0, 0, 0};
  a.spans = &empty;
  a.span_count = 1;
  a.span_stride = sizeof(empty);
  a.scalar_sets = 1;
  EXPECT_EQ(adamw.api->step(adamw.self, &a, nullptr), STRATA_OK);
  EXPECT_EQ(adamw.api->export_array(adamw.self, &a, 0, nullptr), STRATA_OK);
}

TEST(AdamwCanonical, RefusesWhatIsNotThere) {
  const Kind kind = {STRATA_F32, STRATA_BF16, false};
  Adamw adamw(options_for(kind));
  Data data(kind, 10);
  std::vector<float> values(10);
  strata_optim_args a = adamw.args(data, {});
  EXPECT_EQ(adamw.api->export_array(adamw.self, &a, 3, values.data()), STRATA_OUT_OF_RANGE);
  EXPECT_EQ(adamw.api->export_array(adamw.self, &a, 0, nullptr), STRATA_INVALID_ARGUMENT);
  a.weight = nullptr;
  EXPECT_EQ(adamw.api->export_array(adamw.self, &a, 0, values.data()), STRATA_OK)
      << "the whole master is not the weight";
  EXPECT_EQ(adamw.api->import_array(adamw.self, &a, 0, values.data()), STRATA_INVALID_ARGUMENT);
  EXPECT_EQ(adamw.api->import_array(adamw.self, &a, 1, values.data()), STRATA_OK);
  a.span_count = 0;
  EXPECT_EQ(adamw.api->export_array(adamw.self, &a, 0, values.data()), STRATA_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace strata::test
