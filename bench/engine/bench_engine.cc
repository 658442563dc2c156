// bench_engine.cc - what the engine itself costs: `bench_engine NAME`, last line JSON (see bench/run).
//
//   fetch_release_resident_us   one fetch and release of a unit that is whole and up to date, world 1
//   counters_overhead           time spent counting, in percent of a step: (counter updates per step x cost of one
//                               update) / step time, on a small model, where the share is largest
//   trace_overhead              a step with the trace on against one with it off, in percent, by turns in one process:
//   8
//                               units of 262,144 params each, and for comparison of 16,384
//   plan_vs_measured_bytes      largest difference between the printed plan and the kernel's figure for resident
//                               memory (smaps_rollup) over stages 1, 2, 3 at 2 ranks, in percent of the plan
//   update_4_ranks_vs_1         the update of 32 Mi params with state in host memory, threads as they are by default:
//                               all of 4 ranks of this machine over one rank with the same total, by turns
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bench/engine/run.h"

namespace strata::bench {
namespace {

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

std::string machine() {
  std::ifstream in("/proc/cpuinfo");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind("model name", 0) == 0) break;
  }
  const size_t colon = line.find(": ");
  return (colon == std::string::npos ? "unknown" : line.substr(colon + 2)) + ", " +
         std::to_string(std::thread::hardware_concurrency()) + " cores";
}

void print(const char* name, double value, double target, const char* unit, const char* against) {
  std::printf(
      "{\"name\": \"%s\", \"value\": %.4g, \"target\": %.4g, \"unit\": \"%s\", \"better\": \"lower\", "
      "\"against\": \"%s\", \"machine\": \"%s\"}\n",
      name, value, target, unit, against, machine().c_str());
}

void fetch_release() {
  Run run(0, 1, "bench", 0, {.offload = "", .units = 4, .side = 256});
  check(strata_commit(run.engine), "commit");
  run.step();
  std::vector<double> times;
  for (int round = 0; round < 21; ++round) {
    const int n = 20000;
    const double start = now();
    for (int i = 0; i < n; ++i) {
      check(strata_fetch(run.engine, 1, nullptr), "fetch");
      check(strata_release(run.engine, 1, nullptr), "release");
    }
    times.push_back((now() - start) / n * 1e6);
  }
  print("fetch_release_resident_us", median(times), 2.0, "us", "-");
}

void counters() {
  Run run(0, 1, "bench", 3, {.side = 128});
  check(strata_commit(run.engine), "commit");
  for (int i = 0; i < 20; ++i) run.step();
  std::vector<double> steps;
  for (int i = 0; i < 200; ++i) {
    const double start = now();
    run.step();
    steps.push_back(now() - start);
  }
  strata_counters c;
  STRATA_INIT(&c);
  check(strata_get_counters(run.engine, STRATA_COUNT_LAST_STEP, &c), "counters");
  // Per fetch one update, per collective two, per gradient one, per sub-group two, per reduced segment one.
  const double updates = static_cast<double>(c.fetches + 2 * (c.gather_calls + c.reduce_calls + 1) + run.units +
                                             2 * run.units + run.units);
  std::atomic<uint64_t> counter{0};
  const int n = 10'000'000;
  const double start = now();
  for (int i = 0; i < n; ++i) counter.fetch_add(static_cast<uint64_t>(i), std::memory_order_relaxed);
  const double each = (now() - start) / n;
  std::printf("%.0f counter updates per step, %.1f ns each, step %.0f us\n", updates, each * 1e9, median(steps) * 1e6);
  print("counters_overhead", 100 * updates * each / median(steps), 1.0, "%", "the step without counting");
}

// Percent by which steps with a trace are longer. The two take turns of ten steps, and each turn is compared with the
// one beside it: the machine's own changes are longer than that.
double traced_over_plain(int64_t side, int turns, const std::string& folder) {
  Run plain(0, 1, "plain", 3, {.side = side}),
      traced(0, 1, "traced", 3, {.side = side, .sections = "[trace]\npath = \"" + folder + "\"\n"});
  check(strata_commit(plain.engine), "commit");
  check(strata_commit(traced.engine), "commit");
  const auto turn = [](Run& run) {
    std::vector<double> times;
    for (int i = 0; i < 10; ++i) {
      const double start = now();
      run.step();
      times.push_back(now() - start);
    }
    return median(times);
  };
  std::vector<double> ratios, steps;
  for (int i = 0; i < turns; ++i) {
    const double before = turn(plain), with = turn(traced), after = turn(plain);
    if (i == 0) continue;  // first touches
    ratios.push_back(2 * with / (before + after));
    steps.push_back(after);
  }
  std::printf("8 units of %lld params: step %.0f us, with the trace %.2f %% more\n",
              static_cast<long long>(side * side), median(steps) * 1e6, 100 * (median(ratios) - 1));
  return 100 * (median(ratios) - 1);
}

