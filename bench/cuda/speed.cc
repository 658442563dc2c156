// speed.cc - GB/s of the kernels, read and written bytes together, against a plain copy on the device in the same run.
//
// Every round runs the copy and then each kernel, each several times in a row on one stream; figures are medians over
// rounds. Arrays are far larger than the caches.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>

#include "plugins.h"

namespace strata::bench {
namespace {

constexpr uint64_t kElements = uint64_t{256} << 20;
constexpr int kRounds = 9, kRepeats = 8;

struct Job {
  std::string name;
  double bytes;  // moved by one run
  std::function<void()> run;
  std::vector<double> gbps;
};

double gbps(Gpu& gpu, const Job& job) {
  gpu.wait();
  const auto begin = std::chrono::steady_clock::now();
  for (int k = 0; k < kRepeats; ++k) job.run();
  gpu.wait();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return job.bytes * kRepeats / seconds / 1e9;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<Job> jobs(Gpu& gpu, Optimizer& whole, Optimizer& split, float* a, float* b, float* m, float* v, void* half,
                      void* low, double* sums) {
  const auto cast = [&gpu](void* dst, strata_dtype to, const void* src, strata_dtype from, strata_rounding rounding) {
    return [=, &gpu] { expect_ok(gpu.api->cast(gpu.self, dst, to, src, from, kElements, rounding, &gpu.stream)); };
  };
  const auto square_sums = [&gpu, sums](const void* src, strata_dtype dtype) {
    return [=, &gpu] { expect_ok(gpu.api->square_sums(gpu.self, src, dtype, kElements, sums, &gpu.stream)); };
  };
  const auto step = [](Optimizer& adamw, const Slice& slice) {
    return [&adamw, slice] { adamw.step(slice, 3, 0.5f); };
  };
  const double n = kElements;
  return {
      {"copy", 8 * n, [=, &gpu] { expect_ok(gpu.api->copy(gpu.self, b, a, kElements * 4, &gpu.stream)); }, {}},
      {"cast f32 to bf16, even", 6 * n, cast(half, STRATA_BF16, a, STRATA_F32, STRATA_ROUND_EVEN), {}},
      {"cast f32 to bf16, away", 6 * n, cast(half, STRATA_BF16, a, STRATA_F32, STRATA_ROUND_AWAY), {}},
      {"cast f32 to f16, away", 6 * n, cast(half, STRATA_F16, a, STRATA_F32, STRATA_ROUND_AWAY), {}},
      {"cast bf16 to f32", 6 * n, cast(b, STRATA_F32, half, STRATA_BF16, STRATA_ROUND_EVEN), {}},
      {"cast bf16 to f16, even", 4 * n, cast(low, STRATA_F16, half, STRATA_BF16, STRATA_ROUND_EVEN), {}},
      {"accumulate f32 += bf16",
       10 * n,
       [=, &gpu] { expect_ok(gpu.api->accumulate(gpu.self, b, half, STRATA_BF16, kElements, &gpu.stream)); },
       {}},
      {"square_sums f32", 4 * n, square_sums(a, STRATA_F32), {}},
      {"square_sums bf16", 2 * n, square_sums(half, STRATA_BF16), {}},
      {"adamw bf16, whole", 28 * n, step(whole, {STRATA_BF16, STRATA_BF16, half, low, {b, m, v}, kElements}), {}},
      {"adamw bf16, split", 26 * n, step(split, {STRATA_BF16, STRATA_BF16, half, b, {low, m, v}, kElements}), {}},
      {"adamw f32, split", 28 * n, step(split, {STRATA_F32, STRATA_F32, a, b, {m, v}, kElements}), {}},
  };
}

}  // namespace

int speed(const std::string& name) {
  Gpu gpu(name);
  Optimizer whole(gpu.host, &gpu, false), split(gpu.host, &gpu, true);
  const auto floats = [&] { return static_cast<float*>(gpu.alloc(kElements * 4)); };
  float *a = floats(), *b = floats(), *m = floats(), *v = floats();
  void *half = gpu.alloc(kElements * 2), *low = gpu.alloc(kElements * 2);
  auto* sums = static_cast<double*>(gpu.alloc_pinned(kElements / STRATA_NORM_BLOCK * 8));
  // Ordinary positive numbers, in fp32 as in 16 bits.
  for (void* array : {static_cast<void*>(a), static_cast<void*>(b), static_cast<void*>(m), static_cast<void*>(v)}) {
    expect_ok(gpu.api->fill(gpu.self, array, 0x3C, kElements * 4, &gpu.stream));
  }
  for (void* array : {half, low}) expect_ok(gpu.api->fill(gpu.self, array, 0x3C, kElements * 2, &gpu.stream));
  std::vector<Job> all = jobs(gpu, whole, split, a, b, m, v, half, low, sums);
  for (int round = -1; round < kRounds; ++round) {  // round -1 warms up
    for (Job& job : all) {
      const double rate = gbps(gpu, job);
      if (round >= 0) job.gbps.push_back(rate);
    }
  }
  const double limit = median(all[0].gbps);
  double worst = 1e9;
  for (const Job& job : all) {
    const double rate = median(job.gbps);
    std::printf("%-24s %7.0f GB/s  %.3f of the copy\n", job.name.c_str(), rate, rate / limit);
    if (&job != &all[0]) worst = std::min(worst, rate / limit);
  }
  std::printf(
      "{\"name\": \"%s\", \"value\": %.3f, \"target\": 0.9, \"unit\": \"ratio\", \"better\": \"higher\", \"against\": "
      "\"copy on the device, the slowest kernel\", \"machine\": \"NVIDIA GPU 0, copy %.0f GB/s\"}\n",
      name.c_str(), worst, limit);
  return 0;
}

}  // namespace strata::bench
