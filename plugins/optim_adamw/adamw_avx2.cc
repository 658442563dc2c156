// adamw_avx2.cc - the kernels for AVX2: eight lanes. Compiled with -mavx2; called only where the CPU has it.
#include "adamw_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "adamw_loop.h"

namespace strata::adamw {
namespace {

struct Avx2 {
  using F = __m256;
  typedef uint32_t U __attribute__((vector_size(32)));
  typedef int32_t S __attribute__((vector_size(32)));
  static constexpr uint64_t width = 8;
  static F sqrt(F x) { return _mm256_sqrt_ps(x); }
  static F to_float(S x) { return __builtin_convertvector(x, F); }
  static S truncate(F x) { return __builtin_convertvector(x, S); }
  static F broadcast(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static void stream(float* p, F x) { _mm256_stream_ps(p, x); }
  static U load16(const uint16_t* p) {
    return U(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  static __m128i narrow(U x) {  // every lane is below 65536
    const __m256i packed = _mm256_packus_epi32(__m256i(x), __m256i(x));
    return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
  }
  static void store16(uint16_t* p, U x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
  static void stream16(uint16_t* p, U x) { _mm_stream_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
  static void fence() { _mm_sfence(); }
};

}  // namespace

const Kernels* avx2_kernels() {
  static constexpr Kernels table = make_kernels<Avx2>();
  return &table;
}

}  // namespace strata::adamw

#else
namespace strata::adamw {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace strata::adamw
#endif