void trace() {
  std::string folder = "/tmp/strata-bench-XXXXXX";
  if (!mkdtemp(folder.data())) std::exit(1);
  (void)traced_over_plain(128, 300, folder);
  const double value = traced_over_plain(512, 60, folder);
  std::filesystem::remove_all(folder);
  print("trace_overhead", value, 1.0, "%", "the same step without a trace");
}

uint64_t resident() {
  std::ifstream in("/proc/self/smaps_rollup");
  std::string word;
  uint64_t kib = 0;
  while (in >> word) {
    if (word == "Rss:") in >> kib;
  }
  return kib * 1024;
}

uint64_t planned(strata_engine* engine) {
  std::vector<strata_plan_item> items(32);
  uint64_t count = 0, bytes = 0;
  check(strata_get_plan(engine, items.data(), items.size(), &count), "plan");
  for (uint64_t i = 0; i < count; ++i) bytes += items[i].bytes;
  return bytes;
}

void plan() {
  double worst = 0;
  for (int stage : {1, 2, 3}) {
    const int world = 2;
    const std::string job = "plan" + std::to_string(stage);
    std::vector<std::unique_ptr<Run>> runs(world);
    auto on_all = [&](const std::function<void(int)>& fn) {
      std::vector<std::thread> ranks;
      for (int r = 0; r < world; ++r) ranks.emplace_back(fn, r);
      for (auto& t : ranks) t.join();
    };
    on_all([&](int r) { runs[static_cast<size_t>(r)] = std::make_unique<Run>(r, world, job, stage, Run::Shape{}); });
    const uint64_t before = resident();
    on_all([&](int r) {
      check(strata_commit(runs[static_cast<size_t>(r)]->engine), "commit");
      for (int i = 0; i < 2; ++i) runs[static_cast<size_t>(r)]->step();
    });
    const double measured = static_cast<double>(resident() - before);
    const double plan = static_cast<double>(planned(runs[0]->engine) + planned(runs[1]->engine));
    std::printf("stage %d: plan %.1f MiB, measured %.1f MiB\n", stage, plan / 1048576, measured / 1048576);
    worst = std::max(worst, 100 * std::abs(measured / plan - 1));
    on_all([&](int r) { runs[static_cast<size_t>(r)].reset(); });
  }
  print("plan_vs_measured_bytes", worst, 2.0, "%", "smaps_rollup");
}

// Seconds of the update of all ranks, from when all have reduced to when all are done. In the median.
class Ranks {
 public:
  explicit Ranks(int world) : meet_(world + 1) {
    for (int r = 0; r < world; ++r) {
      threads_.emplace_back([this, r, world] {
        Run run(r, world, "ranks" + std::to_string(world), 2, {.threads = 0, .zero = "overlap_comm = false\n"});
        check(strata_commit(run.engine), "commit");
        for (meet_.arrive_and_wait(); !done_; meet_.arrive_and_wait()) {
          run.gradients();
          meet_.arrive_and_wait();
          run.update();
          meet_.arrive_and_wait();
        }
      });
    }
  }
  ~Ranks() {
    done_ = true;
    meet_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }
  double update() {
    meet_.arrive_and_wait();
    meet_.arrive_and_wait();
    const double start = now();
    meet_.arrive_and_wait();
    return now() - start;
  }

 private:
  std::barrier<> meet_;
  std::atomic<bool> done_{false};
  std::vector<std::thread> threads_;
};

void ranks() {
  Ranks four(4), one(1);
  std::vector<double> together, alone;
  for (int round = 0; round < 22; ++round) {
    const double a = four.update(), b = one.update();
    if (round < 2) continue;  // first touches
    together.push_back(a);
    alone.push_back(b);
  }
  std::printf("4 ranks %.1f ms, 1 rank %.1f ms\n", median(together) * 1e3, median(alone) * 1e3);
  print("update_4_ranks_vs_1", median(together) / median(alone), 1.0, "x", "one rank with the same total");
}

}  // namespace
}  // namespace strata::bench

using namespace strata::bench;

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  if (name == "fetch_release_resident_us") return fetch_release(), 0;
  if (name == "counters_overhead") return counters(), 0;
  if (name == "trace_overhead") return trace(), 0;
  if (name == "plan_vs_measured_bytes") return plan(), 0;
  if (name == "update_4_ranks_vs_1") return ranks(), 0;
  std::fprintf(stderr,
               "usage: bench_engine fetch_release_resident_us | counters_overhead | trace_overhead | "
               "plan_vs_measured_bytes | update_4_ranks_vs_1\n");
  return 2;
}
