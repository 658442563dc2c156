// The arithmetic of strata.device/1, bit by bit, against reference.h: every 16-bit pattern, ties, specials, random
// numbers by the million, all sizes around vector and block borders, unaligned data, and a host that runs with
// flush-to-zero.
#include <random>

#include "device_fixture.h"
#include "reference.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace strata::test {
namespace {

class DeviceNumbers : public DeviceTest {
 protected:
  float number(const Buffer& b, strata_dtype dtype, size_t i) {
    return dtype == STRATA_F32 ? b.get<float>(i) : static_cast<float>(decode16(b.get<uint16_t>(i), dtype));
  }
  void put(Buffer& b, strata_dtype dtype, size_t i, float value) {
    if (dtype == STRATA_F32) {
      b.put(i, value);
    } else {
      b.put(i, encode16(value, dtype, STRATA_ROUND_EVEN));
    }
  }
  // Random bit patterns of the dtype: every exponent, NaN and infinity among them.
  void random_bits(Buffer& b, uint64_t seed) {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i < b.bytes(); ++i) b.data()[i] = static_cast<char>(random());
  }
  uint32_t expected_bits(float x, strata_dtype dtype, strata_rounding rounding) {
    return dtype == STRATA_F32 ? canonical32(x) : encode16(x, dtype, rounding);
  }
  uint32_t bits(const Buffer& b, strata_dtype dtype, size_t i) {
    return dtype == STRATA_F32 ? b.get<uint32_t>(i) : b.get<uint16_t>(i);
  }
  void check_cast(const Buffer& src, strata_dtype from, strata_dtype to, size_t count, strata_rounding rounding,
                  size_t skew = 0) {
    Buffer dst(count * size_of(to), skew);
    ASSERT_EQ(cast(dst, to, src, from, count, rounding), STRATA_OK);
    for (size_t i = 0; i < count; ++i) {
      ASSERT_EQ(bits(dst, to, i), expected_bits(number(src, from, i), to, rounding))
          << "element " << i << " of " << count << ", dtype " << from << " to " << to << ", rounding " << rounding
          << ", value " << number(src, from, i);
    }
    ASSERT_TRUE(dst.edges_whole());
  }
};

TEST_P(DeviceNumbers, CastsEvery16BitPattern) {
  Buffer all(65536 * 2);
  for (uint32_t p = 0; p < 65536; ++p) all.put(p, static_cast<uint16_t>(p));
  for (strata_dtype from : {STRATA_BF16, STRATA_F16}) {
    for (strata_dtype to : kDtypes) {
      for (strata_rounding rounding : {STRATA_ROUND_EVEN, STRATA_ROUND_AWAY}) {
        check_cast(all, from, to, 65536, rounding);
      }
    }
  }
}

// Around every 16-bit value: itself, the midpoint to its neighbour, and one fp32 step to each side of both.
TEST_P(DeviceNumbers, CastsTiesAndTheirNeighbours) {
  for (strata_dtype to : {STRATA_BF16, STRATA_F16}) {
    std::vector<float> x;
    const std::vector<double>& values = values16(to);
    for (size_t p = 0; p + 1 < values.size(); ++p) {
      for (double v : {values[p], (values[p] + values[p + 1]) / 2}) {
        const float f = static_cast<float>(v);
        for (float near : {f, std::nextafterf(f, HUGE_VALF), std::nextafterf(f, -HUGE_VALF)}) {
          x.push_back(near);
          x.push_back(-near);
        }
      }
    }
    Buffer src(x.size() * 4);
    std::memcpy(src.data(), x.data(), src.bytes());
    check_cast(src, STRATA_F32, to, x.size(), STRATA_ROUND_EVEN);
    check_cast(src, STRATA_F32, to, x.size(), STRATA_ROUND_AWAY);
  }
}

TEST_P(DeviceNumbers, CastsSpecials) {
  const uint32_t patterns[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x33000000,
                               0x32FFFFFF, 0x33000001, 0x387FFFFF, 0x38800000, 0x477FEFFF, 0x477FF000, 0x47800000,
                               0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000, 0xFF800000, 0x7F800001,
                               0x7FC00000, 0xFFC00000, 0xFFFFFFFF, 0x7FFFFFFF, 0x3F808000, 0x3F818000, 0x3F80FFFF};
  Buffer src(sizeof patterns);
  std::memcpy(src.data(), patterns, sizeof patterns);
  for (strata_dtype to : kDtypes) {
    check_cast(src, STRATA_F32, to, std::size(patterns), STRATA_ROUND_EVEN);
    check_cast(src, STRATA_F32, to, std::size(patterns), STRATA_ROUND_AWAY);
  }
}

