// kill -9 of training processes with their state on disk, at random moments and inside their transfers: a restart from
// the newest checkpoint ends with the bits of a run that nobody killed; what the dead left is reclaimed; and the
// directory of a job that lives through it all beside them is not touched.
//
// 5 kills; with STRATA_SOAK=1, as ./check soak runs it, 100. The last line says which moments they hit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "tests/support/disk_dirs.h"
#include "tests/train_kill/ranks.h"

namespace strata::test {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr unsigned kSeed = 20261130;
constexpr int kSteps = 6;

int rounds() {
  const char* soak = std::getenv("STRATA_SOAK");
  return soak && std::string(soak) == "1" ? 100 : 5;
}

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// A job of this process with its state at the same nvme_path. It trains a step per round.
class Neighbour {
 public:
  explicit Neighbour(const std::string& nvme_path) {
    trial_.overrides = {"zero_optimization.offload_optimizer.device=nvme",
                        "zero_optimization.offload_optimizer.nvme_path=\"" + nvme_path + "\""};
    trial_.manifest_extra = "[plugin.offload_nvme]\nprobe_ms = 0\n";
    engine_ = open(trial_);
    directory_ = *fs::directory_iterator(nvme_path);
    files_ = files();
  }
  ~Neighbour() { strata_close(engine_); }

  // Its files are the same, not others of the same names.
  void expect_untouched() { EXPECT_EQ(files(), files_); }
  void step() {
    ++steps_;
    EXPECT_EQ(train_steps(engine_, trial_, 0, steps_, steps_), "");
  }
  void expect_right() {
    Trial plain = trial_;
    plain.overrides.clear();
    plain.manifest_extra.clear();
    strata_engine* const other = open(plain);
    EXPECT_EQ(train_steps(other, plain, 0, 1, steps_), "");
    std::string error, other_error;
    EXPECT_TRUE(bits_of(engine_, trial_.model, &error) == bits_of(other, plain.model, &other_error));
    EXPECT_EQ(error + other_error, "");
    strata_close(other);
  }

 private:
  static strata_engine* open(const Trial& trial) {
    std::string error;
    strata_engine* const engine = open_rank(trial, "neighbour-" + std::to_string(::getpid()), 0, &error);
    if (engine) error = build_model(engine, trial.model);
    EXPECT_EQ(error, "");
    return engine;
  }
  std::map<std::string, ino_t> files() const {
    std::map<std::string, ino_t> found;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      struct stat s {};
      EXPECT_EQ(::stat(entry.path().c_str(), &s), 0);
      found[entry.path()] = s.st_ino;
    }
    return found;
  }
  Trial trial_;
  strata_engine* engine_ = nullptr;
  int steps_ = 0;
  fs::path directory_;
  std::map<std::string, ino_t> files_;
};

// What one round does, by its number alone: earlier ones do not change it.
struct Kill {
  explicit Kill(int number) {
    std::mt19937 dice(kSeed + static_cast<unsigned>(number));
    const std::vector<int> whom[] = {{0}, {1}, {0, 1}};
    what = std::array{OnDisk::kState, OnDisk::kStateAndParams, OnDisk::kStateByThreads}[number % 3u];
    inside = number % 5 != 4;
    dead = whom[dice() % 3];
    fraction = static_cast<double>(dice() % 1000) / 1000;
    resumed_at = static_cast<int>(dice() % 3) * kSaveEvery;  // 0: from the beginning
    line = 1 + static_cast<int>(dice() % static_cast<unsigned>(lines()));
  }
  // What the run is going to say: open, load, train and save in turns.
  int lines() const { return 1 + (resumed_at > 0) + 2 * (kSteps - resumed_at) / kSaveEvery; }

  OnDisk what;
  bool inside;  // a transfer; else any moment
  std::vector<int> dead;
  int resumed_at, line;
  double fraction;  // of what that line announces, about, before it looks for its moment
};

class KillOnDisk : public testing::Test {
 protected:
  Start start(OnDisk what, const DiskDir& checkpoints) {
    return {what, nvme.path, checkpoints.path, out.path + "/bits", kSteps};
  }
  // The bits at the end of a run to which nothing happens.
  std::string finish(OnDisk what, const DiskDir& checkpoints) {
    Ranks ranks(start(what, checkpoints));
    EXPECT_EQ(ranks.wait(), std::vector<int>({0, 0})) << ranks.output(0) << ranks.output(1);
    return content(out.path + "/bits");
  }
  // Kills at the moment that was chosen. False: the run had come to its end by then.
  bool strike(Ranks& ranks, const Kill& kill) {
    const bool by_threads = kill.what == OnDisk::kStateByThreads;
    const int watched = kill.dead[0];
    while (ranks.lines(watched) < kill.line && !ranks.all_ended()) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    std::this_thread::sleep_for(whole_run * kill.fraction / kill.lines());
    const auto is_the_moment = [&] {
      return by_threads ? ranks.is_inside_a_write(watched) : ranks.has_transfers_in_flight(watched);
    };
    bool found = false;
    while (kill.inside && !(found = is_the_moment()) && !ranks.all_ended()) {
    }
    ranks.kill(kill.dead);
    inside += found;
    return kill.inside ? found : !ranks.all_ended();
  }

