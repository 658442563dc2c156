// comm_nccl on two GPUs, ranks as processes and calls on streams: what is enqueued is right, and what cannot end is
// ended, with the reason, on every rank. Each rank is a forked process; the test itself never touches CUDA.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>

#include "ranks.h"
#include "reference.h"

namespace strata::test {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

// One rank's GPU, streams and short calls.
struct Gpu {
  explicit Gpu(Peer* p) : peer(p) {
    cudaSetDevice(peer->rank.args().rank);
    for (cudaStream_t& s : streams) cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
  }

  template <class T>
  T* alloc(uint64_t count) {
    void* out = nullptr;
    if (!take_failure(peer->api->alloc(peer->comm, count * sizeof(T), &out)).ok()) std::abort();
    return static_cast<T*>(out);
  }

  Status enqueue(Peer::Slot slot, const std::vector<strata_coll_item>& items, int stream, uint64_t tag = 1,
                 const char* label = "gather layer3", int64_t deadline_ns = -1, strata_event* done = nullptr) {
    const strata_stream on = {sizeof(on), STRATA_ABI_MINOR, STRATA_CUDA, peer->rank.args().rank, streams[stream]};
    strata_coll_args args = peer->args(items, tag, label);
    args.stream = &on;
    args.deadline_ns = deadline_ns;
    return take_failure(slot(peer->comm, &args, done));
  }

  // Waits until every stream is idle and nothing failed, or until the instance says why not.
  std::string outcome() {
    for (cudaStream_t s : streams) {
      for (int k = 0; k < 20'000 && cudaStreamQuery(s) == cudaErrorNotReady; ++k) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      if (cudaStreamQuery(s) != cudaSuccess)
        return "a stream did not end: " + std::string(cudaGetErrorString(cudaStreamQuery(s)));
    }
    return "";
  }

  // The failure, once it is known.
  std::string failure() {
    char byte = 0, both[2];
    for (int k = 0; k < 20'000; ++k) {
      strata_coll_args args = peer->args({}, 99, "ask");
      const Status s = take_failure(peer->api->exchange(peer->comm, &byte, both, 1, &args));
      if (!s.ok()) return std::string(status_name(s.code())) + ": " + s.text();
    }
    return "no failure";
  }

  Peer* peer;
  cudaStream_t streams[2] = {};
};

using Body = std::function<std::string(Gpu& gpu, int rank, Processes& self)>;

std::string one_rank(int rank, const std::string& job, const Body& body, Processes& self, bool deterministic) {
  Peer peer({"comm_nccl", false, 2}, rank, job);
  Options options;
  options.set("deterministic_reduce", deterministic);
  RETURN_IF_BAD(expect_ok(peer.open(&options)));
  Gpu gpu(&peer);
  return body(gpu, rank, self);
}

void run_two(const Body& body, bool deterministic = false) {
  const std::string job = fresh_job();
  Processes ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&, r](Processes& self) { return one_rank(r, job, body, self, deterministic); });
  }
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.line(r), "") << "rank " << r;
}

std::string lacks(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) return "no \"" + part + "\" in: " + text;
  }
  return "";
}

TEST(CommNcclGpu, MemoryIsAlignedAndZero) {
  run_two([](Gpu& gpu, int, Processes&) -> std::string {
    for (uint64_t count : {uint64_t{1}, uint64_t{5'000'000}}) {
      auto* at = gpu.alloc<char>(count);
      if (reinterpret_cast<uintptr_t>(at) % 4096 != 0) return "not aligned";
      std::vector<char> bytes(count, 1);
      cudaMemcpy(bytes.data(), at, count, cudaMemcpyDefault);
      if (bytes != std::vector<char>(count)) return "not zero";
      gpu.peer->api->free(gpu.peer->comm, at);
    }
    return "";
  });
}

