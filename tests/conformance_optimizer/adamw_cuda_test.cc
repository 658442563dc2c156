// adamw_cuda_test.cc - optim_adamw_cuda against the scalar path of optim_adamw, bit by bit: every kind of slice,
// millions of ordinary and of arbitrary bit patterns, several steps; cuts, spans, streams, and memory of every sort.
// Without a GPU the tests are skipped, by the plugin's own word.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "strata/iface/device.h"
#include "tests/conformance_optimizer/adamw_fixture.h"

namespace strata::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

struct Setting {
  strata_optim_group group;
  uint64_t step;
  float scale;
};
const Setting settings[] = {
    {group(1e-3, 0.9, 0.999, 1e-8, 0.1), 1, 1.0f},
    {group(3e-4, 0.9, 0.95, 1e-8, 0.01), 1000, 0.37f},
    {group(1e-2, 0.3, 0.5, 0.0, 0.0), 7, 1e-3f},   // betas at most 1/2: the other branch of `toward`
    {group(1e-1, 0.0, 0.0, 1e-3, 0.5), 2, 64.0f},  // no memory at all
};

// The device, and memory of it that lives as long.
class Gpu {
 public:
  Gpu() {
    const strata_open_args args = rank.args();
    code = api->open(&args, &self);
    if (code != STRATA_OK) why = take_failure(code).text();
  }
  ~Gpu() {
    if (self) api->close(self);
  }
  Gpu(const Gpu&) = delete;

  void* put(const void* here, uint64_t bytes, bool pinned = false) {
    void* there = nullptr;
    const uint64_t room = bytes + 64;
    EXPECT_EQ(pinned ? api->alloc_pinned(self, room, &there) : api->alloc(self, room, &there), STRATA_OK);
    move(there, here, bytes);
    return there;
  }
  void move(void* to, const void* from, uint64_t bytes) {
    EXPECT_EQ(api->copy(self, to, from, bytes, nullptr), STRATA_OK);
  }

  const strata_device_api* api = load<strata_device_api>("device_cuda", STRATA_DEVICE);
  Rank rank;
  strata_device* self = nullptr;
  strata_status code = STRATA_OK;
  std::string why;
};

// The arrays of a Data on the device, or in page-locked memory; `shift` elements behind where they would be aligned.
class There {
 public:
  There(Gpu& gpu, Data& data, bool pinned = false, uint64_t shift = 0) : gpu_(gpu), data_(data) {
    const auto put = [&](Array& a) {
      const uint64_t skip = shift * (a.bytes() / std::max<uint64_t>(data.count, 1));
      char* base = static_cast<char*>(gpu.put(a.data(), a.bytes(), pinned));  // with room behind
      gpu.move(base + skip, a.data(), a.bytes());
      bases_.push_back(base);
      return base + skip;
    };
    grad = put(data.grad);
    weight = put(data.weight);
    for (Array& a : data.state) state.push_back(put(a));
    pinned_ = pinned;
  }
  ~There() {
    for (void* base : bases_) pinned_ ? gpu_.api->free_pinned(gpu_.self, base) : gpu_.api->free(gpu_.self, base);
  }
  There(const There&) = delete;

  void point(strata_optim_args* args) {
    args->grad = grad;
    args->weight = weight;
    args->state = state.data();
  }
  // Weight and state, into the arrays they came from, when the stream is done.
  void fetch(const strata_stream& stream) {
    EXPECT_EQ(gpu_.api->stream_wait_host(gpu_.self, &stream), STRATA_OK);
    gpu_.move(data_.weight.data(), weight, data_.weight.bytes());
    for (size_t k = 0; k < state.size(); ++k) gpu_.move(data_.state[k].data(), state[k], data_.state[k].bytes());
  }

  void *grad, *weight;
  std::vector<void*> state;

 private:
  Gpu& gpu_;
  Data& data_;
  std::vector<void*> bases_;
  bool pinned_;
};

Options cuda_options(const Kind& kind, bool decoupled = true) {
  return Options().set("layout", kind.split ? "split" : "whole").set("decoupled", decoupled);
}

class AdamwCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (gpu.code == STRATA_FAILED_PRECONDITION) GTEST_SKIP() << gpu.why;
    ASSERT_EQ(gpu.code, STRATA_OK) << gpu.why;
    ASSERT_EQ(gpu.api->stream_create(gpu.self, 0, &stream), STRATA_OK);
    stream_made = true;
  }
  void TearDown() override {
    if (stream_made) gpu.api->stream_destroy(gpu.self, &stream);
  }
  void expect_ok(strata_status code) {
    const Status status = take_failure(code);
    EXPECT_TRUE(status.ok()) << status.text();
  }
  // Enqueues one step of `there`.
  void step(Adamw& adamw, Data& data, There& there, const std::vector<float>& scalars, float scale,
            const std::vector<strata_optim_span>& spans = {}) {
    strata_optim_args a = adamw.args(data, scalars, spans);
    there.point(&a);
    a.grad_scale = &scale;
    a.stream = &stream;
    expect_ok(adamw.api->step(adamw.self, &a, nullptr));
  }

  Gpu gpu;
  strata_stream stream{};
  bool stream_made = false;
};

