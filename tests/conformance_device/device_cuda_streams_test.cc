// device_cuda_streams_test.cc - order on streams and between them: markers, events of the host, copies both ways.
#include <gtest/gtest.h>

#include <thread>

#include "device_cuda_fixture.h"

namespace strata::test {
namespace {

using testing::HasSubstr;

constexpr uint64_t kBytes = uint64_t{64} << 20;

class CudaStreams : public CudaTest {
 protected:
  // Enough fills of `there` that what comes behind them has to wait; the last one is of `value`.
  void long_work(char* there, uint8_t value, const strata_stream& on) {
    for (int round = 0; round < 200; ++round) {
      ASSERT_EQ(api->fill(device, there, static_cast<uint8_t>(round), kBytes, &on), STRATA_OK);
    }
    ASSERT_EQ(api->fill(device, there, value, kBytes, &on), STRATA_OK);
  }
  strata_marker* marker() {
    strata_marker* out = nullptr;
    EXPECT_EQ(api->marker_create(device, &out), STRATA_OK);
    return out;
  }
  const strata_sync_api* sync =
      static_cast<const strata_sync_api*>(rank.host.c()->get_interface(rank.host.c()->ctx, STRATA_HOST_SYNC));
};

TEST_F(CudaStreams, AStreamWaitsForAMarkerOfAnother) {
  strata_stream producer = stream(), consumer = stream(-1);
  char *memory = alloc(kBytes), *seen = alloc_pinned(kBytes);
  strata_marker* produced = marker();
  for (uint8_t value = 1; value < 6; ++value) {  // recorded many times
    long_work(memory, value, producer);
    ASSERT_EQ(api->marker_record(device, produced, &producer), STRATA_OK);
    ASSERT_EQ(api->stream_wait_marker(device, &consumer, produced), STRATA_OK);
    ASSERT_EQ(api->copy(device, seen, memory, kBytes, &consumer), STRATA_OK);
    ASSERT_EQ(api->stream_wait_host(device, &consumer), STRATA_OK);
    EXPECT_EQ(seen[0], value);
    EXPECT_EQ(seen[kBytes - 1], value);
  }
  api->marker_destroy(device, produced);
  api->marker_destroy(device, nullptr);
  api->stream_destroy(device, &producer);
  EXPECT_EQ(producer.native, nullptr);  // `consumer` is left to close
}

TEST_F(CudaStreams, TheHostWaitsForAMarker) {
  const strata_stream work = stream();
  char *memory = alloc(kBytes), *seen = alloc_pinned(kBytes);
  strata_marker* done = marker();
  EXPECT_EQ(api->marker_wait_host(device, done), STRATA_OK);  // before its first record it is reached
  EXPECT_EQ(api->stream_wait_marker(device, &work, done), STRATA_OK);
  long_work(memory, 9, work);
  ASSERT_EQ(api->copy(device, seen, memory, kBytes, &work), STRATA_OK);
  ASSERT_EQ(api->marker_record(device, done, &work), STRATA_OK);
  ASSERT_EQ(api->marker_wait_host(device, done), STRATA_OK);
  EXPECT_EQ(seen[kBytes - 1], 9);
  // A caller without a stream: the call returns when the marker is reached.
  long_work(memory, 10, work);
  ASSERT_EQ(api->copy(device, seen, memory, kBytes, &work), STRATA_OK);
  ASSERT_EQ(api->marker_record(device, done, &work), STRATA_OK);
  ASSERT_EQ(api->stream_wait_marker(device, nullptr, done), STRATA_OK);
  EXPECT_EQ(seen[kBytes - 1], 10);
  api->marker_destroy(device, done);
}

TEST_F(CudaStreams, TimedMarkersTellWhenTheyWereReached) {
  const strata_stream work = stream();
  char* memory = alloc(kBytes);
  strata_marker *first = nullptr, *last = nullptr;
  ASSERT_EQ(api->marker_create_timed(device, &first), STRATA_OK);
  ASSERT_EQ(api->marker_create_timed(device, &last), STRATA_OK);
  ASSERT_EQ(api->marker_record(device, first, &work), STRATA_OK);
  long_work(memory, 9, work);
  ASSERT_EQ(api->marker_record(device, last, &work), STRATA_OK);
  int64_t ns = -1;
  EXPECT_EQ(api->marker_elapsed(device, first, last, &ns), STRATA_AGAIN) << "200 fills of 64 MiB are not done yet";
  ASSERT_EQ(api->marker_wait_host(device, last), STRATA_OK);
  ASSERT_EQ(api->marker_elapsed(device, first, last, &ns), STRATA_OK);
  EXPECT_GT(ns, 0);
  ASSERT_EQ(api->marker_elapsed(device, last, last, &ns), STRATA_OK);
  EXPECT_EQ(ns, 0);
  api->marker_destroy(device, first);
  api->marker_destroy(device, last);
}

TEST_F(CudaStreams, AnEventIsSetWhenTheWorkBeforeItIsDone) {
  const strata_stream work = stream();
  char *memory = alloc(kBytes), *seen = alloc_pinned(kBytes);
  for (uint8_t value = 1; value < 4; ++value) {
    strata_event* event = sync->create(rank.host.c()->ctx);
    long_work(memory, value, work);
    ASSERT_EQ(api->copy(device, seen, memory, kBytes, &work), STRATA_OK);
    ASSERT_EQ(api->stream_record(device, &work, event), STRATA_OK);
    ASSERT_EQ(sync->wait(event, 60'000'000'000), STRATA_OK);
    EXPECT_EQ(seen[kBytes - 1], value);
    sync->release(event);
  }
  strata_event* idle = sync->create(rank.host.c()->ctx);  // nothing before it; a caller without a stream
  ASSERT_EQ(api->stream_record(device, nullptr, idle), STRATA_OK);
  EXPECT_EQ(sync->wait(idle, 60'000'000'000), STRATA_OK);
  sync->release(idle);
}

// A device's error is for ever, so this test runs itself in a process of its own.
TEST_F(CudaStreams, ADevicesErrorReachesTheEventBehindIt) {
  if (!std::getenv("STRATA_TEST_BREAK_GPU")) {
    EXPECT_EQ(run_alone("STRATA_TEST_BREAK_GPU=1", "*ADevicesErrorReachesTheEvent*"), 0);
    return;
  }
  const strata_stream work = stream();
  char* memory = alloc(kBytes);
  strata_event* event = sync->create(rank.host.c()->ctx);
  long_work(memory, 1, work);
  constexpr uint64_t kBeyond = uint64_t{1} << 34;  // elements: far past everything that is mapped
  ASSERT_EQ(api->cast(device, memory, STRATA_F32, memory, STRATA_F32, kBeyond, STRATA_ROUND_EVEN, &work), STRATA_OK);
  ASSERT_EQ(api->stream_record(device, &work, event), STRATA_OK);
  ASSERT_EQ(sync->wait(event, 60'000'000'000), STRATA_INTERNAL);
  EXPECT_THAT(reason(STRATA_INTERNAL), HasSubstr("device_cuda: work of a stream: cudaError"));
  sync->release(event);
  EXPECT_EQ(api->fill(device, memory, 2, kBytes, &work), STRATA_INTERNAL);
  EXPECT_THAT(reason(STRATA_INTERNAL), HasSubstr("cudaError"));
  EXPECT_EQ(api->stream_wait_host(device, &work), STRATA_INTERNAL);
}

TEST_F(CudaStreams, CopiesGoBothWaysAtOnce) {
  const strata_stream up = stream(), down = stream();
  char *a = alloc(kBytes), *b = alloc(kBytes), *in = alloc_pinned(kBytes), *out = alloc_pinned(kBytes);
  for (uint64_t i = 0; i < kBytes; ++i) in[i] = static_cast<char>(i * 31 + i / 4096);
  ASSERT_EQ(api->fill(device, b, 0x77, kBytes, nullptr), STRATA_OK);
  for (int round = 0; round < 20; ++round) {
    ASSERT_EQ(api->copy(device, a, in, kBytes, &up), STRATA_OK);
    ASSERT_EQ(api->copy(device, out, b, kBytes, &down), STRATA_OK);
  }
  ASSERT_EQ(api->stream_wait_host(device, &down), STRATA_OK);
  ASSERT_EQ(api->stream_wait_host(device, &up), STRATA_OK);
  EXPECT_EQ(std::memcmp(get<char>(a, kBytes).data(), in, kBytes), 0);
  EXPECT_EQ(out[0], 0x77);
  EXPECT_EQ(out[kBytes - 1], 0x77);
}

TEST_F(CudaStreams, ThreadsUseTheirOwnStreams) {
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 1; t <= 4; ++t) {
    threads.emplace_back([&, t] {
      const strata_stream mine = stream(t % 2 - 1);
      char *memory = alloc(1 << 20), *seen = alloc_pinned(1 << 20);
      for (int round = 0; round < 50; ++round) {
        const auto value = static_cast<uint8_t>(t * 50 + round);
        if (api->fill(device, memory, value, 1 << 20, &mine) != STRATA_OK) ++wrong;
        if (api->copy(device, seen, memory, 1 << 20, &mine) != STRATA_OK) ++wrong;
        if (api->stream_wait_host(device, &mine) != STRATA_OK) ++wrong;
        if (static_cast<uint8_t>(seen[(1 << 20) - 1]) != value) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(CudaStreams, LegacyStreamIsLegalAndNullIsNot) {
  char* memory = alloc(64);
  strata_stream legacy{sizeof(strata_stream), STRATA_ABI_MINOR, STRATA_CUDA, 0, reinterpret_cast<void*>(1)};
  ASSERT_EQ(api->fill(device, memory, 3, 64, &legacy), STRATA_OK);
  ASSERT_EQ(api->stream_wait_host(device, &legacy), STRATA_OK);
  EXPECT_EQ(get<char>(memory, 64)[63], 3);
  legacy.native = nullptr;
  ASSERT_EQ(api->fill(device, memory, 3, 64, &legacy), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("CU_STREAM_LEGACY"));
  legacy.native = reinterpret_cast<void*>(1);
  legacy.device_id = 5;
  ASSERT_EQ(api->fill(device, memory, 3, 64, &legacy), STRATA_INVALID_ARGUMENT);
  EXPECT_THAT(reason(STRATA_INVALID_ARGUMENT), HasSubstr("the stream is of GPU 5, this is GPU 0"));
}

TEST_F(CudaStreams, DestroyingAForeignStreamIsIgnoredAndSaid) {
  strata_stream foreign{sizeof(strata_stream), STRATA_ABI_MINOR, STRATA_CUDA, 0, reinterpret_cast<void*>(2)};
  api->stream_destroy(device, &foreign);
  ASSERT_FALSE(rank.log_lines.empty());
  EXPECT_THAT(rank.log_lines.back(), HasSubstr("stream_create"));
}

}  // namespace
}  // namespace strata::test
