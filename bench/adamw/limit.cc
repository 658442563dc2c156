// limit.cc - see limit.h. The stored values depend on all loads (by xor), so that nothing can be left out.
#include "limit.h"

#include <immintrin.h>

namespace strata::bench {
namespace {

enum Stores { kPlain, kStreamWeight, kStreamAll };

// GCC 12 reports the undefined operand inside its own AVX-512 intrinsics (GCC 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

template <bool kHalf, Stores kStores>
__attribute__((target("avx512f,avx512bw,avx512vl"))) void move512(const Traffic& t, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; i += 16) {
    const __m512i g = kHalf ? _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i*)((const uint16_t*)t.g + i)))
                            : _mm512_load_si512((const float*)t.g + i);
    const __m512i m = _mm512_xor_si512(g, _mm512_load_si512(t.m + i));
    const __m512i v = _mm512_xor_si512(g, _mm512_load_si512(t.v + i));
    const __m512i p = _mm512_xor_si512(g, _mm512_load_si512(t.p + i));
    if (kStores == kStreamAll) {
      _mm512_stream_si512((__m512i*)(t.m + i), m);
      _mm512_stream_si512((__m512i*)(t.v + i), v);
      _mm512_stream_si512((__m512i*)(t.p + i), p);
    } else {
      _mm512_store_si512(t.m + i, m);
      _mm512_store_si512(t.v + i, v);
      _mm512_store_si512(t.p + i, p);
    }
    if (kHalf) {
      const __m256i w = _mm512_cvtepi32_epi16(p);
      if (kStores == kPlain) _mm256_store_si256((__m256i*)(t.w + i), w);
      if (kStores != kPlain) _mm256_stream_si256((__m256i*)(t.w + i), w);
    }
  }
  _mm_sfence();
}

template <bool kHalf, Stores kStores>
__attribute__((target("avx2"))) void move256(const Traffic& t, uint64_t begin, uint64_t end) {
  for (uint64_t i = begin; i < end; i += 8) {
    const __m256i g = kHalf ? _mm256_cvtepu16_epi32(_mm_load_si128((const __m128i*)((const uint16_t*)t.g + i)))
                            : _mm256_load_si256((const __m256i*)((const float*)t.g + i));
    const __m256i m = _mm256_xor_si256(g, _mm256_load_si256((const __m256i*)(t.m + i)));
    const __m256i v = _mm256_xor_si256(g, _mm256_load_si256((const __m256i*)(t.v + i)));
    const __m256i p = _mm256_xor_si256(g, _mm256_load_si256((const __m256i*)(t.p + i)));
    if (kStores == kStreamAll) {
      _mm256_stream_si256((__m256i*)(t.m + i), m);
      _mm256_stream_si256((__m256i*)(t.v + i), v);
      _mm256_stream_si256((__m256i*)(t.p + i), p);
    } else {
      _mm256_store_si256((__m256i*)(t.m + i), m);
      _mm256_store_si256((__m256i*)(t.v + i), v);
      _mm256_store_si256((__m256i*)(t.p + i), p);
    }
    if (kHalf) {
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(p, p), 0x08);
      const __m128i w = _mm256_castsi256_si128(packed);
      if (kStores == kPlain) _mm_store_si128((__m128i*)(t.w + i), w);
      if (kStores != kPlain) _mm_stream_si128((__m128i*)(t.w + i), w);
    }
  }
  _mm_sfence();
}
#pragma GCC diagnostic pop

template <bool kHalf>
std::vector<Variant> variants() {
  std::vector<Variant> all;
  if (__builtin_cpu_supports("avx2")) {
    all.push_back({"avx2 plain", move256<kHalf, kPlain>});
    if (kHalf) all.push_back({"avx2 non-temporal weight", move256<kHalf, kStreamWeight>});
    all.push_back({"avx2 non-temporal", move256<kHalf, kStreamAll>});
  }
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
    all.push_back({"avx512 plain", move512<kHalf, kPlain>});
    if (kHalf) all.push_back({"avx512 non-temporal weight", move512<kHalf, kStreamWeight>});
    all.push_back({"avx512 non-temporal", move512<kHalf, kStreamAll>});
  }
  return all;
}

}  // namespace

std::vector<Variant> limit_variants(bool half) { return half ? variants<true>() : variants<false>(); }

}  // namespace strata::bench
