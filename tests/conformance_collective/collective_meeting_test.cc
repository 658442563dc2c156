// How ranks meet: who they are (arguments, environment), late and missing ranks, names of jobs, and nothing left
// behind.
#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <set>
#include <thread>

#include "ranks.h"

namespace strata::test {
namespace {

Setup processes(int world) { return {"comm_local", false, world}; }
Setup threads(int world) { return {"comm_local", true, world}; }

void expect_line(const std::string& line, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) EXPECT_NE(line.find(part), std::string::npos) << part << " is not in: " << line;
}

// Opens one rank and says how it went.
std::string open_result(Peer& peer, int64_t deadline_ms) {
  strata_open_args args = peer.base;
  args.deadline_ns = deadline_ms * 1'000'000;
  const Status s = peer.open_with(args);
  return std::string(status_name(s.code())) + ": " + s.text();
}

// ---- who am I ----

using Environment = std::map<std::string, std::string>;

// Opens with nothing but the environment, in a child whose environment has nothing else of the launchers.
std::string open_from(const Environment& environment, const char* job = nullptr) {
  Processes child;
  child.start([&](Processes&) -> std::string {
    ::clearenv();
    for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
    Peer peer(processes(1), 0, "unused");
    strata_open_args args = peer.base;
    args.rank = args.world = args.local_rank = args.local_world = -1;
    args.job = job;
    args.deadline_ns = 100'000'000;
    const Status s = peer.open_with(args);
    if (!s.ok()) return std::string(status_name(s.code())) + ": " + s.text();
    strata_collective_caps caps{};
    caps.struct_size = sizeof(caps);
    RETURN_IF_BAD(expect_ok(take_failure(peer.api->caps(peer.comm, &caps))));
    return std::to_string(caps.rank) + "/" + std::to_string(caps.world) + " " + caps.job;
  });
  return child.line(0);
}

TEST(CollectiveEnvironment, EveryLauncherIsUnderstood) {
  EXPECT_EQ(open_from({}).substr(0, 10), "0/1 local.");
  EXPECT_EQ(open_from({{"STRATA_RANK", "0"}, {"STRATA_WORLD_SIZE", "1"}, {"STRATA_JOB", "j"}}), "0/1 j");
  EXPECT_EQ(open_from({{"RANK", "0"},
                       {"WORLD_SIZE", "1"},
                       {"LOCAL_RANK", "0"},
                       {"LOCAL_WORLD_SIZE", "1"},
                       {"TORCHELASTIC_RUN_ID", "none"},
                       {"MASTER_PORT", "29500"}}),
            "0/1 none.29500");
  EXPECT_EQ(open_from({{"RANK", "0"},
                       {"WORLD_SIZE", "1"},
                       {"LOCAL_RANK", "0"},
                       {"LOCAL_WORLD_SIZE", "1"},
                       {"MASTER_PORT", "29500"}}),
            "0/1 29500");
  EXPECT_EQ(open_from({{"OMPI_COMM_WORLD_RANK", "0"},
                       {"OMPI_COMM_WORLD_SIZE", "1"},
                       {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                       {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                       {"PMIX_NAMESPACE", "77"}}),
            "0/1 77");
  EXPECT_EQ(open_from({{"SLURM_PROCID", "0"},
                       {"SLURM_NTASKS", "1"},
                       {"SLURM_LOCALID", "0"},
                       {"SLURM_JOB_ID", "12"},
                       {"SLURM_STEP_ID", "3"}}),
            "0/1 12.3");
  // A shell of salloc is no task; the first launcher of the order wins; the job of the arguments wins over all.
  EXPECT_EQ(open_from({{"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "12"}}).substr(0, 4), "0/1 ");
  EXPECT_EQ(open_from({{"STRATA_RANK", "0"}, {"STRATA_WORLD_SIZE", "1"}, {"STRATA_JOB", "j"}, {"RANK", "3"}}), "0/1 j");
  EXPECT_EQ(open_from({{"STRATA_RANK", "0"}, {"STRATA_WORLD_SIZE", "1"}}, "mine"), "0/1 mine");
}

TEST(CollectiveEnvironment, HalfASetIsAnErrorThatNamesWhatIsMissing) {
  expect_line(open_from({{"STRATA_RANK", "0"}}), {"INVALID_ARGUMENT", "STRATA_WORLD_SIZE, STRATA_JOB not set"});
  expect_line(open_from({{"STRATA_WORLD_SIZE", "2"}, {"STRATA_JOB", "j"}}),
              {"INVALID_ARGUMENT", "STRATA_RANK not set"});
  expect_line(open_from({{"WORLD_SIZE", "2"}, {"RANK", "0"}}),
              {"INVALID_ARGUMENT", "LOCAL_RANK, LOCAL_WORLD_SIZE, TORCHELASTIC_RUN_ID or MASTER_PORT not set"});
  expect_line(open_from({{"OMPI_COMM_WORLD_RANK", "1"}}),
              {"INVALID_ARGUMENT", "OMPI_COMM_WORLD_SIZE", "PMIX_NAMESPACE"});
  expect_line(open_from({{"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}}),
              {"INVALID_ARGUMENT", "SLURM_LOCALID", "SLURM_JOB_ID"});
}

TEST(CollectiveEnvironment, NonsenseIsRefused) {
  const Environment good = {{"STRATA_RANK", "0"}, {"STRATA_WORLD_SIZE", "2"}, {"STRATA_JOB", "j"}};
  auto with = [&](const char* name, const char* value) {
    Environment e = good;
    e[name] = value;
    return open_from(e);
  };
  expect_line(with("STRATA_RANK", "-1"), {"INVALID_ARGUMENT", "STRATA_RANK=\"-1\" is not a number"});
  expect_line(with("STRATA_RANK", "1x"), {"INVALID_ARGUMENT", "STRATA_RANK=\"1x\""});
  expect_line(with("STRATA_WORLD_SIZE", "99999999999"), {"INVALID_ARGUMENT", "STRATA_WORLD_SIZE"});
  expect_line(with("STRATA_RANK", "2"), {"INVALID_ARGUMENT", "rank 2 of world 2"});
  expect_line(with("STRATA_WORLD_SIZE", "0"), {"INVALID_ARGUMENT", "world 0"});
  expect_line(with("STRATA_LOCAL_WORLD_SIZE", "1"), {"INVALID_ARGUMENT", "one machine only"});
  expect_line(with("STRATA_LOCAL_RANK", "5"), {"INVALID_ARGUMENT", "local rank"});
  expect_line(with("STRATA_WORLD_SIZE", "1000"), {"INVALID_ARGUMENT"});
  expect_line(open_from({{"SLURM_PROCID", "0"},
                         {"SLURM_NTASKS", "2"},
                         {"SLURM_LOCALID", "0"},
                         {"SLURM_JOB_ID", "1"},
                         {"SLURM_STEP_ID", "0"},
                         {"SLURM_STEP_NUM_NODES", "2"}}),
              {"INVALID_ARGUMENT", "SLURM_STEP_NUM_NODES=2", "one machine only"});
}

TEST(CollectiveEnvironment, TwoRanksMeetByTheEnvironmentAlone) {
  const std::string job = fresh_job();
  Processes ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&, r](Processes&) -> std::string {
      ::setenv("STRATA_RANK", std::to_string(r).c_str(), 1);
      ::setenv("STRATA_WORLD_SIZE", "2", 1);
      ::setenv("STRATA_JOB", job.c_str(), 1);
      Peer peer(processes(2), 0, "unused");
      peer.base.rank = -1;
      peer.base.job = nullptr;
      RETURN_IF_BAD(expect_ok(peer.open()));
      return expect_ok(peer.barrier());
    });
  }
  for (int r = 0; r < 2; ++r) EXPECT_EQ(ranks.line(r), "");
}

TEST(CollectiveEnvironment, ThreadsMustSayTheirRank) {
  Peer peer(threads(2), 0, fresh_job());
  peer.base.rank = -1;
  expect_line(open_result(peer, 100), {"INVALID_ARGUMENT", "threads"});
}

// ---- late and missing ranks ----

class CollectiveMeeting : public CollectiveTest {};
INSTANTIATE_TEST_SUITE_P(All, CollectiveMeeting, testing::ValuesIn(all_setups({3})),
                         [](const auto& p) { return setup_name(p.param); });

// Runs some of the ranks in their own thread or process; returns what each said.
std::vector<std::string> run_some(const Setup& setup, const std::vector<int>& who,
                                  const std::function<std::string(int rank)>& body) {
  std::vector<std::string> said(who.size());
  if (setup.threads) {
    std::vector<std::thread> running;
    for (size_t i = 0; i < who.size(); ++i) running.emplace_back([&, i] { said[i] = body(who[i]); });
    for (std::thread& t : running) t.join();
    return said;
  }
  Processes children;
  for (int r : who) children.start([&, r](Processes&) { return body(r); });
  for (size_t i = 0; i < who.size(); ++i) said[i] = children.line(static_cast<int>(i));
  return said;
}

TEST_P(CollectiveMeeting, LateRanksAreWaitedFor) {
  for (int late = 0; late < 3; ++late) {
    const std::string job = fresh_job();
    for (const std::string& said : run_some(GetParam(), {0, 1, 2}, [&](int rank) -> std::string {
           if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(200));
           Peer peer(GetParam(), rank, job);
           return open_result(peer, 20'000);
         })) {
      EXPECT_EQ(said, "OK: ");
    }
  }
}

TEST_P(CollectiveMeeting, RanksThatNeverComeAreNamed) {
  for (const std::vector<int>& came : {std::vector<int>{0, 2}, {1, 2}, {0}}) {
    const std::string job = fresh_job();
    const std::vector<std::string> said = run_some(GetParam(), came, [&](int rank) {
      Peer peer(GetParam(), rank, job);
      return open_result(peer, 300);
    });
    for (const std::string& line : said) {
      expect_line(line, {"DEADLINE_EXCEEDED", job, "waited 0.300 s"});
      for (int r = 0; r < 3; ++r) {
        // Without rank 0 processes cannot see each other, so only rank 0 is named.
        const bool missing = std::find(came.begin(), came.end(), r) == came.end();
        if (missing && (r == 0 || came[0] == 0)) {
          EXPECT_TRUE(line.find("rank " + std::to_string(r)) != std::string::npos ||
                      line.find(", " + std::to_string(r)) != std::string::npos)
              << r << " in " << line;
        }
      }
      expect_line(line, {"never came"});
    }
  }
}

TEST(CollectiveStart, DeathBeforeAllHaveComeIsNamed) {
  for (int victim : {0, 1}) {
    const std::string job = fresh_job();
    Processes ranks;
    for (int r = 0; r < 2; ++r) {
      ranks.start([&, r](Processes& self) {
        Peer peer(processes(3), r, job);
        self.say("starts");
        return open_result(peer, 20'000);
      });
    }
    for (int r = 0; r < 2; ++r) ASSERT_EQ(ranks.line(r), "starts");
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // both are connected by then
    ranks.signal(victim, SIGKILL);
    expect_line(ranks.line(1 - victim),
                {"UNAVAILABLE", "rank " + std::to_string(victim), "died", "pid " + std::to_string(ranks.pid(victim))});
  }
}

TEST(CollectiveStart, WorldsThatDifferAreRefused) {
  const std::string job = fresh_job();
  Processes ranks;
  for (int r = 0; r < 2; ++r) {
    ranks.start([&, r](Processes&) {
      Peer peer(processes(r == 0 ? 2 : 3), r, job);
      return open_result(peer, 5'000);
    });
  }
  for (int r = 0; r < 2; ++r) expect_line(ranks.line(r), {"INVALID_ARGUMENT", "world 2", "world 3"});
}

// ---- names of jobs ----

// Two ranks that are open until the test ends them.
void start_job(Processes& ranks, const std::string& job) {
  for (int r = 0; r < 2; ++r) {
    ranks.start([&, r](Processes& self) -> std::string {
      Peer peer(processes(2), r, job);
      self.say(open_result(peer, 20'000));
      (void)::pause();
      return "";
    });
  }
  for (int r = 0; r < 2; ++r) ASSERT_EQ(ranks.line(r), "OK: ");
}

TEST(CollectiveNames, SecondJobOfOneNameIsAnError) {
  const std::string job = fresh_job();
  Processes first;
  start_job(first, job);
  const auto said = run_some(processes(2), {0, 1}, [&](int rank) {
    Peer peer(processes(2), rank, job);
    return open_result(peer, 1'500);
  });
  expect_line(said[0], {"ALREADY_EXISTS", job, "process " + std::to_string(first.pid(0))});
  expect_line(said[1], {"DEADLINE_EXCEEDED", job, "already running", std::to_string(first.pid(0))});
}

TEST(CollectiveNames, RestartRightAfterKillNineWorks) {
  const std::string job = fresh_job();
  for (int round = 0; round < 5; ++round) {
    Processes ranks;
    start_job(ranks, job);
    for (int r = 0; r < 2; ++r) ranks.signal(r, SIGKILL);
    Processes again;
    start_job(again, job);
  }
}

TEST(CollectiveNames, TwoJobsSideBySideDoNotMeet) {
  Processes a, b, c;  // the long names differ in their last letter only
  start_job(a, fresh_job());
  const std::string name = fresh_job() + std::string(200, 'x');
  start_job(b, name + "1");
  start_job(c, name + "2");
}

TEST(CollectiveNames, SecondThreadJobOfOneNameIsAnError) {
  const std::string job = fresh_job();
  const auto said = run_some(threads(2), {0, 1}, [&](int rank) -> std::string {
    Peer peer(threads(2), rank, job);
    RETURN_IF_BAD(expect_ok(peer.open()));
    RETURN_IF_BAD(expect_ok(peer.barrier()));
    Peer second(threads(2), rank, job);
    RETURN_IF_BAD(expect_error(second.open(), STRATA_ALREADY_EXISTS, {job}));
    return expect_ok(peer.barrier());
  });
  for (const std::string& line : said) EXPECT_EQ(line, "");
}

// Ranks close and open again under one name without agreeing on a moment.
TEST_P(CollectiveMeeting, TheSameNameMayBeUsedAgainAfterClose) {
  const std::string job = fresh_job();
  const auto said = run_some(GetParam(), {0, 1, 2}, [&](int rank) -> std::string {
    for (int round = 0; round < 20; ++round) {
      Peer peer(GetParam(), rank, job);
      RETURN_IF_BAD(expect_ok(peer.open()));
      if ((round + rank) % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      RETURN_IF_BAD(expect_ok(peer.barrier()));
    }
    return "";
  });
  for (const std::string& line : said) EXPECT_EQ(line, "");
}

// A socket under the job's name that somebody else holds, and one that talks to rank 0 in another language.
sockaddr_un name_of(const std::string& job, socklen_t* length) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string name = "strata.comm_local." + std::to_string(::geteuid()) + "." + job;
  name.copy(address.sun_path + 1, name.size());
  *length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

TEST(CollectiveNames, HolderOfTheNameThatDoesNotAnswerIsNamed) {
  const std::string job = fresh_job();
  socklen_t length;
  const sockaddr_un address = name_of(job, &length);
  const int squatter = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  ASSERT_EQ(::bind(squatter, reinterpret_cast<const sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(squatter, 8), 0);
  Peer peer(processes(2), 1, job);
  expect_line(open_result(peer, 200), {"DEADLINE_EXCEEDED", "does not answer", std::to_string(::getpid())});
  ::close(squatter);
}

TEST(CollectiveNames, GuestOfAnotherVersionIsRefused) {
  const std::string job = fresh_job();
  Processes ranks;
  ranks.start([&](Processes&) {
    Peer peer(processes(2), 0, job);
    return open_result(peer, 20'000);
  });
  socklen_t length;
  const sockaddr_un address = name_of(job, &length);
  const int guest = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  while (::connect(guest, reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  ASSERT_EQ(::send(guest, "hello", 5, MSG_NOSIGNAL), 5);
  expect_line(ranks.line(0), {"FAILED_PRECONDITION", "another version", std::to_string(::getpid())});
  ::close(guest);
}

// ---- nothing is left ----

std::set<std::string> names_in(const char* folder) {
  std::set<std::string> names;
  if (DIR* dir = ::opendir(folder)) {
    while (const dirent* entry = ::readdir(dir)) names.insert(entry->d_name);
    ::closedir(dir);
  }
  return names;
}

TEST_P(CollectiveMeeting, OpenAndCloseLeakNoDescriptorAndNoFile) {
  const auto shm_before = names_in("/dev/shm");
  const std::string job = fresh_job();
  const auto said = run_some(GetParam(), {0, 1, 2}, [&](int rank) -> std::string {
    size_t before = 0;
    for (int round = 0; round < 50; ++round) {
      Peer peer(GetParam(), rank, job);
      RETURN_IF_BAD(expect_ok(peer.open()));
      auto* in = peer.alloc<float>(1000);
      float out[3000];
      RETURN_IF_BAD(expect_ok(peer.call(peer.api->all_gather, {item(in, out, 1000, STRATA_F32, STRATA_F32)})));
      peer.close();
      if (round == 5) before = names_in("/proc/self/fd").size();
    }
    const size_t after = names_in("/proc/self/fd").size();
    if (GetParam().threads) return "";  // other threads' directories come and go; processes show the leak
    return after <= before ? "" : std::to_string(before) + " descriptors became " + std::to_string(after);
  });
  for (const std::string& line : said) EXPECT_EQ(line, "");
  EXPECT_EQ(names_in("/dev/shm"), shm_before);
}

TEST(CollectiveNames, KillNineLeavesNoFile) {
  const auto before = names_in("/dev/shm");
  {
    Processes ranks;
    start_job(ranks, fresh_job());
    for (int r = 0; r < 2; ++r) ranks.signal(r, SIGKILL);
  }
  EXPECT_EQ(names_in("/dev/shm"), before);
}

}  // namespace
}  // namespace strata::test
