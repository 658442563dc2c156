// device_cuda_test.cc - what device_cuda says where it cannot run; its memory and budgets; and its kernels against
// those of device_host, bit by bit, over millions of patterns and beyond 2^32 elements.
#include <gtest/gtest.h>

#include "device_cuda_fixture.h"

namespace strata::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

// --- open -------------------------------------------------------------------------------------------------------

std::string open_fails(int local_rank, Options options = {}) {
  const auto* api = load<strata_device_api>("device_cuda", STRATA_DEVICE);
  Rank rank(local_rank, local_rank + 1);
  const strata_open_args args = rank.args(&options);
  strata_device* device = nullptr;
  const strata_status code = api->open(&args, &device);
  EXPECT_EQ(code, STRATA_FAILED_PRECONDITION);
  EXPECT_EQ(device, nullptr);
  return take_failure(code).text();
}

TEST(DeviceCudaOpen, NamesWhatIsMissing) {
  EXPECT_THAT(open_fails(1000), AnyOf(HasSubstr("no NVIDIA driver found (libcuda.so.1 cannot be loaded)"),
                                      HasSubstr("the NVIDIA driver is too old"), HasSubstr("no GPU is visible"),
                                      HasSubstr("local rank = 1000, but ")));
  EXPECT_THAT(open_fails(0, Options().set("device_id", 999)),
              AnyOf(HasSubstr("driver"), HasSubstr("no GPU is visible"), HasSubstr("option device_id = 999, but ")));
}

// CUDA reads the variable once per process, so this test runs itself in a process of its own.
TEST(DeviceCudaOpen, ShowsTheVariableThatHidesEveryGpu) {
  const char* hidden = std::getenv("CUDA_VISIBLE_DEVICES");
  if (hidden && std::string(hidden) == "-1") {
    EXPECT_THAT(open_fails(0), AnyOf(HasSubstr("driver"), HasSubstr("CUDA_VISIBLE_DEVICES=\"-1\"")));
    return;
  }
  EXPECT_EQ(run_alone("CUDA_VISIBLE_DEVICES=-1", "*ShowsTheVariable*"), 0);
}

TEST(DeviceCudaOpen, RefusesBudgetsBelowZero) {
  const auto* api = load<strata_device_api>("device_cuda", STRATA_DEVICE);
  for (const char* key : {"memory_budget", "pinned_budget"}) {
    Rank rank;
    Options options;
    const strata_open_args args = rank.args(&options.set(key, -5));
    strata_device* device = nullptr;
    ASSERT_EQ(api->open(&args, &device), STRATA_INVALID_ARGUMENT);
    EXPECT_THAT(take_failure(STRATA_INVALID_ARGUMENT).text(), HasSubstr(std::string("option ") + key + " = -5"));
  }
}

// --- memory -----------------------------------------------------------------------------------------------------

class CudaMemory : public CudaTest {};

TEST_F(CudaMemory, BudgetsAreKeptAndNamed) {
  constexpr uint64_t kMiB = 1 << 20;
  open(Options().set("memory_budget", int64_t{64 * kMiB}).set("pinned_budget", int64_t{8 * kMiB}));
  EXPECT_EQ(caps().total_bytes, 64 * kMiB);
  void* first = alloc(48 * kMiB);
  EXPECT_EQ(caps().free_bytes, 16 * kMiB);
  void* more = nullptr;
  ASSERT_EQ(api->alloc(device, 32 * kMiB, &more), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED),
              testing::AllOf(HasSubstr("33554432 bytes wanted"), HasSubstr("16777216 of 67108864 free"),
                             HasSubstr("memory_budget = 67108864")));
  api->free(device, first);
  api->free(device, alloc(64 * kMiB));

  void* pinned = alloc_pinned(6 * kMiB);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pinned) % 4096, 0u);
  ASSERT_EQ(api->alloc_pinned(device, 3 * kMiB, &more), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED),
              testing::AllOf(HasSubstr("3145728 bytes"), HasSubstr("2097152 of pinned_budget = 8388608")));
  api->free_pinned(device, pinned);
  alloc_pinned(8 * kMiB);  // close frees it
}

