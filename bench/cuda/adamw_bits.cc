// adamw_bits.cc - whether optim_adamw_cuda gives the bits of optim_adamw's scalar path: all kinds of slice, arbitrary
// bit patterns, three steps each.
#include <cstdio>
#include <cstring>
#include <random>

#include "plugins.h"

namespace strata::bench {
namespace {

constexpr uint64_t kElements = 4'000'000;
constexpr int kSteps = 3;

uint64_t bytes_of(strata_dtype dtype) { return dtype == STRATA_F32 ? 4 : 2; }

// Half plain numbers below 1, half any bits: infinities, NaN, subnormals, ties.
std::vector<char> patterns(strata_dtype dtype, std::mt19937_64& random) {
  std::vector<char> out(kElements * bytes_of(dtype));
  for (uint64_t i = 0; i < kElements; ++i) {
    uint32_t bits = static_cast<uint32_t>(random() >> 16);
    if (i % 2 == 0) {
      const float plain = 0.05f * static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-31f;
      std::memcpy(&bits, &plain, 4);
    }
    if (dtype != STRATA_F32) bits >>= 16;
    std::memcpy(out.data() + i * bytes_of(dtype), &bits, bytes_of(dtype));
  }
  return out;
}

// Elements that differ, of one kind of slice.
uint64_t differing(Gpu& gpu, strata_dtype grad, strata_dtype weight, bool split) {
  std::mt19937_64 random(7);
  std::vector<std::vector<char>> here = {patterns(grad, random), patterns(weight, random)};
  if (!split || weight == STRATA_BF16) here.push_back(patterns(split ? STRATA_BF16 : STRATA_F32, random));
  here.push_back(patterns(STRATA_F32, random));
  here.push_back(patterns(STRATA_F32, random));
  Slice on_cpu{grad, weight, nullptr, nullptr, {}, kElements}, on_gpu = on_cpu;
  std::vector<void*> there;
  for (std::vector<char>& array : here) {
    there.push_back(gpu.alloc(array.size()));
    gpu.copy(there.back(), array.data(), array.size());
  }
  on_cpu.grad = here[0].data(), on_cpu.weight = here[1].data();
  on_gpu.grad = there[0], on_gpu.weight = there[1];
  for (size_t k = 2; k < here.size(); ++k) on_cpu.state.push_back(here[k].data()), on_gpu.state.push_back(there[k]);
  Optimizer cpu(gpu.host, nullptr, split), cuda(gpu.host, &gpu, split);
  for (int step = 1; step <= kSteps; ++step) {
    cpu.step(on_cpu, static_cast<uint64_t>(step), 0.5f);
    cuda.step(on_gpu, static_cast<uint64_t>(step), 0.5f);
  }
  gpu.wait();
  uint64_t wrong = 0;
  for (size_t k = 0; k < here.size(); ++k) {
    std::vector<char> back(here[k].size());
    gpu.copy(back.data(), there[k], back.size());
    gpu.api->free(gpu.self, there[k]);
    const uint64_t width = back.size() / kElements;
    for (uint64_t i = 0; i < kElements; ++i) {
      wrong += std::memcmp(back.data() + i * width, here[k].data() + i * width, width) != 0;
    }
  }
  return wrong;
}

}  // namespace

int adamw_bits(const std::string& name) {
  Gpu gpu(name);
  uint64_t wrong = 0, kinds = 0;
  for (const strata_dtype grad : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
    for (const strata_dtype weight : {STRATA_F32, STRATA_BF16, STRATA_F16}) {
      for (const bool split : {false, true}) {
        if (split && weight == STRATA_F16) continue;
        const uint64_t here = differing(gpu, grad, weight, split);
        std::printf("gradient %d, weight %d, %s: %llu numbers differ\n", grad, weight, split ? "split" : "whole",
                    static_cast<unsigned long long>(here));
        wrong += here;
        ++kinds;
      }
    }
  }
  std::printf(
      "{\"name\": \"%s\", \"value\": %d, \"target\": 1, \"unit\": \"all bits equal\", \"better\": \"higher\", "
      "\"against\": \"optim_adamw, scalar: %llu kinds of slice, %.0f million elements each, %d steps\", \"machine\": "
      "\"NVIDIA GPU 0\"}\n",
      name.c_str(), wrong == 0, static_cast<unsigned long long>(kinds), kElements / 1e6, kSteps);
  return wrong == 0 ? 0 : 1;
}

}  // namespace strata::bench
