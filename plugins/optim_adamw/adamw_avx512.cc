// adamw_avx512.cc - the kernels for AVX-512 (F, BW, DQ, VL): sixteen lanes. Compiled with those flags; called only
// where the CPU has all four.
#include "adamw_kernels.h"

#if defined(__x86_64__)
// GCC 12 takes the deliberately undefined operand inside its own AVX-512 intrinsics for a bug (GCC 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include "adamw_loop.h"

namespace strata::adamw {
namespace {

struct Avx512 {
  using F = __m512;
  typedef uint32_t U __attribute__((vector_size(64)));
  typedef int32_t S __attribute__((vector_size(64)));
  static constexpr uint64_t width = 16;
  static F sqrt(F x) { return _mm512_sqrt_ps(x); }
  static F to_float(S x) { return __builtin_convertvector(x, F); }
  static S truncate(F x) { return __builtin_convertvector(x, S); }
  static F broadcast(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void stream(float* p, F x) { _mm512_stream_ps(p, x); }
  static U load16(const uint16_t* p) {
    return U(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  }
  static void store16(uint16_t* p, U x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(__m512i(x)));
  }
  static void stream16(uint16_t* p, U x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(__m512i(x)));
  }
  static void fence() { _mm_sfence(); }
};

}  // namespace

const Kernels* avx512_kernels() {
  static constexpr Kernels table = make_kernels<Avx512>();
  return &table;
}

}  // namespace strata::adamw

#else
namespace strata::adamw {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace strata::adamw
#endif
