// cores_test.cc - where the threads of real engines run, as the kernel says it, with ranks as threads.
#include "core/plugins/cores.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <barrier>
#include <filesystem>
#include <fstream>
#include <map>
#include <thread>

#include "tests/train/by_hand.h"

namespace strata::test {
namespace {

using Masks = std::map<std::string, std::string>;  // thread id to its CPUs

Masks masks_of_threads() {
  Masks masks;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    for (std::string word; status >> word;) {
      if (word == "Cpus_allowed_list:") status >> masks[task.path().filename()];
    }
  }
  return masks;
}

struct Seen {
  std::map<std::string, int> engine_threads;  // how many of the engines' threads may run where
  std::vector<std::string> host_threads;      // where the ranks' own threads may run, while the engines are open
};

// Opens and commits an engine per rank, each on a thread that may use masks[rank] (all, when there are none).
Seen look(int world, const std::vector<std::vector<int>>& masks = {}, const std::string& setting = "threads=3") {
  Seen seen;
  std::mutex mutex;
  const Masks before = masks_of_threads();
  std::barrier meet(world);
  std::vector<std::thread> ranks;
  std::vector<std::string> tids(static_cast<size_t>(world));
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto r = static_cast<size_t>(rank);
      if (!masks.empty()) bind_this_thread(masks[r]);
      tids[r] = std::to_string(gettid());
      Trial trial;
      trial.world = world;
      trial.overrides = {"threads=3", setting};
      std::string error;
      strata_engine* engine = open_rank(trial, "cores" + std::to_string(getpid()), rank, &error);
      EXPECT_EQ(error, "");
      EXPECT_EQ(build_model(engine, odd_model()), "");
      meet.arrive_and_wait();
      if (rank == 0) {
        const Masks now = masks_of_threads();
        for (const std::string& tid : tids) seen.host_threads.push_back(now.at(tid));
        for (const auto& [tid, cpus] : now) {
          const bool is_host = std::find(tids.begin(), tids.end(), tid) != tids.end();
          if (!is_host && !before.count(tid)) ++seen.engine_threads[cpus];
        }
      }
      meet.arrive_and_wait();
      strata_close(engine);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return seen;
}

std::string all_cpus() { return cpu_list_text(allowed_cpus()); }

TEST(Cores, RanksThatMayUseTheSameCpusDivideThem) {
  const std::vector<Cpu> cpus = read_cpus(allowed_cpus());
  if (cpus.size() < 2) GTEST_SKIP() << "one CPU";
  const Seen seen = look(2);
  for (size_t rank : {0, 1}) {  // two workers, the collective and the update thread of each
    EXPECT_EQ(seen.engine_threads.at(cpu_list_text(share_of(cpus, rank, 2).cpus)), 4) << rank;
  }
  EXPECT_THAT(seen.host_threads, testing::Each(all_cpus()));
}

TEST(Cores, AMaskOfARanksOwnIsTakenAsItIs) {
  const std::vector<int> cpus = allowed_cpus();
  if (cpus.size() < 2) GTEST_SKIP() << "one CPU";
  // Not as we would: rank 0 has the last CPU.
  const std::vector<int> last = {cpus.back()}, first = {cpus.front()};
  const Seen seen = look(2, {last, first});
  EXPECT_EQ(seen.engine_threads.at(cpu_list_text(last)), 4);
  EXPECT_EQ(seen.engine_threads.at(cpu_list_text(first)), 4);
  EXPECT_THAT(seen.host_threads, testing::ElementsAre(cpu_list_text(last), cpu_list_text(first)));
}

TEST(Cores, NothingIsBoundWhereThatWouldStackThreads) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer has a thread of its own";
#endif
  const std::vector<int> one = {allowed_cpus().front()};
  EXPECT_EQ(look(2, {one, one}).engine_threads, (std::map<std::string, int>{{cpu_list_text(one), 8}}));
  EXPECT_EQ(look(1).engine_threads, (std::map<std::string, int>{{all_cpus(), 4}}));
}

TEST(Cores, BindThreadsTurnsItOff) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "ThreadSanitizer has a thread of its own";
#endif
  EXPECT_EQ(look(2, {}, "bind_threads=false").engine_threads, (std::map<std::string, int>{{all_cpus(), 8}}));
}

}  // namespace
}  // namespace strata::test