// Gathers and reductions side by side on two streams, many times, and their events.
TEST(CommNcclGpu, StreamsRunSideBySide) {
  run_two([](Gpu& gpu, int rank, Processes&) -> std::string {
    const uint64_t count = 1 << 20;
    auto* gathered = gpu.alloc<float>(2 * count);
    auto* grads = gpu.alloc<float>(2 * count);
    auto* reduced = gpu.alloc<float>(count);
    std::vector<float> mine(count, static_cast<float>(rank + 1)), both(2 * count, static_cast<float>(rank + 3));
    cudaMemcpy(gathered + rank * count, mine.data(), count * 4, cudaMemcpyDefault);
    cudaMemcpy(grads, both.data(), 2 * count * 4, cudaMemcpyDefault);
    for (int k = 0; k < 50; ++k) {
      Event done = Event::create();
      const auto* api = gpu.peer->api;
      RETURN_IF_BAD(expect_ok(
          gpu.enqueue(api->all_gather, {item(gathered + rank * count, gathered, count, STRATA_F32, STRATA_F32)}, 0)));
      RETURN_IF_BAD(expect_ok(gpu.enqueue(api->reduce_scatter, {item(grads, reduced, count, STRATA_F32, STRATA_F32)}, 1,
                                          2, "reduce layer3", -1, done.get())));
      RETURN_IF_BAD(expect_ok(done->wait(std::chrono::seconds(20))));
    }
    RETURN_IF_BAD(gpu.outcome());
    cudaMemcpy(both.data(), gathered, 2 * count * 4, cudaMemcpyDefault);
    cudaMemcpy(mine.data(), reduced, count * 4, cudaMemcpyDefault);
    if (both.front() != 1.0f || both.back() != 2.0f) return "gathered " + std::to_string(both.back());
    return mine.front() == 7.0f && mine.back() == 7.0f ? "" : "reduced " + std::to_string(mine.back());
  });
}

// NCCL's own sum of two is the sum of the contract: every 16-bit pattern with another, but for what is NaN.
TEST(CommNcclGpu, TwoRanksNeedNoOrder) {
  run_two([](Gpu& gpu, int rank, Processes&) -> std::string {
    strata_collective_caps caps{};
    caps.struct_size = sizeof(caps);
    RETURN_IF_BAD(expect_ok(take_failure(gpu.peer->api->caps(gpu.peer->comm, &caps))));
    if (!(caps.flags & STRATA_COLL_FIXED_ORDER)) return "no FIXED_ORDER at 2 ranks";
    const uint64_t count = 1 << 20;
    for (strata_dtype dtype : {STRATA_BF16, STRATA_F16}) {
      std::vector<std::vector<uint8_t>> inputs;
      for (int r = 0; r < 2; ++r) {
        inputs.emplace_back(count * 2);
        for (uint64_t i = 0; i < count; ++i) {
          const uint64_t bits = r == 0 ? i : i * 40'503 + (i >> 16) * 7'919 + 77;
          const uint16_t half = static_cast<uint16_t>(bits);
          std::memcpy(&inputs.back()[i * 2], &half, 2);
        }
      }
      auto* in = gpu.alloc<uint16_t>(count);
      auto* out = gpu.alloc<uint16_t>(count);
      cudaMemcpy(in, inputs[static_cast<size_t>(rank)].data(), count * 2, cudaMemcpyDefault);
      RETURN_IF_BAD(expect_ok(gpu.enqueue(gpu.peer->api->all_reduce, {item(in, out, count, dtype, dtype)}, 0)));
      RETURN_IF_BAD(gpu.outcome());
      std::vector<uint8_t> got(count * 2);
      cudaMemcpy(got.data(), out, count * 2, cudaMemcpyDefault);
      const std::vector<uint8_t> want = reference_sum(inputs, dtype, dtype);
      for (uint64_t i = 0; i < count; ++i) {
        if (std::isnan(to_float(&want[i * 2], dtype)) && std::isnan(to_float(&got[i * 2], dtype))) continue;
        if (std::memcmp(&want[i * 2], &got[i * 2], 2) != 0)
          return "dtype " + std::to_string(dtype) + ", element " + std::to_string(i);
      }
    }
    return "";
  });
}

// Ranks that differ would wait for ever on the device.
TEST(CommNcclGpu, ADifferenceEndsTheStreamsAndIsNamed) {
  run_two([](Gpu& gpu, int rank, Processes&) -> std::string {
    const uint64_t count = 1 << 20;
    auto* in = gpu.alloc<float>(2 * count);
    auto* out = gpu.alloc<float>(2 * count);
    const auto* api = gpu.peer->api;
    Event done = Event::create();
    const Status started = rank == 0 ? gpu.enqueue(api->all_gather, {item(in, out, count, STRATA_F32, STRATA_F32)}, 0,
                                                   1, "gather layer3", -1, done.get())
                                     : gpu.enqueue(api->reduce_scatter, {item(in, out, count, STRATA_F32, STRATA_F32)},
                                                   0, 2, "reduce layer3", -1, done.get());
    const std::vector<std::string> parts = {"FAILED_PRECONDITION", "rank 0 is in all_gather [gather layer3]",
                                            "rank 1 in reduce_scatter [reduce layer3]"};
    if (started.ok()) {
      const Status ended = done->wait(std::chrono::seconds(20));
      RETURN_IF_BAD(lacks(std::string(status_name(ended.code())) + ": " + ended.text(), parts));
    }
    RETURN_IF_BAD(gpu.outcome());
    return lacks(gpu.failure(), parts);
  });
}

