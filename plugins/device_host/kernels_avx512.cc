// kernels_avx512.cc - the kernels sixteen numbers at a time, with AVX-512 F, BW, DQ, VL, FMA and F16C. Compiled with
// those flags; see kernels.h. The AVX512_BF16 conversion is not used: it flushes subnormals.
#include <immintrin.h>

#include "kernels_body.h"

namespace strata::device_host {
namespace {

struct Avx512 {
  static constexpr size_t kLanes = 16, kDoubles = 16;
  using Float = __m512;
  struct Double {
    __m512d a, b;
  };

  template <strata_dtype D>
  static Float load(const char* p) {
    if constexpr (D == STRATA_F32) {
      return _mm512_loadu_ps(p);
    } else {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      if constexpr (D == STRATA_F16) return _mm512_cvtph_ps(half);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
  }

  template <strata_dtype D, strata_rounding R>
  static void store(char* p, Float value) {
    if constexpr (D == STRATA_F32) {
      _mm512_storeu_si512(p, with_one_nan(value));
    } else {
      const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i rounded = D == STRATA_BF16 ? bf16_bits<R>(bits) : f16_bits<R>(value);
      const __m512i result = _mm512_mask_set1_epi32(rounded, nan, D == STRATA_BF16 ? kNaNBf16 : kNaNF16);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(result));
    }
  }

  static void stream(char* p, Float value) { _mm512_stream_si512(reinterpret_cast<__m512i*>(p), with_one_nan(value)); }
  static void end_streams() { _mm_sfence(); }

  static Float add(Float a, Float b) { return _mm512_add_ps(a, b); }
  static bool any_nonfinite(Float value) {
    const __m512i inf = _mm512_set1_epi32(static_cast<int>(kInf32));
    return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(value), inf), inf) != 0;
  }

  // Of bf16 the even elements, then the odd ones: a shift and a mask widen them, and no lane has to move.
  template <strata_dtype D>
  static Double load_double(const char* p) {
    if constexpr (D == STRATA_F64) {
      return {_mm512_loadu_pd(p), _mm512_loadu_pd(p + 64)};
    } else if constexpr (D == STRATA_BF16) {
      const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      const __m256i even = _mm256_slli_epi32(pairs, 16);
      const __m256i odd = _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xFFFF0000)));
      return {_mm512_cvtps_pd(_mm256_castsi256_ps(even)), _mm512_cvtps_pd(_mm256_castsi256_ps(odd))};
    } else {
      return {_mm512_cvtps_pd(load_eight<D>(p)), _mm512_cvtps_pd(load_eight<D>(p + 8 * size_of(D)))};
    }
  }
  static Double add(Double x, Double y) { return {_mm512_add_pd(x.a, y.a), _mm512_add_pd(x.b, y.b)}; }
  static Double square(Double x) { return {_mm512_mul_pd(x.a, x.a), _mm512_mul_pd(x.b, x.b)}; }
  static Double add_square(Double x, Double y) {
    return {_mm512_fmadd_pd(x.a, x.a, y.a), _mm512_fmadd_pd(x.b, x.b, y.b)};
  }
  template <strata_dtype D>
  static void store_double(double* p, Double x) {
    if constexpr (D == STRATA_BF16) {
      const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                    high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
      x = {_mm512_permutex2var_pd(x.a, low, x.b), _mm512_permutex2var_pd(x.a, high, x.b)};
    }
    _mm512_storeu_pd(p, x.a);
    _mm512_storeu_pd(p + 8, x.b);
  }

 private:
  template <strata_dtype D>
  static __m256 load_eight(const char* p) {
    if constexpr (D == STRATA_F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }

  static __m512i with_one_nan(Float value) {
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    return _mm512_mask_set1_epi32(_mm512_castps_si512(value), nan, static_cast<int>(kNaN32));
  }

  // Rounded bf16 in the low half of each lane; NaN lanes are replaced by the caller.
  template <strata_rounding R>
  static __m512i bf16_bits(__m512i bits) {
    __m512i bias = _mm512_set1_epi32(0x8000);
    if constexpr (R == STRATA_ROUND_EVEN) {
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      bias = _mm512_add_epi32(_mm512_set1_epi32(0x7FFF), odd);
    }
    return _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  }

  // The same for binary16. The hardware rounds to even; away from zero follows numbers.h, all cases side by side.
  template <strata_rounding R>
  static __m512i f16_bits(Float value) {
    if constexpr (R == STRATA_ROUND_EVEN) {
      return _mm512_cvtepu16_epi32(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x8000));
    const __m512i normal = _mm512_srli_epi32(_mm512_add_epi32(magnitude, _mm512_set1_epi32(0x1000 - 0x38000000)), 13);
    const __m512i significand =
        _mm512_or_si512(_mm512_and_si512(magnitude, _mm512_set1_epi32(0x7FFFFF)), _mm512_set1_epi32(0x800000));
    // Shifts of 32 and more give 0, so magnitudes below half the smallest subnormal vanish by themselves.
    const __m512i shift = _mm512_sub_epi32(_mm512_set1_epi32(126), _mm512_srli_epi32(magnitude, 23));
    const __m512i half = _mm512_sllv_epi32(_mm512_set1_epi32(1), _mm512_sub_epi32(shift, _mm512_set1_epi32(1)));
    const __m512i subnormal = _mm512_srlv_epi32(_mm512_add_epi32(significand, half), shift);
    __m512i result =
        _mm512_mask_mov_epi32(normal, _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(0x38800000)), subnormal);
    result = _mm512_mask_set1_epi32(result, _mm512_cmpge_epu32_mask(magnitude, _mm512_set1_epi32(0x47800000)), 0x7C00);
    return _mm512_or_si512(result, sign);
  }
};

}  // namespace

const Kernels* avx512_kernels() { return kernel_table<Avx512>("avx512"); }

}  // namespace strata::device_host
