#include "rank_sum/rank_sum.h"

#include <algorithm>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define RANK_SUM_TARGET(isa) __attribute__((target(isa)))
#else
#define RANK_SUM_TARGET(isa)
#endif
#define RANK_SUM_INLINE inline __attribute__((always_inline))

namespace strata::rank_sum {
namespace {

// ---- element types: written without branches, so that the compiler vectorises them ----

struct F32 {
  using Raw = float;
  static RANK_SUM_INLINE float widen(Raw x) { return x; }
  static RANK_SUM_INLINE Raw narrow(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return std::bit_cast<float>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits);
  }
};

struct Bf16 {
  using Raw = uint16_t;
  static RANK_SUM_INLINE float widen(Raw x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }
  static RANK_SUM_INLINE Raw narrow(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
};

// Half precision by integer work plus one exact fp32 operation on normal numbers for the subnormal halves.
struct F16 {
  using Raw = uint16_t;
  static RANK_SUM_INLINE float widen(Raw x) {
    const uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
    const uint32_t exponent = magnitude & (0x7c00u << 13);
    const uint32_t normal = magnitude + (112u << 23);
    const uint32_t special = magnitude + (224u << 23);  // infinity and NaN
    const uint32_t small =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude + (113u << 23)) - std::bit_cast<float>(113u << 23));
    uint32_t bits = exponent == (0x7c00u << 13) ? special : normal;
    bits = exponent == 0 ? small : bits;
    return std::bit_cast<float>(bits | (static_cast<uint32_t>(x & 0x8000u) << 16));
  }
  static RANK_SUM_INLINE Raw narrow(float x) {
    const uint32_t all = std::bit_cast<uint32_t>(x);
    const uint32_t bits = all & 0x7fffffffu;
    const uint32_t sign = (all >> 16) & 0x8000u;
    const uint32_t normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    // Adding 0.5 leaves the fp32 unit in the last place at the smallest half, so the addition rounds correctly.
    const float half = std::bit_cast<float>(126u << 23);
    const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + half) - (126u << 23);
    uint32_t result = bits < (113u << 23) ? small : normal;
    result = bits >= (143u << 23) ? 0x7c00u : result;
    return static_cast<uint16_t>(bits > 0x7f800000u ? 0x7e00u : (result | sign));
  }
};

// ---- streaming store ----

#if defined(__x86_64__)
// Both copy whole lines of 64 bytes to an aligned place. Stores of 32 bytes move a tenth more than those of 16
// (measured with both cores busy); 64 bring nothing over 32.
void stream_lines_sse2(char* to, const char* from, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += 64) {
    for (uint64_t j = i; j < i + 64; j += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
    }
  }
}
RANK_SUM_TARGET("avx2") void stream_lines_avx2(char* to, const char* from, uint64_t bytes) {
  for (uint64_t i = 0; i < bytes; i += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), b);
  }
}
#endif

