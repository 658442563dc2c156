// adamw_bits_test.cc - the same bits whatever the instruction set, the layout, the cut into calls and spans, the
// number of threads, and the floating-point mode of the host.
#include <gtest/gtest.h>
#include <immintrin.h>

#include <thread>

#include "tests/conformance_optimizer/adamw_fixture.h"

namespace strata::test {
namespace {

struct Setting {
  strata_optim_group group;
  uint64_t step;
  bool decoupled;
  float scale;
};
const Setting settings[] = {
    {group(1e-3, 0.9, 0.999, 1e-8, 0.1), 1, true, 1.0f},
    {group(3e-4, 0.9, 0.95, 1e-8, 0.01), 1000, false, 0.37f},
    {group(1e-2, 0.3, 0.5, 0.0, 0.0), 7, true, 1e-3f},    // betas at most 1/2: the other branch of `toward`
    {group(1e-1, 0.0, 0.0, 1e-3, 0.5), 2, false, 64.0f},  // no memory at all
};

// The documented arithmetic once more, one plain float operation per line, for a slice of fp32 arrays.
float quiet(float x) { return x != x ? from_bits(0x7FC00000) : x; }
float moved(float x, float y, float k) {
  const float difference = y - x;
  const float step = k * difference;
  return quiet((bits(k) >> 31 ? y : x) + step);
}
void expected_update(float g, float scale, const std::vector<float>& s, float& p, float& m, float& v) {
  const float scaled = g * scale;
  const float pull = s[5] * p;
  const float gradient = scaled + pull;
  m = moved(m, gradient, s[0]);
  const float square = gradient * gradient;
  v = moved(v, square, s[1]);
  const float root = std::sqrt(v);
  const float denominator = root + s[3];
  const float direction = m / denominator;
  const float step = s[2] * direction;
  const float decay = s[4] * p;
  const float change = step + decay;
  p = quiet(p - change);
}

TEST(AdamwBits, ScalarPathIsTheDocumentedArithmetic) {
  for (const Setting& setting : settings) {
    const Kind kind = {STRATA_F32, STRATA_F32, true};
    Data data(kind, 200'003), before(kind, 200'003);
    fill_any_bits(data, 11);
    before.assign(data);
    Adamw adamw(options_for(kind, "scalar", setting.decoupled));
    const auto scalars = adamw.scalars(setting.group, setting.step);
    adamw.step(data, scalars, {}, setting.scale);
    for (uint64_t i = 0; i < data.count; ++i) {
      float p = before.weight.as<float>()[i], m = before.state[0].as<float>()[i], v = before.state[1].as<float>()[i];
      expected_update(before.grad.as<float>()[i], setting.scale, scalars, p, m, v);
      ASSERT_EQ(bits(data.weight.as<float>()[i]), bits(p)) << i;
      ASSERT_EQ(bits(data.state[0].as<float>()[i]), bits(m)) << i;
      ASSERT_EQ(bits(data.state[1].as<float>()[i]), bits(v)) << i;
    }
  }
}

// 4 settings x 15 kinds x 2 fills x 70,001 elements, each array also one element off alignment.
TEST(AdamwBits, EveryInstructionSetGivesTheScalarBits) {
  for (const Setting& setting : settings) {
    for (const Kind& kind : all_kinds()) {
      for (int fill = 0; fill < 2; ++fill) {
        Data start(kind, 70'001), reference(kind, 70'001);
        fill == 0 ? fill_ordinary(start, 5) : fill_any_bits(start, 6);
        for (const std::string& isa : isas()) {
          for (const uint64_t shift : {0, 1}) {
            Adamw adamw(options_for(kind, isa, setting.decoupled));
            Data data(kind, start.count, shift);
            data.assign(start);
            for (int repeat = 0; repeat < 2; ++repeat) {
              adamw.step(data, adamw.scalars(setting.group, setting.step + repeat), {}, setting.scale);
            }
            if (isa == "scalar" && shift == 0) reference.assign(data);
            ASSERT_EQ(data.bytes(), reference.bytes()) << name(kind) << ", " << isa << ", shift " << shift;
          }
        }
      }
    }
  }
}

TEST(AdamwBits, NoNanButTheCanonicalOne) {
  for (const Kind& kind : all_kinds()) {
    for (const std::string& isa : isas()) {
      Adamw adamw(options_for(kind, isa));
      Data data(kind, 50'000);
      fill_any_bits(data, 3);
      adamw.step(data, adamw.scalars(settings[0].group, 1));
      uint64_t seen = 0;
      for (uint32_t array = 0; array < 3; ++array) {
        for (const float x : adamw.canonical(data, array)) {
          if (x == x) continue;
          ++seen;
          ASSERT_EQ(bits(x), 0x7FC00000u) << name(kind);
        }
      }
      EXPECT_GT(seen, 1000u);
      for (uint64_t i = 0; kind.weight != STRATA_F32 && i < data.count; ++i) {
        const uint16_t w = data.weight.as<uint16_t>()[i];
        const uint16_t infinity = kind.weight == STRATA_BF16 ? 0x7F80 : 0x7C00;
        if ((w & 0x7FFF) <= infinity) continue;
        ASSERT_EQ(w, kind.weight == STRATA_BF16 ? 0x7FC0 : 0x7E00) << name(kind);
      }
    }
  }
}

TEST(AdamwBits, SplitEqualsWholeOverManySteps) {
  for (const strata_dtype weight : {STRATA_F32, STRATA_BF16}) {
    const Kind whole_kind = {STRATA_BF16, weight, false}, split_kind = {STRATA_BF16, weight, true};
    Adamw whole(options_for(whole_kind)), split(options_for(split_kind));
    Data a(whole_kind, 5'003), b(split_kind, 5'003);
    fill_ordinary(a, 1);
    const auto master = whole.canonical(a, 0);
    for (uint32_t array = 0; array < 3; ++array) {
      const auto values = whole.canonical(a, array);
      split.import_canonical(b, array, values);
      whole.import_canonical(a, array, values);
    }
    for (uint64_t step = 1; step <= 300; ++step) {
      Data gradient(whole_kind, a.count);
      fill_ordinary(gradient, 100 + static_cast<uint32_t>(step));
      a.grad.assign(gradient.grad.copy());
      b.grad.assign(gradient.grad.copy());
      whole.step(a, whole.scalars(settings[0].group, step));
      split.step(b, split.scalars(settings[0].group, step));
      ASSERT_EQ(a.weight.copy(), b.weight.copy()) << "step " << step;
    }
    for (uint32_t array = 0; array < 3; ++array) {
      EXPECT_EQ(bits(whole.canonical(a, array)), bits(split.canonical(b, array))) << "array " << array;
    }
    EXPECT_NE(bits(whole.canonical(a, 0)), bits(master));
  }
}

// cases.md 13: sub-groups of any size, a step number set by a load, a beta changed in mid-run.
TEST(AdamwBits, SubGroupSizeNeverShows) {
  const Kind kind = {STRATA_F32, STRATA_BF16, false};
  std::vector<std::vector<std::vector<char>>> results;
  for (const uint64_t size : {30, 10, 7}) {
    Adamw adamw(options_for(kind));
    Data data(kind, 30);
    fill_ordinary(data, 9);
    const auto update = [&](uint64_t step, double beta2) {
      for (uint64_t begin = 0; begin < 30; begin += size) {
        const auto scalars = adamw.scalars(group(1e-2, 0.9, beta2, 1e-8, 0.1), step);
        adamw.step(data, scalars, {{begin, std::min<uint64_t>(size, 30 - begin), 0, 0}});
      }
    };
    for (uint64_t step = 1; step <= 5; ++step) update(step, 0.999);
    for (uint64_t step = 100; step <= 103; ++step) update(step, 0.999);
    for (uint64_t step = 104; step <= 106; ++step) update(step, 0.95);
    results.push_back(data.bytes());
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(AdamwBits, ScalarsDependOnTheirArgumentsOnly) {
  Adamw a, b;
  const auto g = group(1e-3, 0.9, 0.999, 1e-8, 0.1);
  for (uint64_t step = 1; step < 50; ++step) a.scalars(g, step);
  a.scalars(group(1, 0.5, 0.5, 1, 1), 3);
  EXPECT_EQ(bits(a.scalars(g, 100)), bits(b.scalars(g, 100)));
  EXPECT_EQ(bits(a.scalars(g, 1)), bits(b.scalars(g, 1)));
}

TEST(AdamwBits, SpansWithTheirOwnScalarsLeaveTheRestAlone) {
  for (const Kind& kind : all_kinds()) {
    Adamw adamw(options_for(kind));
    Data start(kind, 1'000), data(kind, 1'000);
    fill_ordinary(start, 2);
    data.assign(start);
    auto scalars = adamw.scalars(group(1e-2, 0.9, 0.99, 1e-8, 0.1), 3);
    const auto second = adamw.scalars(group(5e-2, 0.8, 0.9, 1e-6, 0.0), 9);
    scalars.insert(scalars.end(), second.begin(), second.end());
    // Spans inside longer structs, as a later minor version would have them.
    struct Longer {
      strata_optim_span span;
      uint64_t later[3];
    } spans[] = {{{3, 130, 1, 0}, {}}, {{133, 0, 0, 0}, {}}, {{200, 500, 0, 0}, {}}, {{999, 1, 1, 0}, {}}};
    strata_optim_args a = adamw.args(data, scalars);
    a.spans = &spans[0].span;
    a.span_count = 4;
    a.span_stride = sizeof(Longer);
    ASSERT_EQ(adamw.api->step(adamw.self, &a, nullptr), STRATA_OK) << take_failure(STRATA_INTERNAL).text();

    Data first_only(kind, 1'000), second_only(kind, 1'000);
    first_only.assign(start);
    second_only.assign(start);
    adamw.step(first_only, {scalars.begin(), scalars.begin() + STRATA_OPTIM_SCALARS});
    adamw.step(second_only, second);
    const auto got = data.bytes(), before = start.bytes(), one = first_only.bytes(), two = second_only.bytes();
    for (size_t array = 0; array < got.size(); ++array) {
      const uint64_t width = got[array].size() / 1'000;
      for (uint64_t i = 0; i < 1'000; ++i) {
        const bool in_second = (i >= 3 && i < 133) || i == 999, in_first = i >= 200 && i < 700;
        const char* want = (in_second ? two : in_first ? one : before)[array].data() + i * width;
        ASSERT_EQ(std::memcmp(got[array].data() + i * width, want, width), 0) << name(kind) << " element " << i;
      }
    }
  }
}

TEST(AdamwBits, ThreadsAndCutsNeverShow) {
  const Kind kind = {STRATA_BF16, STRATA_BF16, false};
  const uint64_t count = (1 << 20) + 77'777;  // large enough for streaming stores
  Data start(kind, count), reference(kind, count);
  fill_any_bits(start, 21);
  for (const unsigned threads : {1u, 2u, 5u}) {
    Host host([](strata_log_level, const std::string&, const std::string&) {}, STRATA_LOG_ERROR, threads);
    Adamw adamw(options_for(kind), host.c());
    const auto scalars = adamw.scalars(settings[0].group, 4);
    for (const uint64_t cut : {count, uint64_t{300'001}}) {
      for (const uint64_t shift : {0, 1}) {
        Data data(kind, count, shift);
        data.assign(start);
        for (uint64_t begin = 0; begin < count; begin += cut) {
          adamw.step(data, scalars, {{begin, std::min(cut, count - begin), 0, 0}});
        }
        if (threads == 1 && cut == count && shift == 0) reference.assign(data);
        ASSERT_TRUE(data.bytes() == reference.bytes()) << threads << " threads, cut " << cut << ", shift " << shift;
      }
    }
  }
}

TEST(AdamwBits, CallsOnDisjointSlicesMayRunTogether) {
  const Kind kind = {STRATA_BF16, STRATA_BF16, true};
  Adamw adamw(options_for(kind));
  Data together(kind, 400'000), alone(kind, 400'000);
  fill_ordinary(together, 8);
  alone.assign(together);
  const auto scalars = adamw.scalars(settings[0].group, 2);
  const float scale = 1;
  const auto half = [&](uint64_t offset) {
    const strata_optim_span span = {offset, 200'000, 0, 0};
    strata_optim_args a{};
    a.struct_size = sizeof(a);
    a.spans = &span;
    a.span_count = 1;
    a.span_stride = sizeof(span);
    a.scalars = scalars.data();
    a.scalar_sets = 1;
    a.grad = together.grad.data();
    a.grad_dtype = a.weight_dtype = STRATA_BF16;
    a.weight = together.weight.data();
    a.state = together.pointers.data();
    a.grad_scale = &scale;
    EXPECT_EQ(adamw.api->step(adamw.self, &a, nullptr), STRATA_OK);
  };
  std::thread other(half, 0);
  half(200'000);
  other.join();
  adamw.step(alone, scalars);
  EXPECT_EQ(together.bytes(), alone.bytes());
}

#if defined(__x86_64__)
// A host that flushes subnormals (PyTorch can) and rounds upward; its worker threads inherit both.
TEST(AdamwBits, FloatingPointModeOfTheHostNeverShows) {
  const unsigned normal = _mm_getcsr(), odd = normal | 0x8040 | 0x4000;
  for (const Kind& kind : all_kinds()) {
    for (const std::string& isa : isas()) {
      Data start(kind, 140'000), results[2] = {{kind, 140'000}, {kind, 140'000}};
      fill_any_bits(start, 33);
      std::vector<float> scalars[2];
      for (int mode = 0; mode < 2; ++mode) {
        _mm_setcsr(mode == 0 ? normal : odd);
        {
          Adamw adamw(options_for(kind, isa));
          scalars[mode] = adamw.scalars(group(1e-38, 0.9, 0.999, 1e-41, 1e-3), 3);
          results[mode].assign(start);
          adamw.step(results[mode], adamw.scalars(settings[0].group, 1), {}, 0.3f);
          adamw.import_canonical(results[mode], 0, adamw.canonical(results[mode], 0));
        }
        EXPECT_EQ(_mm_getcsr() & 0xFFC0, (mode == 0 ? normal : odd) & 0xFFC0) << "the caller's mode was not restored";
        _mm_setcsr(normal);
      }
      ASSERT_EQ(results[0].bytes(), results[1].bytes()) << name(kind) << ", " << isa;
      EXPECT_EQ(bits(scalars[0]), bits(scalars[1]));
      EXPECT_NE(scalars[0][3], 0.0f);
    }
  }
}
#endif

}  // namespace
}  // namespace strata::test