TEST_P(DeviceNumbers, CastsMillionsOfRandomNumbers) {
  constexpr size_t kCount = 1 << 20;
  Buffer src(kCount * 4);
  random_bits(src, 1);
  for (strata_dtype to : kDtypes) {
    check_cast(src, STRATA_F32, to, kCount, STRATA_ROUND_EVEN);
    check_cast(src, STRATA_F32, to, kCount, STRATA_ROUND_AWAY);
  }
  // Numbers a training run sees: also inside the range of binary16.
  std::mt19937_64 random(2);
  std::normal_distribution<float> normal(0, 1);
  for (size_t i = 0; i < kCount; ++i)
    src.put(i, normal(random) * std::ldexp(1.0f, static_cast<int>(random() % 40) - 30));
  check_cast(src, STRATA_F32, STRATA_F16, kCount, STRATA_ROUND_EVEN);
  check_cast(src, STRATA_F32, STRATA_F16, kCount, STRATA_ROUND_AWAY);
}

std::vector<size_t> odd_sizes() {
  std::vector<size_t> sizes;
  for (size_t n = 0; n <= 67; ++n) sizes.push_back(n);
  for (size_t n : {1023, 1024, 1025, 65535, 65536, 65537, 200001}) sizes.push_back(n);
  return sizes;
}

TEST_P(DeviceNumbers, CastsEverySizeUnaligned) {
  for (size_t count : odd_sizes()) {
    for (strata_dtype from : kDtypes) {
      Buffer src(count * size_of(from), 3);
      random_bits(src, count);
      for (strata_dtype to : kDtypes) check_cast(src, from, to, count, STRATA_ROUND_AWAY, 5);
    }
  }
}

TEST_P(DeviceNumbers, CastsInPlace) {
  constexpr size_t kCount = 70001;
  for (auto [from, to] : {std::pair<int, int>{STRATA_BF16, STRATA_F16},
                          {STRATA_F16, STRATA_BF16},
                          {STRATA_F32, STRATA_F32},
                          {STRATA_F16, STRATA_F16}}) {
    Buffer before(kCount * size_of(from));
    random_bits(before, 7);
    Buffer data = before;
    ASSERT_EQ(cast(data, to, data, from, kCount, STRATA_ROUND_EVEN), STRATA_OK);
    for (size_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(bits(data, to, i), expected_bits(number(before, from, i), to, STRATA_ROUND_EVEN)) << i;
    }
  }
}

TEST_P(DeviceNumbers, AccumulatesInFp32) {
  for (size_t count : odd_sizes()) {
    for (strata_dtype from : kDtypes) {
      Buffer src(count * size_of(from), 1), dst(count * 4, 7);
      random_bits(src, count + 1);
      random_bits(dst, count + 2);
      for (size_t i = 0; i < count; i += 3) put(src, from, i, 0.1f * static_cast<float>(i % 100));
      for (size_t i = 0; i < count; i += 3) dst.put(i, 1.0f / static_cast<float>(i + 1));
      const Buffer before = dst;
      ASSERT_EQ(accumulate(dst, src, from, count), STRATA_OK);
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(dst.get<uint32_t>(i), canonical32(before.get<float>(i) + number(src, from, i)))
            << i << " of " << count;
      }
      ASSERT_TRUE(dst.edges_whole());
    }
  }
}

