// gpu_sim_fixture.h - a rank with a simulated GPU: plugins come through the real loader, so that gpu_sim finds what it
// wraps the way it does in a run.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/plugins/event.h"
#include "core/plugins/plugins.h"
#include "gpu_sim_control.h"
#include "strata/iface/collective.h"
#include "tests/support/plugin_fixture.h"

namespace strata::test {

inline std::string fresh_job() {
  static std::atomic<int> number{0};
  return "gpu_sim." + std::to_string(getpid()) + "." + std::to_string(++number);
}

inline std::string reason(strata_status code) { return take_failure(code).text(); }

#define ASSERT_DONE(call)                                      \
  do {                                                         \
    const strata_status code_ = (call);                        \
    ASSERT_EQ(code_, STRATA_OK) << take_failure(code_).text(); \
  } while (0)

// One rank. What it opened is closed when it goes: first the collective, then the device.
class SimRank {
 public:
  using Settings = std::vector<std::pair<std::string, int64_t>>;
  explicit SimRank(const Settings& settings = {}, const std::string& job = fresh_job(), int rank = 0, int world = 1)
      : set(search(), {{"gpu_sim", options(settings)}}),
        host([](strata_log_level, const std::string&, const std::string&) {}, STRATA_LOG_DEBUG, 2, &set),
        job_(job) {
    args.struct_size = sizeof(args);
    args.host = host.c();
    args.job = job_.c_str();
    args.rank = args.local_rank = rank;
    args.world = args.local_world = world;
    args.threads = 1;
    args.deadline_ns = 20'000'000'000;
  }
  ~SimRank() {
    close_comm();
    close_device();
  }
  void close_comm() {
    if (self) comm->close(self);
    self = nullptr;
  }
  void close_device() {
    if (gpu) device->close(gpu);
    gpu = nullptr;
  }
  // Opens the collective, then the device, as the engine does.
  void open(const std::string& collective = "gpu_sim") {
    open_comm(collective);
    if (!HasFailure()) open_device();
  }
  void open_device() {
    ASSERT_TRUE(set.find("gpu_sim", STRATA_DEVICE, &device).ok());
    ASSERT_TRUE(set.options("gpu_sim", &args.options).ok());
    ASSERT_DONE(device->open(&args, &gpu));
    control =
        load<strata_gpu_sim_control_api>(std::string(STRATA_TEST_PLUGIN_DIR) + "/gpu_sim.so", STRATA_GPU_SIM_CONTROL);
  }
  void open_comm(const std::string& collective) {
    ASSERT_TRUE(set.find(collective, STRATA_COLLECTIVE, &comm).ok());
    ASSERT_TRUE(set.options(collective, &args.options).ok());
    ASSERT_DONE(comm->open(&args, &self));
  }

  strata_stream stream() {
    strata_stream made{};
    EXPECT_EQ(device->stream_create(gpu, 0, &made), STRATA_OK);
    return made;
  }
  template <class T>
  T* alloc(uint64_t count) {
    void* at = nullptr;
    EXPECT_EQ(device->alloc(gpu, count * sizeof(T), &at), STRATA_OK);
    return static_cast<T*>(at);
  }
  // A device copy of host numbers, and the way back; both are done on return.
  template <class T>
  T* put(const std::vector<T>& numbers) {
    T* at = alloc<T>(numbers.size());
    EXPECT_EQ(device->copy(gpu, at, numbers.data(), numbers.size() * sizeof(T), nullptr), STRATA_OK);
    return at;
  }
  template <class T>
  std::vector<T> get(const T* at, uint64_t count) {
    std::vector<T> numbers(count);
    EXPECT_EQ(device->copy(gpu, numbers.data(), at, count * sizeof(T), nullptr), STRATA_OK);
    return numbers;
  }
  Status wait(const strata_stream& on) { return take_failure(device->stream_wait_host(gpu, &on)); }

  PluginSet set;
  Host host;
  strata_open_args args{};
  const strata_device_api* device = nullptr;
  strata_device* gpu = nullptr;
  const strata_gpu_sim_control_api* control = nullptr;
  const strata_collective_api* comm = nullptr;
  strata_comm* self = nullptr;

 private:
  static bool HasFailure() { return testing::Test::HasFatalFailure(); }
  static PluginSearch search() {
    PluginSearch search;
    search.directories = {STRATA_TEST_PLUGIN_DIR, std::string(STRATA_BUILD_DIR) + "/lib/plugins"};
    return search;
  }
  static std::vector<PluginOption> options(const Settings& settings) {
    std::vector<PluginOption> all;
    for (const auto& [key, value] : settings) all.push_back({key, value, "test"});
    return all;
  }

  std::string job_;
};

// Holds a stream until it is opened, at the latest when it goes.
class Gate {
 public:
  Gate(SimRank& rank, const strata_stream& on) {
    EXPECT_EQ(rank.control->hold(rank.gpu, &on, event_.get()), STRATA_OK);
  }
  ~Gate() { open(); }
  void open() { event_->set(Ok()); }

 private:
  Event event_ = Event::create();
};

// An event of everything on the stream so far.
inline Event record(SimRank& rank, const strata_stream& on) {
  Event event = Event::create();
  EXPECT_EQ(rank.device->stream_record(rank.gpu, &on, event.get()), STRATA_OK);
  return event;
}

// A test that waits longer has failed.
inline Status wait(const Event& event) { return event.get()->wait(std::chrono::seconds(30)); }

// Runs `body` in one thread per rank.
inline void as_ranks(int world, const SimRank::Settings& settings, const std::function<void(SimRank&, int)>& body,
                     const std::string& collective = "gpu_sim") {
  const std::string job = fresh_job();
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      SimRank rank(settings, job, r, world);
      rank.open(collective);
      if (rank.gpu) body(rank, r);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace strata::test