TEST(CommNcclGpu, AMissingRankIsNamedAtTheDeadline) {
  run_two([](Gpu& gpu, int rank, Processes&) -> std::string {
    auto* in = gpu.alloc<float>(1000);
    auto* out = gpu.alloc<float>(2000);
    if (rank == 0) {
      RETURN_IF_BAD(expect_ok(gpu.enqueue(gpu.peer->api->all_gather, {item(in, out, 1000, STRATA_F32, STRATA_F32)}, 0,
                                          1, "gather layer3", kSecond / 2)));
      RETURN_IF_BAD(gpu.outcome());
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    }
    return lacks(gpu.failure(), {"DEADLINE_EXCEEDED", "call 1, all_gather [gather layer3]", "rank 1", "is missing"});
  });
}

TEST(CommNcclGpu, AbortEndsWhatRuns) {
  run_two([](Gpu& gpu, int rank, Processes&) -> std::string {
    auto* in = gpu.alloc<float>(1000);
    auto* out = gpu.alloc<float>(2000);
    if (rank == 0) {
      RETURN_IF_BAD(
          expect_ok(gpu.enqueue(gpu.peer->api->all_gather, {item(in, out, 1000, STRATA_F32, STRATA_F32)}, 0)));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      gpu.peer->api->abort(gpu.peer->comm, STRATA_DATA_LOSS, "shard 3 cannot be read");
    }
    RETURN_IF_BAD(gpu.outcome());
    return lacks(gpu.failure(), {"shard 3 cannot be read", rank == 0 ? "CANCELLED" : "DATA_LOSS"});
  });
}

// Killed while gathers and reductions stream: the other ends by itself, names it, and its process ends.
TEST(CommNcclGpu, KillNineIsNamedAndTheProcessEnds) {
  for (int killed : {0, 1}) {
    const std::string job = fresh_job();
    Processes ranks;
    for (int r = 0; r < 2; ++r) {
      ranks.start([&, r](Processes& child) {
        return one_rank(
            r, job,
            [](Gpu& gpu, int, Processes& self) -> std::string {
              const uint64_t count = 8 << 20;
              auto* in = gpu.alloc<float>(2 * count);
              auto* out = gpu.alloc<float>(2 * count);
              auto* sum = gpu.alloc<float>(count);
              const auto* api = gpu.peer->api;
              for (int k = 0;; ++k) {
                Status s = gpu.enqueue(api->all_gather, {item(in, out, count, STRATA_F32, STRATA_F32)}, 0);
                if (s.ok())
                  s = gpu.enqueue(api->reduce_scatter, {item(in, sum, count, STRATA_F32, STRATA_F32)}, 1, 2,
                                  "reduce layer3");
                if (!s.ok()) {
                  const std::string streams = gpu.outcome();
                  gpu.peer->close();
                  self.say(streams.empty() ? std::string(status_name(s.code())) + ": " + s.text() : streams);
                  std::exit(0);  // as a program ends, with what CUDA and NCCL do then
                }
                if (k == 5) self.say("running");
                std::this_thread::sleep_for(std::chrono::milliseconds(2));
              }
            },
            child, false);
      });
    }
    for (int r = 0; r < 2; ++r) ASSERT_EQ(ranks.line(r), "running");
    ranks.signal(killed, SIGKILL);
    EXPECT_EQ(
        lacks(ranks.line(1 - killed), {"UNAVAILABLE", "call ", "layer3]", "rank " + std::to_string(killed), "died"}),
        "");
    EXPECT_EQ(ranks.line(1 - killed), "<ended>");
  }
}

// No bound is asserted; the figure is for the log.
TEST(CommNcclGpu, ExchangesTakeMicroseconds) {
  run_two([](Gpu& gpu, int rank, Processes&) -> std::string {
    char mine[64] = {}, both[128];
    const int rounds = 2'000;
    std::chrono::steady_clock::time_point begin;
    for (int k = -100; k < rounds; ++k) {
      if (k == 0) begin = std::chrono::steady_clock::now();
      strata_coll_args args = gpu.peer->args({}, 1, "norm");
      RETURN_IF_BAD(expect_ok(take_failure(gpu.peer->api->exchange(gpu.peer->comm, mine, both, sizeof(mine), &args))));
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (rank == 0) std::fprintf(stderr, "exchange of 64 bytes: %.1f us\n", took.count() / rounds);
    return "";
  });
}

}  // namespace
}  // namespace strata::test
