// The simulated GPU itself: what it forbids, what it orders, and what it does not.
#include <cstring>
#include <random>

#include "gpu_sim_fixture.h"

namespace strata::test {
namespace {

using testing::Each;
using testing::HasSubstr;

class GpuSim : public testing::Test {
 protected:
  void SetUp() override { rank.open_device(); }
  Status copy(void* dst, const void* src, uint64_t bytes, const strata_stream* on) {
    return take_failure(rank.device->copy(rank.gpu, dst, src, bytes, on));
  }
  void enqueue_copy(void* dst, const void* src, uint64_t bytes, const strata_stream& on) {
    const Status status = copy(dst, src, bytes, &on);
    EXPECT_TRUE(status.ok()) << status.text();
  }
  strata_marker* marker() {
    strata_marker* made = nullptr;
    EXPECT_EQ(rank.device->marker_create(rank.gpu, &made), STRATA_OK);
    return made;
  }
  void record_marker(strata_marker* at, const strata_stream& on) {
    EXPECT_EQ(rank.device->marker_record(rank.gpu, at, &on), STRATA_OK);
  }
  void wait_marker(const strata_stream& on, strata_marker* at) {
    EXPECT_EQ(rank.device->stream_wait_marker(rank.gpu, &on, at), STRATA_OK);
  }

