// adamw_cpu.cc - see adamw_cpu.h.
#include "adamw_cpu.h"

#include <algorithm>
#include <vector>

#include "adamw/formula.h"
#include "numbers/float_environment.h"

namespace strata::adamw {
namespace {

// Elements per block: 1.8 MB of fp32 state and 16-bit gradient. Large enough that starting a block costs nothing, small
// enough that two threads end together.
constexpr uint64_t kBlock = 64 * 1024;

// From this many elements on, what a call writes does not fit the caches anyway, and a weight that is only written
// goes around them: that saves reading it first.
constexpr uint64_t kStreamFrom = 1024 * 1024;

// Spans as a list of blocks: block b belongs to the span k with first[k] <= b < first[k + 1].
class Blocks {
 public:
  explicit Blocks(const strata_optim_args& args) : args_(args), first_(args.span_count + 1) {
    for (uint64_t k = 0; k < args.span_count; ++k) {
      const uint64_t length = span_at(args, k).length;
      first_[k + 1] = first_[k] + length / kBlock + (length % kBlock != 0);
      elements_ += length;
    }
  }
  uint64_t count() const { return first_.back(); }
  uint64_t elements() const { return elements_; }

  struct Block {
    uint64_t offset, count;
    uint32_t scalar_set;
  };
  Block at(uint64_t b) const {
    const uint64_t k = static_cast<uint64_t>(std::upper_bound(first_.begin(), first_.end(), b) - first_.begin()) - 1;
    const strata_optim_span& span = span_at(args_, k);
    const uint64_t begin = (b - first_[k]) * kBlock;
    return {span.offset + begin, std::min(kBlock, span.length - begin), span.scalar_set};
  }

 private:
  const strata_optim_args& args_;
  std::vector<uint64_t> first_;
  uint64_t elements_ = 0;
};

struct Step {
  Kernel kernel;
  Form form;
  const strata_optim_args& args;
  Blocks blocks;
  bool stream;
};

void step_block(void* arg, uint64_t i) {
  const Step& step = *static_cast<Step*>(arg);
  const numbers::FloatEnvironment environment;
  const Blocks::Block block = step.blocks.at(i);
  const strata_optim_args& args = step.args;
  const Pointers p = pointers_at(step.form, args, block.offset);
  Slice slice{};
  slice.grad = static_cast<const char*>(args.grad) + block.offset * element_bytes(args.grad_dtype);
  slice.weight = p.weight;
  slice.master = p.master;
  slice.exp_avg = p.exp_avg;
  slice.exp_avg_sq = p.exp_avg_sq;
  slice.count = block.count;
  slice.scalars = args.scalars + uint64_t{block.scalar_set} * STRATA_OPTIM_SCALARS;
  slice.grad_scale = *args.grad_scale;
  slice.stream = step.stream;
  step.kernel(slice);
}

struct Copy {
  const Parallel& parallel;
  Form form;
  const strata_optim_args& args;
  Canonical array;
  float* out;
  const float* in;
  uint64_t first, count;
};

void export_block(void* arg, uint64_t i) {
  const Copy& c = *static_cast<Copy*>(arg);
  const uint64_t begin = i * kBlock, end = std::min(begin + kBlock, c.count);
  const Pointers p = pointers_at(c.form, c.args, c.first);
  const float* from = c.array == kExpAvg ? p.exp_avg : c.array == kExpAvgSq ? p.exp_avg_sq : nullptr;
  if (c.array == kMaster && c.form == kSplitBf16) {
    const uint16_t* high = reinterpret_cast<const uint16_t*>(p.weight);
    const uint16_t* low = static_cast<const uint16_t*>(p.master);
    for (uint64_t k = begin; k < end; ++k) c.out[k] = join<One>(high[k], low[k]);
    return;
  }
  if (from == nullptr) from = static_cast<const float*>(c.form == kSplitF32 ? static_cast<void*>(p.weight) : p.master);
  std::copy(from + begin, from + end, c.out + begin);
}

void import_block(void* arg, uint64_t i) {
  const Copy& c = *static_cast<Copy*>(arg);
  const numbers::FloatEnvironment environment;
  const uint64_t begin = i * kBlock, end = std::min(begin + kBlock, c.count);
  const Pointers p = pointers_at(c.form, c.args, c.first);
  uint16_t* const weight16 = reinterpret_cast<uint16_t*>(p.weight);
  float* const weight = reinterpret_cast<float*>(p.weight);
  for (uint64_t k = begin; k < end; ++k) {
    const float x = canonical<One>(c.in[k]);
    if (c.array == kExpAvg) {
      p.exp_avg[k] = x;
    } else if (c.array == kExpAvgSq) {
      p.exp_avg_sq[k] = x;
    } else {
      if (c.form == kSplitBf16)
        static_cast<uint16_t*>(p.master)[k] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, x));
      if (!is_split(c.form)) static_cast<float*>(p.master)[k] = x;
      if (weight_bytes(c.form) == 4) {
        weight[k] = x;
      } else {
        weight16[k] = static_cast<uint16_t>(c.form == kWholeF16 ? f16_away<One>(x) : bf16_away<One>(x));
      }
    }
  }
}

void run_copy(Copy copy, void (*fn)(void*, uint64_t)) {
  copy.first = span_at(copy.args, 0).offset;
  copy.count = span_at(copy.args, 0).length;
  copy.parallel.run(copy.count / kBlock + (copy.count % kBlock != 0), fn, &copy);
}

}  // namespace

const char* isa_name(Isa isa) { return isa == Isa::kScalar ? "scalar" : isa == Isa::kAvx2 ? "avx2" : "avx512"; }

bool cpu_has(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2");
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::kScalar;
}

Isa best_isa() {
  for (const Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (cpu_has(isa)) return isa;
  }
  return Isa::kScalar;
}

const Kernels* kernels_of(Isa isa) {
  if (!cpu_has(isa)) return nullptr;
  return isa == Isa::kScalar ? scalar_kernels() : isa == Isa::kAvx2 ? avx2_kernels() : avx512_kernels();
}

void Parallel::run(uint64_t n, void (*fn)(void* arg, uint64_t i), void* arg) const {
  if (executor != nullptr) return executor->parallel_for(ctx, n, fn, arg);
  for (uint64_t i = 0; i < n; ++i) fn(arg, i);
}

void run_step(const Kernels& kernels, const Parallel& parallel, Form form, const strata_optim_args& args) {
  Step step{kernels.run[grad_of(args.grad_dtype)][form], form, args, Blocks(args), false};
  // A weight written over the gradient it came from is in the cache already.
  step.stream = step.blocks.elements() >= kStreamFrom && args.grad != args.weight;
  parallel.run(step.blocks.count(), step_block, &step);
}

void run_export(const Parallel& parallel, Form form, const strata_optim_args& args, Canonical array, float* out) {
  run_copy({parallel, form, args, array, out, nullptr, 0, 0}, export_block);
}

void run_import(const Parallel& parallel, Form form, const strata_optim_args& args, Canonical array, const float* in) {
  run_copy({parallel, form, args, array, nullptr, in, 0, 0}, import_block);
}

}  // namespace strata::adamw