  DiskDir nvme, out;
  Clock::duration whole_run{};
  int inside = 0;
};

TEST_F(KillOnDisk, ARestartEndsWithTheBitsOfARunNobodyKilled) {
  Neighbour neighbour(nvme.path);
  DiskDir reference;
  const auto begin = Clock::now();
  const std::string bits = finish(OnDisk::kState, reference);
  whole_run = Clock::now() - begin;
  ASSERT_GT(bits.size(), 1u << 20);
  ASSERT_EQ(nvme.entries(), 1u);

  std::map<std::string, int> moments;
  int killed = 0;
  for (int round = 0; killed < rounds() && round < 2 * rounds() && !HasFailure(); ++round) {
    const Kill kill(round);
    SCOPED_TRACE("round " + std::to_string(round));
    DiskDir checkpoints;
    for (int step = kSaveEvery; step <= kill.resumed_at; step += kSaveEvery) {
      fs::copy(reference.path + "/" + tag_of(step), checkpoints.path + "/" + tag_of(step), fs::copy_options::recursive);
    }
    fs::remove(out.path + "/bits");
    {
      Ranks ranks(start(kill.what, checkpoints));
      const bool in_time = strike(ranks, kill);
      const std::vector<int> codes = ranks.wait();
      for (int rank : {0, 1}) {
        const bool dead = std::count(kill.dead.begin(), kill.dead.end(), rank) > 0;
        if (in_time && dead) {
          EXPECT_EQ(codes[static_cast<size_t>(rank)], -SIGKILL) << ranks.output(rank);
        } else if (!dead) {
          EXPECT_THAT(codes[static_cast<size_t>(rank)], testing::AnyOf(0, 1)) << ranks.output(rank);
        }
      }
      killed += in_time;
      std::string moment = in_time ? ranks.last_line(kill.dead[0]) : "none";
      ++moments[moment.substr(0, moment.find(' '))];
      EXPECT_LE(nvme.entries(), 1 + kill.dead.size()) << "the living clean up";
    }
    neighbour.step();
    EXPECT_TRUE(finish(kill.what, checkpoints) == bits) << "other bits";
    EXPECT_EQ(nvme.entries(), 1u) << "what the dead left is reclaimed";
    neighbour.expect_untouched();
  }
  neighbour.expect_right();
  EXPECT_EQ(killed, rounds()) << "too many runs came to their end before";
  EXPECT_GE(inside, rounds() / 4) << "kills inside transfers";
  std::printf("kills: %d, inside transfers: %d; during", killed, inside);
  for (const auto& [moment, count] : moments) std::printf(" %s: %d", moment.c_str(), count);
  std::printf("\n");
}

// Every save replaces the one before, under one tag. Whoever is killed in one: the run goes on from the step of the
// save before or of this one, never from none.
TEST_F(KillOnDisk, OneTagIsAlwaysAWholeCheckpoint) {
  DiskDir reference;
  const std::string bits = finish(OnDisk::kState, reference);
  int killed = 0, old_ones = 0, new_ones = 0;
  for (int round = 0; killed < rounds() && round < 2 * rounds() && !HasFailure(); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    std::mt19937 dice(kSeed + static_cast<unsigned>(round));
    const std::vector<int> whom[] = {{0}, {1}, {0, 1}};
    const std::vector<int> dead = whom[dice() % 3];
    const int save = 2 + static_cast<int>(dice() % 2);
    const auto delay = std::chrono::microseconds(dice() % 100000);
    DiskDir checkpoints;
    Start one_tag = start(OnDisk::kState, checkpoints);
    one_tag.tag = "last";
    const auto saved = [&](const Ranks& ranks) { return ranks.output(dead[0]).find("save " + tag_of(2 * save)); };
    {
      Ranks ranks(one_tag);
      while (saved(ranks) == std::string::npos && !ranks.all_ended()) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      std::this_thread::sleep_for(delay);
      killed += !ranks.all_ended();
      ranks.kill(dead);
      ranks.wait();
    }
    Ranks resumed(one_tag);
    EXPECT_EQ(resumed.wait(), std::vector<int>({0, 0})) << resumed.output(0) << resumed.output(1);
    EXPECT_TRUE(content(out.path + "/bits") == bits) << "other bits";
    int from = 0;
    const std::string said = resumed.output(0), loaded = "loaded ";
    if (const size_t at = said.find(loaded); at != std::string::npos) from = std::stoi(said.substr(at + loaded.size()));
    EXPECT_GE(from, 2 * save - 2) << said;
    old_ones += from == 2 * save - 2;
    new_ones += from >= 2 * save;
    for (const auto& entry : fs::directory_iterator(checkpoints.path)) {
      if (from == kSteps) break;  // it had nothing left to save: what the dead left stays
      EXPECT_THAT(entry.path().filename().string(), testing::AnyOf("last", "latest"));
    }
  }
  EXPECT_EQ(killed, rounds()) << "too many runs came to their end before";
  std::printf("kills: %d; went on from the old one %d, from the new one %d\n", killed, old_ones, new_ones);
}

}  // namespace
}  // namespace strata::test