// More items than one launch takes, of all types, empty ones and large ones, from anywhere: each as a call of its own
// would do it, and nothing between them is written.
TEST_P(DeviceNumbers, FoldsManyAtOnce) {
  if (!STRATA_HAS(api, strata_device_api, fold) || !api->fold) GTEST_SKIP() << "it leaves fold out";
  struct Piece {
    strata_fold_item item;
    uint64_t appended;  // by a later minor
  };
  constexpr size_t kItems = 150, kPlace = 8192, kLast = 300000;  // elements
  Buffer src((kItems * kPlace + kLast) * 4, 1), dst(src.bytes(), 2);
  random_bits(src, 4);
  random_bits(dst, 5);
  Buffer want = dst;
  std::vector<Piece> pieces(kItems);
  {
    const There s(*this, src), d(*this, dst);
    std::mt19937_64 random(3);
    for (size_t i = 0; i < kItems; ++i) {
      const bool adds = i % 4 == 3;
      const strata_dtype from = kDtypes[i % 3], to = adds ? STRATA_F32 : kDtypes[i / 3 % 3];
      const size_t count = i + 1 == kItems ? kLast : i % 17 == 0 ? 0 : random() % (i % 20 == 1 ? kPlace - 64 : 500);
      const size_t in = i * kPlace * 4 / size_of(from) + random() % 32,
                   out = i * kPlace * 4 / size_of(to) + random() % 32;
      pieces[i].item = {sizeof(Piece),
                        0,
                        d.data() + out * size_of(to),
                        s.data() + in * size_of(from),
                        count,
                        to,
                        from,
                        adds ? 1u : 0u,
                        0,
                        nullptr};
      for (size_t k = 0; k < count; ++k) {
        const float x = number(src, from, in + k);
        if (adds) {
          want.put(out + k, canonical32(want.get<float>(out + k) + x));
        } else if (to == STRATA_F32) {
          want.put(out + k, canonical32(x));
        } else {
          want.put(out + k, encode16(x, to, STRATA_ROUND_EVEN));
        }
      }
    }
    ASSERT_EQ(api->fold(device, &pieces[0].item, kItems, sizeof(Piece), &stream), STRATA_OK);
    d.back_to(dst);
  }
  EXPECT_TRUE(dst.with_edges() == want.with_edges());
  EXPECT_EQ(api->fold(device, nullptr, 0, sizeof(Piece), &stream), STRATA_OK);
}

// Items whose results are squared, too, between others of any size: the sums that square_sums gives of what was stored.
TEST_P(DeviceNumbers, FoldsAndSquaresInOneGo) {
  if (!STRATA_HAS(api, strata_device_api, fold) || !api->fold) GTEST_SKIP() << "it leaves fold out";
  constexpr size_t kItems = 24, kMost = 70 * STRATA_NORM_BLOCK;  // elements; more than one task of device_host
  Buffer src(kItems * kMost * 4, 1), dst(src.bytes(), 2);
  random_bits(src, 8);
  random_bits(dst, 9);
  std::vector<strata_fold_item> items;
  std::vector<std::vector<double>> sums(kItems);
  {
    const There s(*this, src), d(*this, dst);
    for (size_t i = 0; i < kItems; ++i) {
      const bool adds = i % 4 == 3, squares = i % 2 == 1;
      const strata_dtype from = kDtypes[i % 3], to = adds ? STRATA_F32 : kDtypes[i / 3 % 3];
      const size_t blocks = i == 9 ? 70 : i % 5, count = blocks * STRATA_NORM_BLOCK + (squares ? 0 : i);
      sums[i].assign(blocks + 1, -7);
      items.push_back({sizeof(strata_fold_item), 0, d.data() + i * kMost * 4, s.data() + i * kMost * 4, count, to, from,
                       adds ? 1u : 0u, 0, squares ? sums[i].data() : nullptr});
    }
    ASSERT_EQ(api->fold(device, items.data(), kItems, sizeof(items[0]), &stream), STRATA_OK);
    d.back_to(dst);
  }
  for (size_t i = 0; i < kItems; ++i) {
    const size_t blocks = sums[i].size() - 1, size = size_of(items[i].dst_dtype);
    for (size_t b = 0; b < blocks && items[i].squares; ++b) {
      std::vector<double> x(STRATA_NORM_BLOCK);
      for (size_t k = 0; k < x.size(); ++k) {
        x[k] = number(dst, items[i].dst_dtype, i * kMost * 4 / size + b * STRATA_NORM_BLOCK + k);
      }
      ASSERT_EQ(std::bit_cast<uint64_t>(sums[i][b]), std::bit_cast<uint64_t>(square_sum_of_block(x.data())))
          << "item " << i << ", block " << b;
    }
    EXPECT_EQ(sums[i][blocks], -7);
  }
}