TEST_F(CudaMemory, PinnedMemoryIsForBothSides) {
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{4097}, uint64_t{3} << 20}) {
    char* pinned = alloc_pinned(bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(pinned) % 4096, 0u);
    std::memset(pinned, 1, bytes);
    ASSERT_EQ(api->fill(device, pinned, 0x5B, bytes, nullptr), STRATA_OK);
    EXPECT_EQ(pinned[bytes - 1], 0x5B);
  }
  void* none = this;
  EXPECT_EQ(api->alloc_pinned(device, 0, &none), STRATA_OK);
  EXPECT_EQ(none, nullptr);
  EXPECT_EQ(api->alloc_pinned(device, UINT64_MAX, &none), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED), HasSubstr(std::to_string(UINT64_MAX)));
}

TEST_F(CudaMemory, FreedMemoryIsKeptForTheNextAllocation) {
  const uint64_t before = caps().free_bytes;
  for (int round = 0; round < 50; ++round) {
    char* p = alloc(uint64_t{256} << 20);
    ASSERT_EQ(api->fill(device, p, 7, uint64_t{256} << 20, nullptr), STRATA_OK);
    api->free(device, p);
  }
  EXPECT_NEAR(static_cast<double>(caps().free_bytes), static_cast<double>(before), 64 << 20);
}

TEST_F(CudaMemory, KernelsAreNotGivenOrdinaryHostMemory) {
  std::vector<float> here(8);
  char* there = alloc(32);
  ASSERT_EQ(api->cast(device, there, STRATA_F32, here.data(), STRATA_F32, 8, STRATA_ROUND_EVEN, nullptr),
            STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("src at "));
  ASSERT_EQ(api->accumulate(device, here.data(), there, STRATA_F32, 8, nullptr), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("dst at "));
  ASSERT_EQ(api->fill(device, here.data(), 0x3F, 32, nullptr), STRATA_OK);  // in its turn, by the host
  EXPECT_EQ(here[7], 0x1.7e7e7ep-1f);
}

// --- bits -------------------------------------------------------------------------------------------------------

// Every operation on the same bytes by device_host, on the threads of another rank.
class CudaBits : public CudaTest {
 protected:
  static constexpr size_t kCount = size_t{4} << 20;

  void SetUp() override {
    CudaTest::SetUp();
    if (!device) return;
    const strata_open_args args = host_rank.args();
    ASSERT_EQ(host_api->open(&args, &host_device), STRATA_OK);
  }
  void TearDown() override {
    if (host_device) host_api->close(host_device);
    CudaTest::TearDown();
  }
  // Any bits: every exponent; every 16-bit pattern in the first 65,536 elements of 16 bits; NaN, infinity, subnormals.
  std::vector<char> any_bits(size_t bytes, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<uint64_t> words(bytes / 8);
    for (uint64_t& w : words) {
      w = random();
      if (w % 8 == 0) w &= 0x80FFFFFF80FFFFFF;  // fp32 around the smallest normal number
      if (w % 8 == 1) w &= 0xFFFFE000FFFF8000;  // fp32 that are fp16 values, bf16 values and ties
      if (w % 64 == 2) w = 0x7F8000007FC00001;
    }
    std::vector<char> out(bytes);
    std::memcpy(out.data(), words.data(), words.size() * 8);
    for (uint32_t p = 0; p < 65536; ++p) std::memcpy(out.data() + 2 * p, &p, 2);
    return out;
  }
  static size_t bytes_of(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }

  const strata_device_api* host_api = load<strata_device_api>("device_host", STRATA_DEVICE);
  Rank host_rank;
  strata_device* host_device = nullptr;
};
constexpr strata_dtype kFloats[] = {STRATA_F32, STRATA_BF16, STRATA_F16};

