// comm_nccl without a GPU: what NCCL and the device may do to it, by a fake of each (fake_nccl.h), and what it says
// where it cannot open. The operations themselves are the tests of conformance_collective (setups.cc).
//
// Ranks are threads with streams that are threads. Deadlines are long where an error must come without them.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "fake_nccl.h"
#include "fake_stream.h"
#include "ranks.h"

namespace strata::test {
namespace {

const std::string kFake = STRATA_TEST_PLUGIN_DIR "/comm_nccl_fake.so";

// The fake NCCL, its switches off when the test ends.
class CommNccl : public testing::Test {
 protected:
  CommNccl() {
    void* library = ::dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
    set_ = reinterpret_cast<fake::Set>(::dlsym(library, "fake_nccl_set"));
    get_ = reinterpret_cast<fake::Get>(::dlsym(library, "fake_nccl_get"));
  }
  ~CommNccl() override {
    for (const char* what :
         {"version", "alone", "hang", "hang_init", "hang_abort", "fail", "async_error", "no_memory"}) {
      set_(what, 0);
    }
  }
  void set(const char* what, int value = 1) const { set_(what, value); }
  int get(const char* what) const { return get_(what); }

 private:
  fake::Set set_;
  fake::Get get_;
};

// One rank with two streams.
struct Member {
  explicit Member(Peer* p) : peer(p) {}
  Status enqueue(Peer::Slot slot, const std::vector<strata_coll_item>& items, int stream = 0, uint64_t tag = 1,
                 const char* label = "gather layer3", int64_t deadline_ns = -1, strata_event* done = nullptr) {
    const strata_stream on = {sizeof(on), STRATA_ABI_MINOR, STRATA_CUDA, 0, &streams[stream]};
    strata_coll_args args = peer->args(items, tag, label);
    args.stream = &on;
    args.deadline_ns = deadline_ns;
    return take_failure(slot(peer->comm, &args, done));
  }
  Status gather(int64_t deadline_ns = -1, strata_event* done = nullptr) {
    return enqueue(peer->api->all_gather, {item(in, out, 64, STRATA_F32, STRATA_F32)}, 0, 1, "gather layer3",
                   deadline_ns, done);
  }
  Status reduce(strata_event* done = nullptr) {
    return enqueue(peer->api->reduce_scatter, {item(in, out, 64, STRATA_F32, STRATA_F32)}, 1, 2, "reduce layer3", -1,
                   done);
  }
  // The failure, once it is known.
  Status failure() {
    for (int k = 0; k < 4'000; ++k) {
      if (const Status s = gather(); !s.ok()) return s;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return {};
  }
  void drain() {
    for (fake::Stream& s : streams) s.drain();
  }
  Peer* peer;
  float in[256] = {}, out[256] = {};
  fake::Stream streams[2];
};

using Body = std::function<std::string(Member& member, int rank)>;

void run_two(const Body& body, Options options = Options(), int world = 2) {
  options.set("libnccl", FAKE_NCCL);
  run_ranks(
      {kFake, true, world},
      [&](Peer& peer, int rank) {
        Member member(&peer);
        std::string result = body(member, rank);
        peer.close();
        member.drain();
        return result;
      },
      1, &options);
}

void expect_parts(const std::string& said, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(said.find(part), std::string::npos) << part << " is not in: " << said;
}

// ---- streams ----

// A call returns although the other rank has not come; its event comes when both have.
TEST_F(CommNccl, ACallOnAStreamWaitsForNobody) {
  std::atomic<bool> returned{false};
  run_two([&](Member& member, int rank) -> std::string {
    for (int k = 0; k < 64; ++k) member.in[k] = static_cast<float>(rank + 1);
    if (rank == 1) {
      while (!returned) std::this_thread::yield();
    }
    Event done = Event::create();
    RETURN_IF_BAD(expect_ok(member.gather(-1, done.get())));
    returned = true;
    RETURN_IF_BAD(expect_ok(done->wait(std::chrono::seconds(20))));
    return member.out[0] == 1.0f && member.out[127] == 2.0f ? "" : "gathered wrongly";
  });
}

TEST_F(CommNccl, AGroupIsOneCallOfNccl) {
  int groups[2];
  for (int with_items : {0, 1}) {
    const int before = get("groups");
    run_two([&](Member& member, int) -> std::string {
      std::vector<strata_coll_item> items;
      for (int k = 0; k < 20; ++k) items.push_back(item(&member.in[k], &member.out[2 * k], 1, STRATA_F32, STRATA_F32));
      if (with_items) RETURN_IF_BAD(expect_ok(member.peer->call(member.peer->api->all_gather, items)));
      return expect_ok(member.peer->barrier());
    });
    groups[with_items] = get("groups") - before;
  }
  EXPECT_EQ(groups[1] - groups[0], 2) << "20 items are one group, of each of two ranks";
}

// ---- ends ----

TEST_F(CommNccl, ADifferenceEndsWhatIsOnTheDevice) {
  const int aborts = get("aborts"), registrations = get("registrations"), communicators = get("communicators");
  run_two([&](Member& member, int rank) -> std::string {
    const std::vector<std::string> parts = {"call 1: rank 0 is in all_gather [gather layer3]",
                                            "rank 1 in reduce_scatter [reduce layer3]"};
    Event done = Event::create();
    const Status started = rank == 0 ? member.gather(-1, done.get()) : member.reduce(done.get());
    if (started.ok()) {
      RETURN_IF_BAD(expect_error(done->wait(std::chrono::seconds(20)), STRATA_FAILED_PRECONDITION, parts));
    }
    RETURN_IF_BAD(expect_error(member.failure(), STRATA_FAILED_PRECONDITION, parts));
    member.drain();
    return expect_error(member.peer->barrier(), STRATA_FAILED_PRECONDITION, parts);
  });
  EXPECT_EQ(get("aborts") - aborts, 4) << "both communicators of both ranks";
  EXPECT_EQ(get("communicators"), communicators);
  EXPECT_EQ(get("registrations"), registrations);
}

TEST_F(CommNccl, WhatHangsOnTheDeviceEndsAtTheDeadline) {
  run_two([&](Member& member, int) -> std::string {
    RETURN_IF_BAD(expect_ok(member.peer->barrier()));
    set("hang");
    Event done = Event::create();
    RETURN_IF_BAD(expect_ok(member.gather(300'000'000, done.get())));
    RETURN_IF_BAD(expect_error(done->wait(std::chrono::seconds(20)), STRATA_DEADLINE_EXCEEDED,
                               {"call 2, all_gather [gather layer3]", "began on the device and was not done after"}));
    member.drain();
    return "";
  });
}

TEST_F(CommNccl, ACallThatWaitsEndsAtTheDeadline) {
  run_two([&](Member& member, int) -> std::string {
    RETURN_IF_BAD(expect_ok(member.peer->barrier()));
    set("hang");
    strata_coll_args args =
        member.peer->args({item(member.in, member.out, 64, STRATA_F32, STRATA_F32)}, 1, "gather layer3");
    std::vector<strata_coll_item> items = {item(member.in, member.out, 64, STRATA_F32, STRATA_F32)};
    args.items = items.data();
    args.deadline_ns = 300'000'000;
    return expect_error(take_failure(member.peer->api->all_gather(member.peer->comm, &args, nullptr)),
                        STRATA_DEADLINE_EXCEEDED, {"call 2, all_gather [gather layer3]", "not done after"});
  });
}

TEST_F(CommNccl, AMissingRankEndsWhatTheOthersEnqueued) {
  run_two([&](Member& member, int rank) -> std::string {
    const std::vector<std::string> parts = {"call 1, all_gather [gather layer3]: waited 0.200 s: rank 1 is missing"};
    if (rank == 0) {
      Event done = Event::create();
      RETURN_IF_BAD(expect_ok(member.gather(200'000'000, done.get())));
      RETURN_IF_BAD(expect_error(done->wait(std::chrono::seconds(20)), STRATA_DEADLINE_EXCEEDED, parts));
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(600));
    }
    return expect_error(member.failure(), STRATA_DEADLINE_EXCEEDED, parts);
  });
}

TEST_F(CommNccl, AnAbortThatDoesNotReturnIsLeftBehind) {
  const int communicators = get("communicators");
  run_two([&](Member& member, int rank) -> std::string {
    RETURN_IF_BAD(expect_ok(member.peer->barrier()));
    set("hang_abort");
    if (rank == 0) {
      RETURN_IF_BAD(expect_ok(member.peer->barrier()));
      member.peer->api->abort(member.peer->comm, STRATA_ABORTED, "enough");
      return expect_error(member.gather(), STRATA_ABORTED, {"enough"});
    }
    RETURN_IF_BAD(expect_ok(member.peer->barrier()));
    // Nothing is enqueued here: it would never end.
    return expect_error(member.peer->barrier(), STRATA_CANCELLED, {"rank 0 aborted: enough"});
  });
  EXPECT_GT(get("communicators"), communicators) << "the abort did return";
}

TEST_F(CommNccl, WhatNcclFindsItselfIsAFailureOfAllRanks) {
  run_two([&](Member& member, int) -> std::string {
    RETURN_IF_BAD(expect_ok(member.peer->barrier()));
    set("async_error", 6);
    RETURN_IF_BAD(expect_error(member.failure(), STRATA_INTERNAL, {"NCCL: a fake error", "the fake's last words"}));
    return "";
  });
}

TEST_F(CommNccl, ARefusedGroupIsAFailureOfAllRanks) {
  run_two([&](Member& member, int) -> std::string {
    RETURN_IF_BAD(expect_ok(member.peer->barrier()));
    set("fail");
    return expect_error(member.failure(), STRATA_INTERNAL, {"call 2, all_gather [gather layer3]: NCCL: a fake error"});
  });
}

TEST_F(CommNccl, ClosingWithWorkOnTheDeviceTellsTheOthers) {
  run_two([&](Member& member, int rank) -> std::string {
    RETURN_IF_BAD(expect_ok(member.peer->barrier()));
    set("hang");
    Event done = Event::create();
    const Status started = member.gather(-1, done.get());
    if (rank == 1) member.peer->close();
    // Rank 0 may come only when rank 1 has closed.
    const Status ended = started.ok() ? done->wait(std::chrono::seconds(20)) : started;
    return expect_error(ended, STRATA_CANCELLED, {"rank 1 closed before"});
  });
}

// NCCL "alone" does not need the other process; what is killed is a rank with work enqueued that cannot end. The other
// goes through exit like any program, also when an abort never returns.
TEST_F(CommNccl, KillNineIsNamedAndTheProcessEnds) {
  for (int killed : {0, 1, 2, 3}) {
    const bool stuck = killed > 1;
    const int victim = killed % 2, other = 1 - victim;
    const std::string job = fresh_job();
    Processes ranks;
    for (int r = 0; r < 2; ++r) {
      ranks.start([&, r](Processes& self) -> std::string {
        set("alone");
        Peer peer({kFake, false, 2}, r, job);
        Options options;
        options.set("libnccl", FAKE_NCCL);
        RETURN_IF_BAD(expect_ok(peer.open(&options)));
        auto* member = new Member(&peer);  // its streams may never end
        set("hang");
        set("hang_abort", stuck);
        Event done = Event::create();
        RETURN_IF_BAD(expect_ok(member->gather(-1, done.get())));
        self.say("waiting");
        const Status ended = done->wait(std::chrono::seconds(20));
        if (!stuck) member->drain();
        peer.close();
        self.say(std::string(status_name(ended.code())) + ": " + ended.text());
        std::exit(0);
      });
    }
    for (int r = 0; r < 2; ++r) ASSERT_EQ(ranks.line(r), "waiting");
    ranks.signal(victim, SIGKILL);
    expect_parts(ranks.line(other),
                 {"UNAVAILABLE", "call 1, all_gather [gather layer3]", "rank " + std::to_string(victim),
                  "pid " + std::to_string(ranks.pid(victim)), "died"});
    EXPECT_EQ(ranks.line(other), "<ended>");
  }
}

// ---- sums ----

// Adding from the last rank down shows in these numbers; the order is only promised where it is kept.
TEST_F(CommNccl, SumsAreInRankOrderOnlyWhereThatIsSaid) {
  for (bool deterministic : {false, true}) {
    for (int world : {2, 3}) {
      run_two(
          [&](Member& member, int rank) -> std::string {
            strata_collective_caps caps{};
            caps.struct_size = sizeof(caps);
            RETURN_IF_BAD(expect_ok(take_failure(member.peer->api->caps(member.peer->comm, &caps))));
            const bool said = caps.flags & STRATA_COLL_FIXED_ORDER;
            if (said != (deterministic || world == 2)) return "FIXED_ORDER is " + std::to_string(said);
            const float values[] = {1e8f, -1e8f, 1.0f};
            member.in[0] = values[rank];
            RETURN_IF_BAD(expect_ok(member.peer->call(member.peer->api->all_reduce,
                                                      {item(member.in, member.out, 1, STRATA_F32, STRATA_F32)})));
            float want = values[0];
            for (int r = 1; r < world; ++r) want += values[r];
            return (member.out[0] == want) == said ? "" : "the sum is " + std::to_string(member.out[0]);
          },
          Options().set("deterministic_reduce", deterministic), world);
    }
  }
}

// ---- memory ----

TEST_F(CommNccl, WithoutMemoryOfNcclPlainMemoryIsUsedAndSaidOnce) {
  set("no_memory");
  run_two([&](Member& member, int) -> std::string {
    for (int k = 0; k < 3; ++k) {
      auto* at = member.peer->alloc<char>(100'000);
      if (reinterpret_cast<uintptr_t>(at) % 4096 != 0) return "not aligned";
    }
    return expect_ok(member.peer->barrier());
  });
}

TEST_F(CommNccl, NothingIsLeftAfterClose) {
  const int registrations = get("registrations"), communicators = get("communicators");
  run_two([&](Member& member, int) -> std::string {
    member.peer->api->free(member.peer->comm, member.peer->alloc(5'000));
    (void)member.peer->alloc(5'000);
    return expect_ok(member.gather()).append(expect_ok(member.peer->barrier()));
  });
  EXPECT_EQ(get("communicators"), communicators);
  EXPECT_EQ(get("registrations"), registrations);
}

TEST_F(CommNccl, MemoryTheGpuCannotReadIsRefusedOnAllRanks) {
  run_two([&](Member& member, int rank) -> std::string {
    auto* in = rank == 1 ? reinterpret_cast<float*>(64) : member.in;
    const Status s = member.enqueue(member.peer->api->all_gather, {item(in, member.out, 4, STRATA_F32, STRATA_F32)});
    if (rank == 1) return expect_error(s, STRATA_INVALID_ARGUMENT, {"item 0", "input is neither memory of GPU 0"});
    return expect_error(member.failure(), STRATA_FAILED_PRECONDITION, {"rank 1 gave up", "neither memory"});
  });
}

// ---- opening ----

std::string open_error(const std::string& plugin, Options options, int world = 1, int rank = 0,
                       const std::string& job = fresh_job(), int64_t deadline_ns = 20'000'000'000) {
  Peer peer({plugin, true, world}, rank, job);
  strata_open_args args = peer.base;
  args.options = options.c();
  args.deadline_ns = deadline_ns;
  const Status s = peer.open_with(args);
  return s.ok() ? "" : std::string(status_name(s.code())) + ": " + s.text();
}

// Opens both ranks; what each says.
std::vector<std::string> open_two(const std::vector<Options>& options) {
  std::vector<std::string> said(2);
  const std::string job = fresh_job();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back(
        [&, r] { said[static_cast<size_t>(r)] = open_error(kFake, options[static_cast<size_t>(r)], 2, r, job); });
  }
  for (std::thread& t : threads) t.join();
  return said;
}

Options with_fake() { return Options().set("libnccl", FAKE_NCCL); }

TEST_F(CommNccl, NcclThatIsNotThereIsNamedWithEveryPlace) {
  const std::string said =
      open_error(kFake, Options().set("libnccl", "/nowhere/libnccl.so.2"), 2, 0, fresh_job(), 300'000'000);
  expect_parts(said, {"NOT_FOUND", "option libnccl = \"/nowhere/libnccl.so.2\"", "cannot open shared object file"});
  const std::string folder = open_error(kFake, Options().set("libnccl", "/tmp"), 2, 0, fresh_job(), 300'000'000);
  expect_parts(folder, {"NOT_FOUND", "/tmp/libnccl.so.2", "/tmp/nvidia/nccl/lib/libnccl.so.2"});
}

TEST_F(CommNccl, NcclThatIsTooOldIsRefusedOnAllRanks) {
  set("version", 21805);
  for (const std::string& said : open_two({with_fake(), with_fake()})) {
    expect_parts(said, {"FAILED_PRECONDITION", "too old: 2.18.5, 2.19.0 or newer"});
  }
}

TEST_F(CommNccl, ALibraryWithoutTheFunctionsIsRefused) {
  const std::string said = open_error(kFake, Options().set("libnccl", kFake), 2, 0, fresh_job(), 300'000'000);
  expect_parts(said, {"FAILED_PRECONDITION", "has no ncclGetVersion"});
}

// What one rank cannot do, all refuse, and say whose fault it is.
TEST_F(CommNccl, ARankWithoutAGpuIsNamedByAll) {
  const std::vector<std::string> said = open_two({with_fake(), with_fake().set("device_id", 7)});
  expect_parts(said[0], {"FAILED_PRECONDITION", "rank 1 cannot open: no GPU is visible"});
  expect_parts(said[1], {"FAILED_PRECONDITION", "no GPU is visible"});
}

TEST_F(CommNccl, RanksOfDifferentSettingsAreRefused) {
  for (const std::string& said : open_two({with_fake(), with_fake().set("deterministic_reduce", true)})) {
    expect_parts(said, {"FAILED_PRECONDITION", "ranks differ", "deterministic_reduce = 0", "rank 1",
                        "deterministic_reduce = 1"});
  }
}

// The real library without a GPU: it is found, has all functions, and what it then says is passed on.
TEST_F(CommNccl, TheRealNcclIsFoundByTheLoader) {
  if (::access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "there is a driver: comm_nccl_gpu_test does more";
  void* library = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!library) GTEST_SKIP() << "the loader finds no libnccl.so.2";
  for (const std::string& said : open_two({Options(), Options()})) {
    expect_parts(said, {"INTERNAL", "making the communicators", "NCCL: unhandled cuda error"});
  }
}

TEST_F(CommNccl, NcclThatDoesNotFinishOpeningIsLeftAtTheDeadline) {
  set("hang_init");
  std::vector<std::thread> threads;
  const std::string job = fresh_job();
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      expect_parts(open_error(kFake, with_fake(), 2, r, job, 500'000'000),
                   {"DEADLINE_EXCEEDED", "communicators", "0.500 s"});
    });
  }
  for (std::thread& t : threads) t.join();
}

TEST_F(CommNccl, AUniqueIdOfTheHostIsTaken) {
  const std::string id(256, 'a');
  for (const std::string& said : open_two({with_fake().set("unique_id", id), with_fake().set("unique_id", id)})) {
    EXPECT_EQ(said, "");
  }
  expect_parts(open_error(kFake, with_fake().set("unique_id", "abc"), 2), {"INVALID_ARGUMENT", "3 characters", "256"});
}

TEST_F(CommNccl, AddressesAreCheckedAndUsed) {
  expect_parts(open_error(kFake, with_fake().set("port", 70'000), 2), {"INVALID_ARGUMENT", "port = 70000"});
  expect_parts(open_error(kFake, with_fake().set("address", "x:1").set("port", 1), 2),
               {"INVALID_ARGUMENT", "both set"});
  expect_parts(open_error(kFake, with_fake().set("address", "127.0.0.1:9"), 2, 1, fresh_job(), 200'000'000),
               {"DEADLINE_EXCEEDED", "127.0.0.1:9", "refused"});
}

struct Variables {
  Variables(std::initializer_list<std::pair<const char*, const char*>> all) {
    for (const auto& [name, value] : all) {
      ::setenv(name, value, 1);
      names.push_back(name);
    }
  }
  ~Variables() {
    for (const char* name : names) ::unsetenv(name);
  }
  std::vector<const char*> names;
};

std::string open_from_environment() {
  Peer peer({kFake, false, 1}, 0, "unused");
  strata_open_args args = peer.base;
  args.rank = -1;
  args.job = nullptr;
  args.deadline_ns = 200'000'000;
  Options options = with_fake();
  args.options = options.c();
  const Status s = peer.open_with(args);
  return s.ok() ? "" : std::string(status_name(s.code())) + ": " + s.text();
}

// Two of four ranks are here: they meet over TCP, away from the launcher's own port.
TEST_F(CommNccl, SeveralMachinesMeetAtTheMastersAddress) {
  {
    const Variables slurm({{"SLURM_PROCID", "2"},
                           {"SLURM_NTASKS", "4"},
                           {"SLURM_LOCALID", "0"},
                           {"SLURM_JOB_ID", "7"},
                           {"SLURM_STEP_ID", "0"},
                           {"SLURM_STEP_NUM_NODES", "2"},
                           {"SLURM_NODEID", "1"},
                           {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"}});
    expect_parts(open_from_environment(), {"INVALID_ARGUMENT", "2 of 4 here", "MASTER_ADDR and MASTER_PORT"});
  }
  const Variables torchrun({{"RANK", "2"},
                            {"WORLD_SIZE", "4"},
                            {"LOCAL_RANK", "0"},
                            {"LOCAL_WORLD_SIZE", "2"},
                            {"TORCHELASTIC_RUN_ID", "run"},
                            {"MASTER_ADDR", "127.0.0.1"},
                            {"MASTER_PORT", "29517"}});
  expect_parts(open_from_environment(),
               {"DEADLINE_EXCEEDED", "opening rank 2 of job \"run.29517\" (world 4)", "127.0.0.1:30517"});
}

// ---- the plugin itself, where there is no driver ----

TEST_F(CommNccl, WithoutADriverThePluginSaysSo) {
  if (::access("/dev/nvidiactl", F_OK) == 0) GTEST_SKIP() << "there is a driver";
  expect_parts(open_error("comm_nccl", Options()), {"FAILED_PRECONDITION", "no NVIDIA driver found"});
}

}  // namespace
}  // namespace strata::test