// More fp32 than caches hold, at any address: a device may write it another way.
TEST_P(DeviceNumbers, FoldsMoreThanCachesHold) {
  if (!STRATA_HAS(api, strata_device_api, fold) || !api->fold) GTEST_SKIP() << "it leaves fold out";
  constexpr size_t kCount = (9 << 20) / 4 + 13;
  for (const auto& [from, skew] : {std::pair{STRATA_F32, 0}, {STRATA_BF16, 4}, {STRATA_F16, 60}, {STRATA_BF16, 7}}) {
    Buffer src(kCount * size_of(from), 2), dst(kCount * 4, static_cast<size_t>(skew));
    random_bits(src, 6);
    random_bits(dst, 7);
    {
      const There s(*this, src), d(*this, dst);
      const strata_fold_item item = {sizeof(item), 0, d.data(), s.data(), kCount, STRATA_F32, from, 0, 0, nullptr};
      ASSERT_EQ(api->fold(device, &item, 1, sizeof(item), &stream), STRATA_OK);
      d.back_to(dst);
    }
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(dst.get<uint32_t>(i), canonical32(number(src, from, i))) << i;
    EXPECT_TRUE(dst.edges_whole());
  }
}

TEST_P(DeviceNumbers, AFoldRefusesWhatItCannotDo) {
  if (!STRATA_HAS(api, strata_device_api, fold) || !api->fold) GTEST_SKIP() << "it leaves fold out";
  Buffer src(64), dst(64);
  const Buffer before = dst;
  const There s(*this, src), d(*this, dst);
  const strata_fold_item good = {sizeof(good), 0, d.data(), s.data(), 4, STRATA_F32, STRATA_F32, 0, 0, nullptr};
  const auto refused = [&](auto change) {
    std::vector<strata_fold_item> items = {good, good};
    items[1].dst = d.data() + 32;
    change(items[1]);
    const strata_status code = api->fold(device, items.data(), 2, sizeof(good), &stream);
    return code == STRATA_INVALID_ARGUMENT ? reason(code) : "status " + std::to_string(code);
  };
  using testing::HasSubstr;
  EXPECT_THAT(refused([](strata_fold_item& i) { i.src_dtype = STRATA_I64; }), HasSubstr("dtype 6"));
  EXPECT_THAT(refused([](strata_fold_item& i) { i.dst_dtype = STRATA_I64; }), HasSubstr("dtype 6"));
  EXPECT_THAT(refused([](strata_fold_item& i) { i.src = nullptr; }), HasSubstr("NULL"));
  EXPECT_THAT(refused([](strata_fold_item& i) { i.adds = 1, i.dst_dtype = STRATA_BF16; }), HasSubstr("only F32"));
  double sum = 0;
  EXPECT_THAT(refused([&](strata_fold_item& i) { i.squares = &sum; }), HasSubstr("multiple of 2048"));
  d.back_to(dst);
  EXPECT_TRUE(dst.with_edges() == before.with_edges());  // the good one was not done either
}

TEST_P(DeviceNumbers, SquareSumsFollowTheTree) {
  for (size_t blocks : {0, 1, 2, 3, 31, 32, 33, 70}) {
    for (strata_dtype dtype : kDtypes) {
      const size_t count = blocks * STRATA_NORM_BLOCK;
      Buffer src(count * size_of(dtype), 2);
      std::mt19937_64 random(blocks);
      std::normal_distribution<float> normal(0, 1);
      for (size_t i = 0; i < count; ++i)
        put(src, dtype, i, normal(random) * std::ldexp(1.0f, static_cast<int>(i % 24) - 12));
      std::vector<double> sums(blocks + 1, -7), x(count);
      ASSERT_EQ(square_sums(src, dtype, count, sums.data()), STRATA_OK);
      for (size_t i = 0; i < count; ++i) x[i] = number(src, dtype, i);
      for (size_t b = 0; b < blocks; ++b) {
        const double expected = square_sum_of_block(x.data() + b * STRATA_NORM_BLOCK);
        ASSERT_EQ(std::bit_cast<uint64_t>(sums[b]), std::bit_cast<uint64_t>(expected)) << "block " << b;
      }
      ASSERT_EQ(sums[blocks], -7);
    }
  }
}

TEST_P(DeviceNumbers, SquareSumsOfExtremes) {
  const auto sum_with = [&](float first, float last) {
    Buffer x(STRATA_NORM_BLOCK * 4);
    for (size_t i = 0; i < STRATA_NORM_BLOCK; ++i) x.put(i, i == 0 ? first : i == STRATA_NORM_BLOCK - 1 ? last : 0.0f);
    double sum = 0;
    EXPECT_EQ(square_sums(x, STRATA_F32, STRATA_NORM_BLOCK, &sum), STRATA_OK);
    return sum;
  };
  EXPECT_EQ(sum_with(0x1p-149f, 0), 0x1p-298);
  EXPECT_EQ(sum_with(0x1.fffffep127f, 0), std::ldexp(double(0x1.fffffep0) * 0x1.fffffep0, 254));
  EXPECT_EQ(sum_with(-HUGE_VALF, 1), HUGE_VAL);
  EXPECT_EQ(std::bit_cast<uint64_t>(sum_with(-std::nanf("5"), std::nanf("9"))), 0x7FF8000000000000u);
}