TEST_F(CudaBits, CastsAreTheHostsForMillionsOfPatterns) {
  char *src = alloc(kCount * 4), *dst = alloc(kCount * 4);
  for (const strata_dtype from : kFloats) {
    const std::vector<char> values = any_bits(kCount * bytes_of(from), 1);
    put(src, values);
    for (const strata_dtype to : kFloats) {
      for (const strata_rounding rounding : {STRATA_ROUND_EVEN, STRATA_ROUND_AWAY}) {
        std::vector<char> want(kCount * bytes_of(to));
        ASSERT_EQ(host_api->cast(host_device, want.data(), to, values.data(), from, kCount, rounding, nullptr),
                  STRATA_OK);
        ASSERT_EQ(api->cast(device, dst, to, src, from, kCount, rounding, nullptr), STRATA_OK);
        ASSERT_TRUE(get<char>(dst, want.size()) == want) << from << " to " << to << ", rounding " << rounding;
      }
    }
  }
}

TEST_F(CudaBits, SumsAreTheHostsForMillionsOfPatterns) {
  char *src = alloc(kCount * 4), *dst = alloc(kCount * 4);
  auto* pinned = reinterpret_cast<double*>(alloc_pinned(kCount / STRATA_NORM_BLOCK * 8));
  for (const strata_dtype from : kFloats) {
    const std::vector<char> values = any_bits(kCount * bytes_of(from), 2);
    std::vector<char> sums = any_bits(kCount * 4, 3);
    put(src, values);
    put(dst, sums);
    ASSERT_EQ(
        host_api->accumulate(host_device, reinterpret_cast<float*>(sums.data()), values.data(), from, kCount, nullptr),
        STRATA_OK);
    ASSERT_EQ(api->accumulate(device, reinterpret_cast<float*>(dst), src, from, kCount, nullptr), STRATA_OK);
    ASSERT_TRUE(get<char>(dst, sums.size()) == sums) << from;

    std::vector<double> want(kCount / STRATA_NORM_BLOCK), pageable(want.size());
    for (const bool finite : {false, true}) {
      std::vector<char> x = values;
      for (size_t i = bytes_of(from) - 1; finite && i < x.size(); i += bytes_of(from)) x[i] &= '\xBB';
      put(src, x);
      ASSERT_EQ(host_api->square_sums(host_device, x.data(), from, kCount, want.data(), nullptr), STRATA_OK);
      ASSERT_EQ(api->square_sums(device, src, from, kCount, pinned, nullptr), STRATA_OK);
      ASSERT_EQ(std::memcmp(pinned, want.data(), want.size() * 8), 0) << from;
      ASSERT_EQ(api->square_sums(device, src, from, kCount, pageable.data(), nullptr), STRATA_OK);
      ASSERT_EQ(std::memcmp(pageable.data(), want.data(), want.size() * 8), 0) << from;
    }
  }
}