// 15 kinds x 2 decays x 2 fills x 2,000,003 elements x 4 steps, each of other settings.
TEST_F(AdamwCuda, EveryKindHasTheBitsOfTheScalarPath) {
  constexpr uint64_t kCount = 2'000'003;
  for (const Kind& kind : all_kinds()) {
    for (int fill = 0; fill < 2; ++fill) {
      Data start(kind, kCount);
      fill == 0 ? fill_ordinary(start, 50) : fill_any_bits(start, 60);
      for (const bool decoupled : {true, false}) {
        Data want(kind, kCount), got(kind, kCount);
        want.assign(start);
        got.assign(start);
        Adamw reference(options_for(kind, "scalar", decoupled));
        Adamw cuda("optim_adamw_cuda", cuda_options(kind, decoupled));
        There there(gpu, got);
        for (const Setting& s : settings) {
          const auto scalars = reference.scalars(s.group, s.step);
          ASSERT_EQ(bits(cuda.scalars(s.group, s.step)), bits(scalars));
          reference.step(want, scalars, {}, s.scale);
          step(cuda, got, there, scalars, s.scale);
        }
        there.fetch(stream);
        ASSERT_TRUE(got.bytes() == want.bytes()) << name(kind) << ", fill " << fill << ", decoupled " << decoupled;
      }
    }
  }
}

// Arrays that are not aligned, page-locked arrays, and a caller without a CUDA stream.
TEST_F(AdamwCuda, WhereTheArraysLieNeverShows) {
  constexpr uint64_t kCount = 30'011;
  for (const Kind& kind : all_kinds()) {
    Data start(kind, kCount), want(kind, kCount);
    fill_any_bits(start, 7);
    want.assign(start);
    Adamw reference(options_for(kind, "scalar")), cuda("optim_adamw_cuda", cuda_options(kind));
    const auto scalars = reference.scalars(settings[0].group, 3);
    reference.step(want, scalars, {}, 0.5f);
    for (const bool pinned : {false, true}) {
      for (const uint64_t shift : {0, 1, 3}) {
        for (const bool own : {false, true}) {
          Data got(kind, kCount);
          got.assign(start);
          There there(gpu, got, pinned, shift);
          strata_optim_args a = cuda.args(got, scalars);
          there.point(&a);
          const float scale = 0.5f;
          a.grad_scale = &scale;
          a.stream = own ? &stream : nullptr;
          expect_ok(cuda.api->step(cuda.self, &a, nullptr));
          there.fetch(stream);
          ASSERT_TRUE(got.bytes() == want.bytes()) << name(kind) << ", pinned " << pinned << ", shift " << shift;
        }
      }
    }
  }
}

// Few spans travel with the launch, many by way of device memory; some are empty, all have odd borders.
TEST_F(AdamwCuda, SpansWithTheirOwnScalars) {
  constexpr uint64_t kCount = 400'000;
  for (const uint64_t spans : {3, 41, 700}) {
    for (const Kind& kind : all_kinds()) {
      Data want(kind, kCount), got(kind, kCount);
      fill_ordinary(want, 17);
      got.assign(want);
      Adamw reference(options_for(kind, "scalar")), cuda("optim_adamw_cuda", cuda_options(kind));
      std::vector<float> scalars;
      for (const Setting& s : settings) {
        const auto set = reference.scalars(s.group, s.step);
        scalars.insert(scalars.end(), set.begin(), set.end());
      }
      std::vector<strata_optim_span> list;
      for (uint64_t k = 0; k < spans; ++k) {
        const uint64_t begin = k * (kCount / spans) + k % 7, room = kCount / spans - 7;
        list.push_back({begin, k % 5 == 2 ? 0 : room - k % 11, static_cast<uint32_t>(k % 4), 0});
      }
      reference.step(want, scalars, list, 0.25f);
      There there(gpu, got);
      step(cuda, got, there, scalars, 0.25f, list);
      there.fetch(stream);
      ASSERT_TRUE(got.bytes() == want.bytes()) << name(kind) << ", " << spans << " spans";
    }
  }
}