TEST_P(DeviceNumbers, FindsTheFirstNonfinite) {
  for (strata_dtype dtype : kDtypes) {
    for (size_t count : odd_sizes()) {
      Buffer src(count * size_of(dtype), 1);
      for (size_t i = 0; i < count; ++i) put(src, dtype, i, i % 2 ? -60000.0f : 0x1p-20f);
      int64_t index = 77;
      ASSERT_EQ(find_nonfinite(src, dtype, count, &index), STRATA_OK);
      ASSERT_EQ(index, -1) << count;
      const size_t step = count > 100 ? count / 5 + 1 : 1;
      for (size_t hit = 0; hit < count; hit += step) {
        Buffer bad = src;
        put(bad, dtype, hit, hit % 2 ? -HUGE_VALF : std::nanf(""));
        put(bad, dtype, count - 1, HUGE_VALF);  // never the first, unless it is the only one
        ASSERT_EQ(find_nonfinite(bad, dtype, count, &index), STRATA_OK);
        ASSERT_EQ(index, static_cast<int64_t>(hit)) << count;
      }
    }
  }
}

#if defined(__SSE2__)
// A host that flushes subnormals to zero, with workers that inherited it, gets the same numbers and its mode back.
TEST_P(DeviceNumbers, KeepsSubnormalsOnAHostThatFlushesThem) {
  constexpr size_t kCount = 3 * 65536;
  Buffer tiny(kCount * 4), sum(kCount * 4), expected(kCount * 4), f16(kCount * 2);
  for (size_t i = 0; i < kCount; ++i) {
    tiny.put(i, static_cast<uint32_t>(i % 0x7FFFFF + 1));  // an fp32 subnormal
    sum.put(i, static_cast<uint32_t>(3 * i % 0x7FFFFF));
    expected.put(i, static_cast<uint32_t>(i % 0x7FFFFF + 1) + static_cast<uint32_t>(3 * i % 0x7FFFFF));
    f16.put(i, static_cast<uint16_t>(i % 0x3FF + 1));
  }
  const Buffer wide_expected = [&] {
    Buffer b(kCount * 4);
    for (size_t i = 0; i < kCount; ++i) b.put(i, static_cast<float>(decode16(f16.get<uint16_t>(i), STRATA_F16)));
    return b;
  }();
  close();
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040 | 0x6000);  // FTZ, DAZ, and rounding toward zero
  open();
  const unsigned host_mode = _mm_getcsr();
  Buffer wide(kCount * 4), back(kCount * 2);
  std::vector<double> sums(kCount / STRATA_NORM_BLOCK);
  const strata_status codes[] = {accumulate(sum, tiny, STRATA_F32, kCount),
                                 cast(wide, STRATA_F32, f16, STRATA_F16, kCount, STRATA_ROUND_EVEN),
                                 cast(back, STRATA_F16, wide, STRATA_F32, kCount, STRATA_ROUND_EVEN),
                                 square_sums(tiny, STRATA_F32, kCount, sums.data())};
  const unsigned mode_after = _mm_getcsr();
  _mm_setcsr(saved);
  for (strata_status code : codes) EXPECT_EQ(code, STRATA_OK);
  EXPECT_EQ(mode_after & 0xFFC0, host_mode & 0xFFC0);
  EXPECT_EQ(std::memcmp(sum.data(), expected.data(), kCount * 4), 0);
  EXPECT_EQ(std::memcmp(wide.data(), wide_expected.data(), kCount * 4), 0);
  EXPECT_EQ(std::memcmp(back.data(), f16.data(), kCount * 2), 0);
  std::vector<double> x(STRATA_NORM_BLOCK);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::ldexp(static_cast<double>(i + 1), -149);
  EXPECT_EQ(sums[0], square_sum_of_block(x.data()));
}
#endif

INSTANTIATE_TEST_SUITE_P(Plugins, DeviceNumbers, testing::ValuesIn(all_devices()), device_name);

}  // namespace
}  // namespace strata::test
