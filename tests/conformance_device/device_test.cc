// Memory and manners of strata.device/1: allocation, copies, and errors that say what was wrong.
#include <thread>

#include "device_fixture.h"

// Checkers end the process when malloc is asked for too much; these tests ask on purpose and want the NULL.
extern "C" STRATA_EXPORT const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" STRATA_EXPORT const char* __tsan_default_options() { return "allocator_may_return_null=1"; }

namespace strata::test {
namespace {

using testing::HasSubstr;

class Device : public DeviceTest {};

TEST_P(Device, SaysWhatItIs) {
  strata_device_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_EQ(api->caps(device, &caps), STRATA_OK);
  EXPECT_EQ(caps.type, coherent ? STRATA_CPU : STRATA_CUDA);
  EXPECT_GE(caps.alignment, 256u);
  EXPECT_GT(caps.total_bytes, 0u);
  EXPECT_GT(caps.free_bytes, 0u);
  EXPECT_LE(caps.free_bytes, caps.total_bytes);
}

TEST_P(Device, AllocatesAlignedUsableMemory) {
  strata_device_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_EQ(api->caps(device, &caps), STRATA_OK);
  void* none = &caps;
  EXPECT_EQ(api->alloc(device, 0, &none), STRATA_OK);
  EXPECT_EQ(none, nullptr);
  api->free(device, nullptr);
  std::vector<void*> all;
  for (uint64_t bytes :
       {uint64_t{1}, uint64_t{4097}, (uint64_t{1} << 20) - 1, uint64_t{1} << 20, (uint64_t{5} << 20) + 3}) {
    void* p = nullptr;
    ASSERT_EQ(api->alloc(device, bytes, &p), STRATA_OK);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % caps.alignment, 0u);
    ASSERT_EQ(api->fill(device, p, 0x5A, bytes, &stream), STRATA_OK);
    EXPECT_EQ(byte_at(static_cast<char*>(p) + bytes - 1), 0x5A);
    all.push_back(p);
  }
  for (size_t i = 0; i < all.size(); i += 2) api->free(device, all[i]);
  // close frees the others: the address checker would tell.
}

TEST_P(Device, RefusesWhatCannotBeWithNumbers) {
  void* p = nullptr;
  const uint64_t bytes = uint64_t{1} << 60;
  ASSERT_EQ(api->alloc(device, bytes, &p), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED), HasSubstr(std::to_string(bytes)));
  EXPECT_EQ(p, nullptr);
  EXPECT_EQ(api->alloc(device, UINT64_MAX, &p), STRATA_RESOURCE_EXHAUSTED);
}

TEST_P(Device, IgnoresAForeignFreeAndSaysSo) {
  int local = 0;
  api->free(device, &local);
  ASSERT_FALSE(rank->log_lines.empty());
  EXPECT_THAT(rank->log_lines.back(), HasSubstr("free"));
}

TEST_P(Device, CopiesAndFillsEverySize) {
  for (size_t bytes : {0, 1, 2, 63, 64, 65, 4095, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 5}) {
    Buffer src(bytes, 1), dst(bytes, 3);
    for (size_t i = 0; i < bytes; ++i) src.data()[i] = static_cast<char>(i * 7 + i / 256);
    const There from(*this, src), to(*this, dst);
    ASSERT_EQ(api->copy(device, to.data(), from.data(), bytes, &stream), STRATA_OK);
    to.back_to(dst);
    EXPECT_EQ(std::memcmp(dst.data(), src.data(), bytes), 0) << bytes;
    EXPECT_TRUE(dst.edges_whole());
    ASSERT_EQ(api->fill(device, to.data(), 0xEE, bytes, &stream), STRATA_OK);
    to.back_to(dst);
    EXPECT_EQ(std::count(dst.data(), dst.data() + bytes, '\xEE'), static_cast<ptrdiff_t>(bytes));
    EXPECT_TRUE(dst.edges_whole());
  }
  EXPECT_EQ(api->copy(device, nullptr, nullptr, 0, &stream), STRATA_OK);
}

TEST_P(Device, RefusesWrongArguments) {
  float x[2048] = {};
  double sums[1];
  int64_t index;
  const auto refused = [&](strata_status code, const std::string& word) {
    EXPECT_EQ(code, STRATA_INVALID_ARGUMENT);
    EXPECT_THAT(reason(code), HasSubstr(word));
  };
  refused(api->cast(device, x, STRATA_U8, x, STRATA_F32, 1, STRATA_ROUND_EVEN, &stream), "dtype 4");
  refused(api->cast(device, x, STRATA_F32, x, STRATA_I64, 1, STRATA_ROUND_EVEN, &stream), "dtype 6");
  refused(api->cast(device, x, STRATA_F32, x, STRATA_F32, 1, 2, &stream), "rounding 2");
  refused(api->cast(device, nullptr, STRATA_F32, x, STRATA_F32, 1, STRATA_ROUND_EVEN, &stream), "NULL");
  refused(api->accumulate(device, x, x, STRATA_F64, 1, &stream), "dtype 7");
  refused(api->accumulate(device, x, nullptr, STRATA_F32, 1, &stream), "NULL");
  refused(api->square_sums(device, x, STRATA_F32, 2047, sums, &stream), "2047");
  refused(api->find_nonfinite(device, x, STRATA_U16, 1, &index, &stream), "dtype 5");
  refused(api->copy(device, x, nullptr, 4, &stream), "NULL");
  refused(api->fill(device, nullptr, 0, 4, &stream), "NULL");
  const strata_stream other{sizeof(strata_stream), STRATA_ABI_MINOR, coherent ? STRATA_CUDA : STRATA_CUDA_HOST, 0, x};
  refused(api->fill(device, x, 0, 4, &other), "stream");
}

TEST_P(Device, ServesSeveralThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 20; ++round) {
        const uint64_t bytes = 4096u * static_cast<unsigned>(t + 1) + (round % 2 ? 1u << 20 : 0);
        void* p = nullptr;
        if (api->alloc(device, bytes, &p) != STRATA_OK) ++wrong;
        if (api->fill(device, p, static_cast<uint8_t>(t), bytes, &stream) != STRATA_OK) ++wrong;
        if (byte_at(static_cast<char*>(p) + bytes / 2) != t) ++wrong;
        api->free(device, p);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

INSTANTIATE_TEST_SUITE_P(Plugins, Device, testing::ValuesIn(all_devices()), device_name);

TEST(DeviceHostOptions, RefusesAnUnknownInstructionSet) {
  auto* api = load<strata_device_api>("device_host", STRATA_DEVICE);
  Rank rank;
  Options options;
  const strata_open_args args = rank.args(&options.set("isa", "avx1024"));
  strata_device* device = nullptr;
  ASSERT_EQ(api->open(&args, &device), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(take_failure(STRATA_INVALID_ARGUMENT).text(), HasSubstr("avx1024"));
}

}  // namespace
}  // namespace strata::test