TEST_F(AdamwCuda, TheGradientMayBeTheWeightsMemory) {
  for (const strata_dtype dtype : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
    const Kind kind = {dtype, dtype, false};
    Data want(kind, 100'003), got(kind, 100'003);
    fill_ordinary(want, 3);
    got.assign(want);
    Adamw reference(options_for(kind, "scalar")), cuda("optim_adamw_cuda", cuda_options(kind));
    const auto scalars = reference.scalars(settings[0].group, 2);
    reference.step(want, scalars);
    There there(gpu, got);
    strata_optim_args a = cuda.args(got, scalars);
    there.point(&a);
    a.weight = there.grad;
    a.stream = &stream;
    expect_ok(cuda.api->step(cuda.self, &a, nullptr));
    there.weight = there.grad;
    there.fetch(stream);
    ASSERT_TRUE(got.bytes() == want.bytes()) << name(kind);
  }
}

// The factor and the decision are read when the update runs: both come from work enqueued before it.
TEST_F(AdamwCuda, ScaleAndApplyMayBeMadeOnTheDevice) {
  const Kind kind = {STRATA_BF16, STRATA_BF16, false};
  Data start(kind, 50'000), want(kind, 50'000);
  fill_ordinary(start, 4);
  want.assign(start);
  Adamw reference(options_for(kind, "scalar")), cuda("optim_adamw_cuda", cuda_options(kind));
  const auto scalars = reference.scalars(settings[1].group, 2);
  reference.step(want, scalars, {}, 0.125f);
  for (const uint32_t apply : {0u, 1u}) {
    for (const bool on_device : {true, false}) {
      Data got(kind, start.count);
      got.assign(start);
      There there(gpu, got);
      const float zero = 0, scale = 0.125f;
      const uint32_t other = 1 - apply;
      void* at = gpu.put(&zero, 4, !on_device);
      void* flag = gpu.put(&other, 4, !on_device);
      char* source = static_cast<char*>(gpu.put(&scale, 4));
      gpu.move(source + 4, &apply, 4);
      strata_optim_args a = cuda.args(got, scalars);
      there.point(&a);
      a.stream = &stream;
      a.grad_scale = static_cast<float*>(at);
      a.apply = static_cast<uint32_t*>(flag);
      ASSERT_EQ(gpu.api->copy(gpu.self, at, source, 4, &stream), STRATA_OK);
      ASSERT_EQ(gpu.api->copy(gpu.self, flag, source + 4, 4, &stream), STRATA_OK);
      expect_ok(cuda.api->step(cuda.self, &a, nullptr));
      there.fetch(stream);
      EXPECT_TRUE(got.bytes() == (apply ? want : start).bytes()) << apply << on_device;
    }
  }
  // In ordinary memory they are read at the call.
  Data got(kind, start.count);
  got.assign(start);
  There there(gpu, got);
  const uint32_t skip = 0;
  strata_optim_args a = cuda.args(got, scalars);
  there.point(&a);
  a.apply = &skip;
  a.stream = &stream;
  expect_ok(cuda.api->step(cuda.self, &a, nullptr));
  there.fetch(stream);
  EXPECT_TRUE(got.bytes() == start.bytes());
}