// Arrays that begin at any multiple of their elements, so that fours of elements come together late or never, of sizes
// around the pieces that a warp takes. What lies beside them stays as it was.
TEST_F(CudaBits, WhereTheArraysBeginNeverShows) {
  constexpr uint64_t kRoom = 4096;
  char *src = alloc(kRoom), *dst = alloc(kRoom);
  const std::vector<char> values = any_bits(1 << 18, 5), before = any_bits(1 << 18, 6);
  const std::vector<char> here(values.end() - kRoom, values.end()), was(before.end() - kRoom, before.end());
  put(src, here);
  for (const strata_dtype from : kFloats) {
    for (const strata_dtype to : kFloats) {
      for (uint64_t place = 0; place < 25; ++place) {
        const uint64_t skip = place % 5 * bytes_of(from), at = place / 5 * bytes_of(to);
        for (const uint64_t count : {1, 3, 255, 256, 257, 259, 260, 511, 515, 900}) {
          std::vector<char> want = was;
          put(dst, was);
          ASSERT_EQ(host_api->cast(host_device, want.data() + at, to, here.data() + skip, from, count,
                                   STRATA_ROUND_AWAY, nullptr),
                    STRATA_OK);
          ASSERT_EQ(api->cast(device, dst + at, to, src + skip, from, count, STRATA_ROUND_AWAY, nullptr), STRATA_OK);
          ASSERT_TRUE(get<char>(dst, kRoom) == want) << from << " to " << to << " at " << place << ", " << count;
          int64_t host_index = 0, index = 0;
          ASSERT_EQ(host_api->find_nonfinite(host_device, here.data() + skip, from, count, &host_index, nullptr),
                    STRATA_OK);
          ASSERT_EQ(api->find_nonfinite(device, src + skip, from, count, &index, nullptr), STRATA_OK);
          ASSERT_EQ(index, host_index) << from << " at " << place << ", " << count;
          if (to != STRATA_F32) continue;
          want = was;
          put(dst, was);
          ASSERT_EQ(host_api->accumulate(host_device, reinterpret_cast<float*>(want.data() + at), here.data() + skip,
                                         from, count, nullptr),
                    STRATA_OK);
          ASSERT_EQ(api->accumulate(device, reinterpret_cast<float*>(dst + at), src + skip, from, count, nullptr),
                    STRATA_OK);
          ASSERT_TRUE(get<char>(dst, kRoom) == want) << from << " added at " << place << ", " << count;
        }
      }
    }
  }
}

// A bf16 array of more than 2^32 elements and 8 GiB: counts, offsets and results beyond 32 bits.
TEST_F(CudaMemory, SizesAre64Bit) {
  constexpr uint64_t kBig = (uint64_t{1} << 32) + 3 * STRATA_NORM_BLOCK;
  if (caps().free_bytes < kBig * 7) GTEST_SKIP() << "needs " << kBig * 7 << " bytes of free device memory";
  char *src = alloc(kBig * 2), *dst = alloc(kBig * 4);
  ASSERT_EQ(api->fill(device, src, 0x3F, kBig * 2, nullptr), STRATA_OK);
  const uint64_t odd[] = {5, (uint64_t{1} << 31) + 1, (uint64_t{1} << 32) + 7, kBig - 1};
  for (const uint64_t i : odd) put(src + 2 * i, std::vector<uint16_t>{0x4040});  // 3.0
  ASSERT_EQ(api->cast(device, dst, STRATA_F32, src, STRATA_BF16, kBig, STRATA_ROUND_EVEN, nullptr), STRATA_OK);
  const float plain = 0x1.7ep-1f;  // 0x3F3F
  for (const uint64_t i : odd) {
    EXPECT_EQ(get<float>(dst + 4 * i, 1)[0], 3.0f) << i;
    EXPECT_EQ(get<float>(dst + 4 * (i - 1), 1)[0], plain) << i;
  }
  ASSERT_EQ(api->accumulate(device, reinterpret_cast<float*>(dst), src, STRATA_BF16, kBig, nullptr), STRATA_OK);
  for (const uint64_t i : odd) EXPECT_EQ(get<float>(dst + 4 * i, 1)[0], 6.0f) << i;

  auto* sums = reinterpret_cast<double*>(alloc_pinned(kBig / STRATA_NORM_BLOCK * 8));
  ASSERT_EQ(api->square_sums(device, src, STRATA_BF16, kBig, sums, nullptr), STRATA_OK);
  const double square = double{plain} * plain;
  EXPECT_EQ(sums[1], 2048 * square);
  EXPECT_NEAR(sums[kBig / STRATA_NORM_BLOCK - 1], 2047 * square + 9, 1e-9);

  int64_t index = 0;
  ASSERT_EQ(api->find_nonfinite(device, src, STRATA_BF16, kBig, &index, nullptr), STRATA_OK);
  EXPECT_EQ(index, -1);
  put(src + 2 * odd[2], std::vector<uint16_t>{0x7FC0});
  ASSERT_EQ(api->find_nonfinite(device, src, STRATA_BF16, kBig, &index, nullptr), STRATA_OK);
  EXPECT_EQ(index, static_cast<int64_t>(odd[2]));
}

}  // namespace
}  // namespace strata::test
