// bench_adamw.cc - the update against the machine's limit for the same bytes, on all cores, in one process.
//
//   bench_adamw fp32_vs_limit   fp32 gradient; fp32 weight that is its own master: 16 B read, 12 B written
//   bench_adamw bf16_vs_limit   bf16 gradient; fp32 master; bf16 weight: 14 B read, 14 B written
//
// Levels of a shared machine drift, so every round runs each variant of the limit and then the product, on the same
// buffers and threads. The limit is the variant with the best median; the figure is the median over rounds of
// limit time / product time. The last line is JSON.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "adamw_plugin.h"
#include "limit.h"

namespace strata::bench {
namespace {

// Not a power of two: arrays at such distances fall into the same cache sets and memory banks, for every kernel.
constexpr uint64_t kElements = uint64_t{61} << 20;
constexpr uint64_t kBlock = 64 << 10;  // elements per task of the limit, the same as the plugin's
constexpr int kRounds = 21;

void* allocate(uint64_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    std::perror("mmap");
    std::exit(1);
  }
  madvise(p, bytes, MADV_HUGEPAGE);
  std::memset(p, 0, bytes);
  return p;
}

struct Buffers {
  explicit Buffers(bool half)
      : g(allocate(kElements * (half ? 2 : 4))),
        p(static_cast<float*>(allocate(kElements * 4))),
        m(static_cast<float*>(allocate(kElements * 4))),
        v(static_cast<float*>(allocate(kElements * 4))),
        w(half ? static_cast<uint16_t*>(allocate(kElements * 2)) : nullptr) {}
  // Ordinary values: the limit kernel leaves arbitrary bits behind, and subnormals or NaN are not what is measured.
  void fill(bool half) {
    for (uint64_t i = 0; i < kElements; ++i) {
      p[i] = 0.5f + 1e-9f * static_cast<float>(i);
      m[i] = 1e-3f;
      v[i] = 1e-5f;
      if (half) static_cast<uint16_t*>(g)[i] = static_cast<uint16_t>(0x3C00 + i % 64);
      if (!half) static_cast<float*>(g)[i] = 1e-2f + 1e-4f * static_cast<float>(i % 64);
    }
  }
  void* g;
  float *p, *m, *v;
  uint16_t* w;
};

struct MoveTask {
  MoveFn move;
  Traffic traffic;
};
void move_block(void* arg, uint64_t i) {
  const auto& task = *static_cast<MoveTask*>(arg);
  task.move(task.traffic, i * kBlock, (i + 1) * kBlock);
}

template <class F>
double seconds(F f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

int run(const std::string& library, bool half, unsigned threads) {
  Buffers b(half);
  b.fill(half);
  AdamwPlugin plugin(library, half ? "whole" : "split", "auto", threads);
  const std::vector<Variant> variants = limit_variants(half);
  if (variants.empty()) {
    std::fprintf(stderr, "this CPU has neither AVX2 nor AVX-512: there is no limit kernel for it\n");
    return 1;
  }
  const AdamwJob job = half ? AdamwJob{STRATA_BF16, STRATA_BF16, b.g, b.w, {b.p, b.m, b.v}, kElements}
                            : AdamwJob{STRATA_F32, STRATA_F32, b.g, b.p, {b.m, b.v, nullptr}, kElements};
  const strata_optim_group group = {sizeof(group), STRATA_ABI_MINOR, 1e-4, 0.9, 0.95, 1e-8, 0.1};
  std::vector<std::vector<double>> limits(variants.size());
  std::vector<double> product;
  for (int round = -1; round < kRounds; ++round) {  // round -1 warms up
    // An even number of xors with the same gradient per variant and round restores the buffers.
    for (size_t k = 0; k < variants.size(); ++k) {
      MoveTask task{variants[k].move, {b.g, b.p, b.m, b.v, b.w, half}};
      const auto move = [&] { plugin.executor().parallel_for(kElements / kBlock, move_block, &task); };
      const double once = seconds(move), twice = seconds(move);
      if (round >= 0) limits[k].push_back((once + twice) / 2);
    }
    double time = 0;
    for (int repeat = 0; repeat < 2; ++repeat) {
      time += seconds([&] { plugin.step(job, group, static_cast<uint64_t>(2 * round + repeat + 10), 0.5f); }) / 2;
    }
    if (round >= 0) product.push_back(time);
  }

  size_t best = 0;
  for (size_t k = 0; k < variants.size(); ++k) {
    std::printf("limit, %-28s %.3f G elements/s\n", variants[k].name.c_str(), kElements / median(limits[k]) / 1e9);
    if (median(limits[k]) < median(limits[best])) best = k;
  }
  std::printf("optim_adamw                         %.3f G elements/s (%.1f GB/s at 28 B)\n",
              kElements / median(product) / 1e9, 28 * kElements / median(product) / 1e9);
  std::vector<double> ratios;
  for (int round = 0; round < kRounds; ++round) ratios.push_back(limits[best][round] / product[round]);
  std::printf(
      "{\"name\": \"adamw_%s_vs_limit\", \"value\": %.3f, \"target\": 0.95, \"unit\": \"ratio\", \"better\": "
      "\"higher\", \"against\": \"kernel that only moves the same bytes (%s), same process and threads\", \"machine\": "
      "\"%s, %u cores\"}\n",
      half ? "bf16" : "fp32", median(ratios), variants[best].name.c_str(), cpu_model().c_str(), threads);
  return 0;
}

}  // namespace
}  // namespace strata::bench

int main(int argc, char** argv) {
  const std::string job = argc == 2 ? argv[1] : "";
  if (job != "fp32_vs_limit" && job != "bf16_vs_limit") {
    std::fprintf(stderr, "usage: %s fp32_vs_limit|bf16_vs_limit\n", argv[0]);
    return 2;
  }
  return strata::bench::run(STRATA_PLUGIN_DIR "/optim_adamw.so", job == "bf16_vs_limit",
                            std::max(1u, std::thread::hardware_concurrency()));
}