TEST_F(AdamwCuda, TheDoneEventIsSetBehindTheUpdate) {
  const Kind kind = {STRATA_F32, STRATA_F32, true};
  Data want(kind, 3'000'000), got(kind, 3'000'000);
  fill_ordinary(want, 4);
  got.assign(want);
  Adamw reference(options_for(kind, "scalar")), cuda("optim_adamw_cuda", cuda_options(kind));
  There there(gpu, got);
  const auto* host = cuda.rank.host.c();
  const auto* sync = static_cast<const strata_sync_api*>(host->get_interface(host->ctx, STRATA_HOST_SYNC));
  for (uint64_t round = 1; round <= 4; ++round) {
    const auto scalars = reference.scalars(settings[0].group, round);
    reference.step(want, scalars);
    strata_optim_args a = cuda.args(got, scalars);
    there.point(&a);
    a.stream = round == 4 ? nullptr : &stream;
    strata_event* done = sync->create(host->ctx);
    expect_ok(cuda.api->step(cuda.self, &a, done));
    ASSERT_EQ(sync->wait(done, 60'000'000'000), STRATA_OK);
    sync->release(done);
  }
  there.fetch(stream);
  EXPECT_TRUE(got.bytes() == want.bytes());
}

// Canonical arrays in ordinary, page-locked and device memory, longer than one staged piece; and a part in the middle.
TEST_F(AdamwCuda, ExportAndImportAreTheHostsBits) {
  constexpr uint64_t kCount = 5'000'000, kBegin = 4'097, kPart = 4'500'001;
  for (const Kind& kind : all_kinds()) {
    if (kind.grad != STRATA_F32) continue;  // no gradient takes part
    Data want(kind, kCount), got(kind, kCount), values({STRATA_F32, STRATA_F32, true}, kCount);
    fill_ordinary(want, 8);
    fill_any_bits(values, 9);
    got.assign(want);
    Adamw reference(options_for(kind, "scalar")), cuda("optim_adamw_cuda", cuda_options(kind));
    There there(gpu, got);
    const std::vector<strata_optim_span> part = {{kBegin, kPart, 0, 0}};
    void* device = gpu.put(values.weight.data(), kCount * 4);
    for (uint32_t array = 0; array < 3; ++array) {
      for (const bool direct : {false, true}) {
        strata_optim_args a = reference.args(want, {}, part), b = cuda.args(got, {}, part);
        there.point(&b);
        b.stream = direct ? &stream : nullptr;
        const float* in = values.weight.as<float>() + (direct ? 1 : 0);
        expect_ok(reference.api->import_array(reference.self, &a, array, in));
        expect_ok(cuda.api->import_array(cuda.self, &b, array,
                                         direct ? static_cast<float*>(device) + 1 : const_cast<float*>(in)));
        there.fetch(stream);
        ASSERT_TRUE(got.bytes() == want.bytes()) << name(kind) << ", array " << array;
        std::vector<float> expected(kPart), out(kPart);
        expect_ok(reference.api->export_array(reference.self, &a, array, expected.data()));
        void* there_out = gpu.put(out.data(), kPart * 4);
        expect_ok(cuda.api->export_array(cuda.self, &b, array, direct ? static_cast<float*>(there_out) : out.data()));
        if (direct) gpu.move(out.data(), there_out, kPart * 4);
        gpu.api->free(gpu.self, there_out);
        ASSERT_EQ(std::memcmp(out.data(), expected.data(), kPart * 4), 0) << name(kind) << ", array " << array;
      }
    }
    gpu.api->free(gpu.self, device);
  }
}

TEST_F(AdamwCuda, OrdinaryHostMemoryIsRefusedByName) {
  const Kind kind = {STRATA_BF16, STRATA_BF16, false};
  Data data(kind, 100), before(kind, 100);
  fill_ordinary(data, 1);
  before.assign(data);
  Adamw cuda("optim_adamw_cuda", cuda_options(kind));
  const auto scalars = cuda.scalars(settings[0].group, 1);
  There there(gpu, data);
  const auto refused = [&](const strata_optim_args& a, const std::string& word) {
    EXPECT_EQ(cuda.api->step(cuda.self, &a, nullptr), STRATA_INVALID_ARGUMENT);
    EXPECT_THAT(take_failure(STRATA_INVALID_ARGUMENT).text(), HasSubstr(word));
  };
  strata_optim_args a = cuda.args(data, scalars);
  a.stream = &stream;
  there.point(&a);
  a.grad = data.grad.data();
  refused(a, "the gradient at ");
  there.point(&a);
  a.weight = data.weight.data();
  refused(a, "the weight at ");
  there.point(&a);
  a.weight = static_cast<char*>(there.weight) + 1;
  refused(a, "2-byte elements");
  there.point(&a);
  std::vector<void*> state = there.state;
  state[1] = data.state[1].data();
  a.state = state.data();
  refused(a, "exp_avg at ");
  there.fetch(stream);
  EXPECT_TRUE(data.bytes() == before.bytes());
}

TEST(AdamwCudaOpen, NamesWhatIsMissing) {
  const auto* api = load<strata_optimizer_api>("optim_adamw_cuda", STRATA_OPTIMIZER);
  Rank rank(1000, 1001);
  const auto refused = [&](Options options, strata_status want, const auto& text) {
    const strata_open_args args = rank.args(&options);
    strata_optim* self = nullptr;
    EXPECT_EQ(api->open(&args, &self), want);
    EXPECT_THAT(take_failure(want).text(), text);
  };
  refused(Options(), STRATA_FAILED_PRECONDITION,
          AnyOf(HasSubstr("no NVIDIA driver found"), HasSubstr("driver is too old"), HasSubstr("no GPU is visible"),
                HasSubstr("local rank = 1000, but ")));
  refused(Options().set("isa", "avx2"), STRATA_INVALID_ARGUMENT, HasSubstr("unknown option 'isa'"));
  refused(Options().set("device_id", "first"), STRATA_INVALID_ARGUMENT, HasSubstr("device_id must be an integer"));
}

}  // namespace
}  // namespace strata::test
