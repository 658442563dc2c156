// ranks.h - several ranks of one collective plugin, as threads or as forked processes, inside one test.
//
// A rank's body is a function that returns "" or what went wrong; bodies of forked ranks cannot use gtest's EXPECT,
// because their results would stay in the child. Forked ranks talk to the test through a pipe: they may say() lines
// while they run, and their return value is the last line.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "strata/iface/collective.h"
#include "tests/support/plugin_fixture.h"

namespace strata::test {

class Peer;

// For a plugin that works on a device's memory: tests keep to host memory, and this takes each call's buffers there and
// back.
class Mirror {
 public:
  virtual ~Mirror() = default;
  virtual void* alloc(uint64_t bytes) = 0;  // host memory
  virtual Status call(Peer& peer, decltype(strata_collective_api::all_gather) slot, std::vector<strata_coll_item> items,
                      strata_coll_args args) = 0;
};

// One way of running the tests; add a plugin to all_setups() (setups.cc) and every test runs with it.
struct Setup {
  std::string plugin;
  bool threads;
  int world;
  std::function<Options()> options = {};                    // for ranks that open without options of their own
  std::function<std::unique_ptr<Mirror>(int)> mirror = {};  // of a rank
};
std::ostream& operator<<(std::ostream& out, const Setup& setup);
std::vector<Setup> all_setups(const std::vector<int>& worlds);
std::string setup_name(const Setup& setup);

// What the tests of all setups are of.
class CollectiveTest : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override {
    if (const std::string missing = missing_host_interface(GetParam().plugin); !missing.empty())
      GTEST_SKIP() << missing;
  }
};

// A job name no other test uses, also when tests run side by side.
std::string fresh_job();

// One rank: its host services, its instance, and short forms of the calls.
class Peer {
 public:
  Peer(const Setup& setup, int rank, const std::string& job, unsigned host_threads = 1);
  ~Peer() { close(); }

  Status open(Options* options = nullptr);
  Status open_with(strata_open_args args);
  void close();
  void* alloc(uint64_t bytes);  // aborts the test program when it fails
  template <class T>
  T* alloc(uint64_t count) {
    return static_cast<T*>(alloc(count * sizeof(T)));
  }

  using Slot = decltype(strata_collective_api::all_gather);
  strata_coll_args args(const std::vector<strata_coll_item>& items, uint64_t tag, const char* label) const;
  Status call(Slot slot, const std::vector<strata_coll_item>& items, uint64_t tag = 1, const char* label = "test",
              int32_t root = 0);
  Status barrier(const char* label = "barrier", int64_t deadline_ns = -1);

  const strata_collective_api* api;
  strata_comm* comm = nullptr;
  std::function<std::unique_ptr<Mirror>()> make_mirror;  // for an instance; none where the plugin needs none
  std::unique_ptr<Mirror> mirror;
  Options options;
  Rank rank;
  Host host;
  strata_open_args base;
};

strata_coll_item item(const void* in, void* out, uint64_t count, strata_dtype in_dtype, strata_dtype out_dtype);

// Forked ranks. The destructor kills and reaps what is left.
class Processes {
 public:
  using Body = std::function<std::string(Processes& self)>;
  ~Processes();
  int start(const Body& body);        // index of the process
  void say(const std::string& line);  // in a child
  std::string line(int index);        // next line of a child; "<nothing in 30 s>" or "<ended>" when there is none
  void signal(int index, int number);
  void reap(int index);
  pid_t pid(int index) const { return children_[static_cast<size_t>(index)].pid; }

 private:
  struct Child {
    pid_t pid = -1;
    int pipe = -1;
    std::string buffer;
    bool reaped = false;
  };
  std::vector<Child> children_;
  int out_ = -1;
};

// Opens every rank of the setup, runs the body in each, and expects "" from all.
using RankBody = std::function<std::string(Peer& peer, int rank)>;
void run_ranks(const Setup& setup, const RankBody& body, unsigned host_threads = 1, Options* options = nullptr);

// "" when the status has this code and its text has every part; else what it was.
std::string expect_error(const Status& status, strata_status code, const std::vector<std::string>& parts);
std::string expect_ok(const Status& status);

// A count that threads and forked processes share.
class SharedCount {
 public:
  SharedCount()
      : at_(static_cast<std::atomic<int>*>(
            ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {}
  ~SharedCount() { ::munmap(at_, 4096); }
  void add() { at_->fetch_add(1); }
  void wait_for(int count) const {
    while (at_->load() < count) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  std::atomic<int>* at_;
};

}  // namespace strata::test

#define RETURN_IF_BAD(expr)                                    \
  do {                                                         \
    if (std::string bad_ = (expr); !bad_.empty()) return bad_; \
  } while (0)