void stream_copy(void* out, const void* in, uint64_t bytes) {
#if defined(__x86_64__)
  auto* to = static_cast<char*>(out);
  auto* from = static_cast<const char*>(in);
  const uint64_t head = std::min<uint64_t>(bytes, (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64);
  const uint64_t lines = (bytes - head) / 64 * 64;
  std::memcpy(to, from, head);
  if (__builtin_cpu_supports("avx2")) {
    stream_lines_avx2(to + head, from + head, lines);
  } else {
    stream_lines_sse2(to + head, from + head, lines);
  }
  std::memcpy(to + head + lines, from + head + lines, bytes - head - lines);
#else
  std::memcpy(out, in, bytes);
#endif
}

// Streamed stores are weakly ordered; nothing that follows (the rank's arrival) may pass them.
void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// ---- sum ----

// Elements that are summed and rounded before they are written; small, so that the reads of the next block start while
// this one is still being written (measured: 256 is twice as fast as 2,048).
constexpr uint64_t kBlock = 256;

template <class In, class Out>
RANK_SUM_INLINE void sum_block(const void* const* in, int inputs, uint64_t begin, uint64_t n, typename Out::Raw* out) {
  using Raw = const typename In::Raw;
  Raw* a = static_cast<Raw*>(in[0]) + begin;
  if (inputs == 1) {
    for (uint64_t i = 0; i < n; ++i) out[i] = Out::narrow(In::widen(a[i]));
    return;
  }
  Raw* b = static_cast<Raw*>(in[1]) + begin;
  if (inputs == 2) {
    for (uint64_t i = 0; i < n; ++i) out[i] = Out::narrow(In::widen(a[i]) + In::widen(b[i]));
    return;
  }
  alignas(64) float total[kBlock];
  for (uint64_t i = 0; i < n; ++i) total[i] = In::widen(a[i]) + In::widen(b[i]);
  for (int k = 2; k < inputs; ++k) {
    Raw* next = static_cast<Raw*>(in[k]) + begin;
    for (uint64_t i = 0; i < n; ++i) total[i] += In::widen(next[i]);
  }
  for (uint64_t i = 0; i < n; ++i) out[i] = Out::narrow(total[i]);
}

template <class In, class Out>
RANK_SUM_INLINE void sum_blocks(const void* const* in, int inputs, void* out, uint64_t count, bool stream) {
  alignas(64) typename Out::Raw block[kBlock];
  auto* result = static_cast<typename Out::Raw*>(out);
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const uint64_t n = std::min(kBlock, count - begin);
    sum_block<In, Out>(in, inputs, begin, n, block);
    if (stream) {
      stream_copy(result + begin, block, n * sizeof(typename Out::Raw));
    } else {
      std::memcpy(result + begin, block, n * sizeof(typename Out::Raw));
    }
  }
}

using SumFn = void (*)(const void* const*, int, void*, uint64_t, bool);

template <class In, class Out>
void sum_scalar(const void* const* in, int inputs, void* out, uint64_t count, bool stream) {
  sum_blocks<In, Out>(in, inputs, out, count, stream);
}
template <class In, class Out>
RANK_SUM_TARGET("avx2")
void sum_avx2(const void* const* in, int inputs, void* out, uint64_t count, bool stream) {
  sum_blocks<In, Out>(in, inputs, out, count, stream);
}
template <class In, class Out>
RANK_SUM_TARGET("avx512f,avx512bw,avx512vl,avx512dq")
void sum_avx512(const void* const* in, int inputs, void* out, uint64_t count, bool stream) {
  sum_blocks<In, Out>(in, inputs, out, count, stream);
}

template <class In, class Out>
SumFn pick(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return sum_avx512<In, Out>;
    case Isa::kAvx2:
      return sum_avx2<In, Out>;
    default:
      return sum_scalar<In, Out>;
  }
}

template <class In>
SumFn pick_out(Isa isa, strata_dtype out) {
  if (out == STRATA_F32) return pick<In, F32>(isa);
  if (out == STRATA_BF16) return pick<In, Bf16>(isa);
  return pick<In, F16>(isa);
}

// IEEE defaults for the length of a sum: no flush to zero, round to nearest.
class PlainFloat {
 public:
#if defined(__x86_64__)
  PlainFloat() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~PlainFloat() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  PlainFloat() {}
#endif
};

}  // namespace

bool isa_runs_here(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  }
  if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2");
#endif
  return isa == Isa::kScalar;
}

Isa best_isa() {
  for (Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
    if (isa_runs_here(isa)) return isa;
  }
  return Isa::kScalar;
}

const char* isa_name(Isa isa) { return isa == Isa::kAvx512 ? "avx512" : isa == Isa::kAvx2 ? "avx2" : "scalar"; }

void sum(Isa isa, const void* const* in, int inputs, strata_dtype in_dtype, void* out, strata_dtype out_dtype,
         uint64_t count, bool stream) {
  SumFn fn = in_dtype == STRATA_F32    ? pick_out<F32>(isa, out_dtype)
             : in_dtype == STRATA_BF16 ? pick_out<Bf16>(isa, out_dtype)
                                       : pick_out<F16>(isa, out_dtype);
  const PlainFloat mode;
  fn(in, inputs, out, count, stream);
  if (stream) stream_fence();
}

void copy(void* out, const void* in, uint64_t bytes, bool stream) {
  if (bytes == 0) return;
  if (!stream) {
    std::memcpy(out, in, bytes);
    return;
  }
  stream_copy(out, in, bytes);
  stream_fence();
}

}  // namespace strata::rank_sum