  SimRank rank;
};

// --- memory ---------------------------------------------------------------------------------------------------------

TEST_F(GpuSim, IsADeviceThatTheHostCannotRead) {
  strata_device_caps caps{};
  caps.struct_size = sizeof(caps);
  ASSERT_DONE(rank.device->caps(rank.gpu, &caps));
  EXPECT_EQ(caps.type, STRATA_CUDA);
  EXPECT_EQ(caps.device_id, 0);
  EXPECT_EQ(caps.flags & STRATA_DEVICE_HOST_COHERENT, 0u);
  EXPECT_EQ(caps.total_bytes, uint64_t{1} << 30);
  const auto* at = rank.alloc<volatile char>(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % caps.alignment, 0u);
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH((void)at[50], "");
}

TEST_F(GpuSim, FreshMemoryIsNaN) {
  for (int round = 0; round < 2; ++round) {  // the second time it is memory that was used
    auto* at = rank.alloc<uint8_t>(5000);
    EXPECT_THAT(rank.get(at, 5000), Each(0xFF));
    ASSERT_DONE(rank.device->fill(rank.gpu, at, 1, 5000, nullptr));
    EXPECT_THAT(rank.get(at, 5000), Each(1));
    rank.device->free(rank.gpu, at);
  }
  void* pinned = nullptr;
  ASSERT_DONE(rank.device->alloc_pinned(rank.gpu, 4000, &pinned));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(pinned) % 4096, 0u);
  EXPECT_EQ(static_cast<uint8_t*>(pinned)[3999], 0xFF);
  rank.device->free_pinned(rank.gpu, pinned);
}

TEST(GpuSimMemory, KeepsToItsBudget) {
  SimRank rank({{"memory_bytes", 10'000}});
  rank.open_device();
  void* at = nullptr;
  ASSERT_EQ(rank.device->alloc(rank.gpu, 10'001, &at), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED), HasSubstr("10001 bytes wanted, 10000 of 10000 free"));
  EXPECT_EQ(at, nullptr);
  std::vector<char*> all;
  for (int k = 0; k < 10; ++k) all.push_back(rank.alloc<char>(1000));
  ASSERT_EQ(rank.device->alloc(rank.gpu, 1, &at), STRATA_RESOURCE_EXHAUSTED);
  EXPECT_THAT(reason(STRATA_RESOURCE_EXHAUSTED), HasSubstr("1 bytes wanted, 0 of 10000 free"));
  rank.device->free(rank.gpu, all[4]);
  EXPECT_EQ(rank.alloc<char>(1000), all[4]);
}

TEST(GpuSimMemory, OneJobAndLocalRankAreOneGpu) {
  const std::string job = fresh_job();
  SimRank one({}, job), two({}, job), other({{"memory_bytes", 4096}}, job);
  one.open_device();
  two.open_device();
  auto* at = one.put<int>({1, 2, 3});
  EXPECT_EQ(two.get(at, 3), (std::vector<int>{1, 2, 3}));
  two.close_device();  // frees its own memory only
  EXPECT_EQ(one.get(at, 3), (std::vector<int>{1, 2, 3}));
  const strata_device_api* table = nullptr;
  ASSERT_TRUE(other.set.find("gpu_sim", STRATA_DEVICE, &table).ok());
  ASSERT_TRUE(other.set.options("gpu_sim", &other.args.options).ok());
  ASSERT_EQ(table->open(&other.args, &other.gpu), STRATA_FAILED_PRECONDITION);
  EXPECT_THAT(reason(STRATA_FAILED_PRECONDITION), HasSubstr("other options"));
}

TEST_F(GpuSim, AccessOutsideOfLiveMemoryFailsTheDevice) {
  const strata_stream on = rank.stream();
  auto* at = rank.alloc<char>(100);
  char host[200];
  EXPECT_EQ(copy(host, at, 101, nullptr).code(), STRATA_OUT_OF_RANGE);
  EXPECT_TRUE(rank.wait(on).ok());  // a call that is refused at once is only the caller's failure
  {
    Gate gate(rank, on);
    enqueue_copy(host, at, 100, on);  // right at the call, freed before it runs
    rank.device->free(rank.gpu, at);
  }
  const Status failed = rank.wait(on);
  EXPECT_EQ(failed.code(), STRATA_OUT_OF_RANGE);
  EXPECT_THAT(failed.text(), HasSubstr("copy: 100 bytes at device address"));
  EXPECT_EQ(wait(record(rank, on)).text(), wait(record(rank, on)).text());
  EXPECT_EQ(wait(record(rank, on)).code(), STRATA_OUT_OF_RANGE);
  EXPECT_EQ(copy(host, host + 100, 100, &on).code(), STRATA_OUT_OF_RANGE);
  strata_marker* point = marker();
  record_marker(point, on);
  EXPECT_EQ(rank.device->marker_wait_host(rank.gpu, point), STRATA_OUT_OF_RANGE);
}

TEST_F(GpuSim, KernelsReachDeviceAndPinnedMemoryOnly) {
  float host[4] = {1, 2, 3, 4};
  void* pinned = nullptr;
  ASSERT_DONE(rank.device->alloc_pinned(rank.gpu, sizeof host, &pinned));
  std::memcpy(pinned, host, sizeof host);
  auto* at = rank.put<float>({10, 20, 30, 40});
  ASSERT_DONE(rank.device->accumulate(rank.gpu, at, pinned, STRATA_F32, 4, nullptr));
  EXPECT_EQ(rank.get(at, 4), (std::vector<float>{11, 22, 33, 44}));
  ASSERT_EQ(rank.device->accumulate(rank.gpu, at, host, STRATA_F32, 4, nullptr), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("alloc_pinned"));
  EXPECT_EQ(rank.device->fill(rank.gpu, host, 0, sizeof host, nullptr), STRATA_INVALID_ARGUMENT);
}

TEST_F(GpuSim, RefusesWrongArgumentsAtTheCall) {
  const strata_stream on = rank.stream();
  auto* x = rank.alloc<float>(4096);
  double sums[2];
  int64_t index;
  const auto* d = rank.device;
  const auto refused = [](strata_status code, const std::string& word) {
    EXPECT_EQ(code, STRATA_INVALID_ARGUMENT);
    EXPECT_THAT(reason(code), HasSubstr(word));
  };
  refused(d->cast(rank.gpu, x, STRATA_U8, x, STRATA_F32, 1, STRATA_ROUND_EVEN, &on), "dtype 4");
  refused(d->cast(rank.gpu, x, STRATA_F32, x, STRATA_F32, 1, 2, &on), "rounding 2");
  refused(d->accumulate(rank.gpu, x, nullptr, STRATA_F32, 1, &on), "NULL");
  refused(d->square_sums(rank.gpu, x, STRATA_F32, 2047, sums, &on), "2047");
  refused(d->square_sums(rank.gpu, x, STRATA_F32, 2048, reinterpret_cast<double*>(x), &on), "sums");
  refused(d->find_nonfinite(rank.gpu, x, STRATA_I64, 1, &index, &on), "dtype 6");
  refused(d->fill(rank.gpu, nullptr, 0, 4, &on), "NULL");
  strata_stream foreign = on;
  foreign.native = &foreign;
  refused(d->copy(rank.gpu, x, x + 1024, 4, &foreign), "stream");
  EXPECT_TRUE(rank.wait(on).ok());
}

// The kernels are device_host's; what could differ is how they are called.
TEST_F(GpuSim, ComputesTheBitsOfDeviceHost) {
  const auto* host_api = load<strata_device_api>("device_host", STRATA_DEVICE);
  strata_device* host = nullptr;
  strata_open_args host_args = rank.args;
  host_args.options = nullptr;
  ASSERT_DONE(host_api->open(&host_args, &host));
  constexpr uint64_t kCount = 3 * STRATA_NORM_BLOCK;
  std::mt19937 random(1);
  std::vector<uint32_t> x(kCount), y(kCount);
  for (uint64_t i = 0; i < kCount; ++i) x[i] = static_cast<uint32_t>(random()), y[i] = static_cast<uint32_t>(random());
  const strata_stream on = rank.stream();
  for (strata_dtype from : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
    uint32_t *in = rank.put(x), *out = rank.put(y);
    auto* sum = reinterpret_cast<float*>(rank.put(y));
    std::vector<uint32_t> want = y, want_sum = y;
    for (strata_dtype to : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
      for (strata_rounding rounding : {STRATA_ROUND_EVEN, STRATA_ROUND_AWAY}) {
        ASSERT_DONE(rank.device->cast(rank.gpu, out, to, in, from, kCount, rounding, &on));
        ASSERT_DONE(host_api->cast(host, want.data(), to, x.data(), from, kCount, rounding, nullptr));
        ASSERT_TRUE(rank.wait(on).ok());
        EXPECT_EQ(rank.get(out, kCount), want) << from << " to " << to;
      }
    }
    ASSERT_DONE(rank.device->accumulate(rank.gpu, sum, in, from, kCount, &on));
    ASSERT_DONE(host_api->accumulate(host, reinterpret_cast<float*>(want_sum.data()), x.data(), from, kCount, nullptr));
    double sums[3], want_sums[3];
    ASSERT_DONE(rank.device->square_sums(rank.gpu, in, from, kCount, sums, &on));
    ASSERT_DONE(host_api->square_sums(host, x.data(), from, kCount, want_sums, nullptr));
    int64_t index, want_index;
    ASSERT_DONE(rank.device->find_nonfinite(rank.gpu, in, from, kCount, &index, &on));  // waits for all of them
    ASSERT_DONE(host_api->find_nonfinite(host, x.data(), from, kCount, &want_index, nullptr));
    EXPECT_EQ(rank.get(reinterpret_cast<uint32_t*>(sum), kCount), want_sum);
    EXPECT_EQ(std::memcmp(sums, want_sums, sizeof sums), 0);
    EXPECT_EQ(index, want_index);
  }
  host_api->close(host);
}

// --- streams --------------------------------------------------------------------------------------------------------

TEST_F(GpuSim, AStreamIsLaterThanTheCallAndKeepsOrder) {
  const strata_stream on = rank.stream();
  auto* at = rank.put<int>({7});
  int host = 0;
  {
    Gate gate(rank, on);
    enqueue_copy(&host, at, sizeof host, on);
    const Event event = record(rank, on);
    EXPECT_EQ(host, 0);
    EXPECT_FALSE(event->is_set());
    gate.open();
    EXPECT_TRUE(wait(event).ok());
    EXPECT_EQ(host, 7);
  }
  std::vector<int> numbers(200);
  for (int k = 0; k < 200; ++k) numbers[static_cast<size_t>(k)] = k;
  for (const int& number : numbers) enqueue_copy(at, &number, sizeof number, on);
  EXPECT_TRUE(rank.wait(on).ok());
  EXPECT_EQ(rank.get(at, 1)[0], 199);
}

TEST_F(GpuSim, StreamsDoNotWaitForEachOtherAndNoStreamIsNow) {
  const strata_stream held = rank.stream(), free = rank.stream();
  auto* at = rank.put<int>({1});
  int late = 2, early = 3;
  Gate gate(rank, held);
  enqueue_copy(at, &late, sizeof late, held);
  enqueue_copy(at, &early, sizeof early, free);
  EXPECT_TRUE(rank.wait(free).ok());
  EXPECT_EQ(rank.get(at, 1)[0], 3);  // without a stream, and done
  gate.open();
  EXPECT_TRUE(rank.wait(held).ok());
  EXPECT_EQ(rank.get(at, 1)[0], 2);
  const strata_stream cpu{sizeof(cpu), STRATA_ABI_MINOR, STRATA_CPU, 0, nullptr};
  EXPECT_TRUE(record(rank, cpu)->is_set());
  EXPECT_TRUE(rank.wait(cpu).ok());
}

TEST(GpuSimDelay, ChangesNothingWhereEveryWaitIsThere) {
  SimRank rank({{"delay_us", 300}, {"seed", 5}});
  rank.open_device();
  const strata_stream writer = rank.stream(), reader = rank.stream();
  strata_marker* ready = nullptr;
  ASSERT_DONE(rank.device->marker_create(rank.gpu, &ready));
  auto *from = rank.put<int>({0}), *to = rank.put<int>({0});
  std::vector<int> numbers(50), got(50);
  for (int k = 0; k < 50; ++k) {
    const auto i = static_cast<size_t>(k);
    numbers[i] = k;
    ASSERT_DONE(rank.device->copy(rank.gpu, from, &numbers[i], 4, &writer));
    ASSERT_DONE(rank.device->marker_record(rank.gpu, ready, &writer));
    ASSERT_DONE(rank.device->stream_wait_marker(rank.gpu, &reader, ready));
    ASSERT_DONE(rank.device->copy(rank.gpu, to, from, 4, &reader));
    ASSERT_DONE(rank.device->copy(rank.gpu, &got[i], to, 4, &reader));
    ASSERT_DONE(rank.device->marker_record(rank.gpu, ready, &reader));
    ASSERT_DONE(rank.device->stream_wait_marker(rank.gpu, &writer, ready));
  }
  EXPECT_TRUE(rank.wait(reader).ok());
  EXPECT_EQ(got, numbers);
}

TEST_F(GpuSim, CloseDoesWhatIsQueued) {
  const strata_stream one = rank.stream(), two = rank.stream();
  int done = 0;
  const int number = 9;
  strata_marker* point = marker();
  Gate gate(rank, two);
  record_marker(point, two);
  wait_marker(one, point);
  enqueue_copy(&done, &number, sizeof done, one);
  std::thread opener([&] { gate.open(); });
  rank.close_device();
  opener.join();
  EXPECT_EQ(done, 9);
}

TEST(GpuSimHold, EndsAtTheDeadlineAndFailsTheDevice) {
  SimRank rank;
  rank.args.deadline_ns = 20'000'000;
  rank.open_device();
  const strata_stream on = rank.stream();
  Gate gate(rank, on);
  const Status failed = rank.wait(on);
  EXPECT_EQ(failed.code(), STRATA_DEADLINE_EXCEEDED);
  EXPECT_THAT(failed.text(), HasSubstr("hold"));
}

// --- markers --------------------------------------------------------------------------------------------------------

TEST_F(GpuSim, AMarkerOrdersTwoStreams) {
  const strata_stream first = rank.stream(), second = rank.stream();
  auto *from = rank.put<int>({1}), *to = rank.put<int>({0});
  const int number = 5;
  strata_marker* point = marker();
  Gate gate(rank, first);
  enqueue_copy(from, &number, sizeof number, first);
  record_marker(point, first);
  wait_marker(second, point);
  enqueue_copy(to, from, sizeof number, second);
  const Event event = record(rank, second);
  EXPECT_FALSE(event->is_set());
  gate.open();
  EXPECT_TRUE(wait(event).ok());
  EXPECT_EQ(rank.get(to, 1)[0], 5);
}

TEST_F(GpuSim, TimedMarkersTellWhenTheyWereReached) {
  const strata_stream on = rank.stream();
  strata_marker *first = nullptr, *last = nullptr;
  int64_t ns = -1;
  ASSERT_DONE(rank.device->marker_create_timed(rank.gpu, &first));
  ASSERT_DONE(rank.device->marker_create_timed(rank.gpu, &last));
  EXPECT_EQ(rank.device->marker_elapsed(rank.gpu, first, last, &ns), STRATA_INVALID_ARGUMENT) << "not recorded";
  record_marker(first, on);
  EXPECT_TRUE(rank.wait(on).ok());
  {
    Gate gate(rank, on);
    record_marker(last, on);
    EXPECT_EQ(rank.device->marker_elapsed(rank.gpu, first, last, &ns), STRATA_AGAIN);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    gate.open();
  }
  EXPECT_TRUE(rank.wait(on).ok());
  ASSERT_DONE(rank.device->marker_elapsed(rank.gpu, first, last, &ns));
  EXPECT_GE(ns, 2'000'000);
  ASSERT_DONE(rank.device->marker_elapsed(rank.gpu, last, last, &ns));
  EXPECT_EQ(ns, 0);
  strata_marker* plain = marker();
  record_marker(plain, on);
  EXPECT_TRUE(rank.wait(on).ok());
  EXPECT_EQ(rank.device->marker_elapsed(rank.gpu, first, plain, &ns), STRATA_INVALID_ARGUMENT) << "not timed";
}

TEST_F(GpuSim, AMarkerThatWasNeverRecordedIsPassed) {
  const strata_stream on = rank.stream();
  strata_marker* point = marker();
  wait_marker(on, point);
  EXPECT_TRUE(rank.wait(on).ok());
  EXPECT_EQ(rank.device->marker_wait_host(rank.gpu, point), STRATA_OK);
  rank.device->marker_destroy(rank.gpu, point);
  rank.device->marker_destroy(rank.gpu, nullptr);
}

TEST_F(GpuSim, RecordingAgainForgetsForLaterWaitsOnly) {
  const strata_stream held = rank.stream(), free = rank.stream(), before = rank.stream(), after = rank.stream();
  strata_marker* point = marker();
  Gate gate(rank, held);
  record_marker(point, held);
  wait_marker(before, point);
  const Event waits_for_the_first = record(rank, before);
  record_marker(point, free);
  wait_marker(after, point);
  EXPECT_TRUE(rank.wait(after).ok());
  EXPECT_EQ(rank.device->marker_wait_host(rank.gpu, point), STRATA_OK);
  EXPECT_FALSE(waits_for_the_first->is_set());
  rank.device->marker_destroy(rank.gpu, point);  // what waits for its point goes on waiting
  gate.open();
  EXPECT_TRUE(wait(waits_for_the_first).ok());
}

}  // namespace
}  // namespace strata::test
