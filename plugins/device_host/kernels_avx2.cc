// kernels_avx2.cc - the kernels eight numbers at a time, with AVX2, FMA and F16C. Compiled with those flags; see
// kernels.h.
#include <immintrin.h>

#include "kernels_body.h"

namespace strata::device_host {
namespace {

struct Avx2 {
  static constexpr size_t kLanes = 8, kDoubles = 8;
  using Float = __m256;
  struct Double {
    __m256d a, b;
  };

  template <strata_dtype D>
  static Float load(const char* p) {
    if constexpr (D == STRATA_F32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
    } else {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      if constexpr (D == STRATA_F16) return _mm256_cvtph_ps(half);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
  }

  template <strata_dtype D, strata_rounding R>
  static void store(char* p, Float value) {
    if constexpr (D == STRATA_F32) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), with_one_nan(value));
    } else {
      const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
      const __m256i bits = _mm256_castps_si256(value);
      const __m256i rounded = D == STRATA_BF16 ? bf16_bits<R>(bits) : f16_bits<R>(value);
      const __m256i result = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(D == STRATA_BF16 ? kNaNBf16 : kNaNF16), nan);
      // Eight 32-bit lanes to eight 16-bit ones: pack works within 128-bit halves, the permute joins them.
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(result, result), 0x08);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
  }

  static void stream(char* p, Float value) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), with_one_nan(value)); }
  static void end_streams() { _mm_sfence(); }

  static Float add(Float a, Float b) { return _mm256_add_ps(a, b); }
  static bool any_nonfinite(Float value) {
    const __m256i inf = _mm256_set1_epi32(static_cast<int>(kInf32));
    const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(value), inf);
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(exponent, inf)) != 0;
  }

  // Of bf16 the even elements, then the odd ones: a shift and a mask widen them, and no lane has to move.
  template <strata_dtype D>
  static Double load_double(const char* p) {
    if constexpr (D == STRATA_F64) {
      const auto* from = reinterpret_cast<const double*>(p);
      return {_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4)};
    } else if constexpr (D == STRATA_BF16) {
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      const __m128i even = _mm_slli_epi32(pairs, 16);
      const __m128i odd = _mm_and_si128(pairs, _mm_set1_epi32(static_cast<int>(0xFFFF0000)));
      return {_mm256_cvtps_pd(_mm_castsi128_ps(even)), _mm256_cvtps_pd(_mm_castsi128_ps(odd))};
    } else {
      return {_mm256_cvtps_pd(load_four<D>(p)), _mm256_cvtps_pd(load_four<D>(p + 4 * size_of(D)))};
    }
  }
  static Double add(Double x, Double y) { return {_mm256_add_pd(x.a, y.a), _mm256_add_pd(x.b, y.b)}; }
  static Double square(Double x) { return {_mm256_mul_pd(x.a, x.a), _mm256_mul_pd(x.b, x.b)}; }
  static Double add_square(Double x, Double y) {
    return {_mm256_fmadd_pd(x.a, x.a, y.a), _mm256_fmadd_pd(x.b, x.b, y.b)};
  }
  template <strata_dtype D>
  static void store_double(double* p, Double x) {
    if constexpr (D == STRATA_BF16) {
      const __m256d low = _mm256_unpacklo_pd(x.a, x.b), high = _mm256_unpackhi_pd(x.a, x.b);  // 0 1 4 5, 2 3 6 7
      x = {_mm256_permute2f128_pd(low, high, 0x20), _mm256_permute2f128_pd(low, high, 0x31)};
    }
    _mm256_storeu_pd(p, x.a);
    _mm256_storeu_pd(p + 4, x.b);
  }

 private:
  template <strata_dtype D>
  static __m128 load_four(const char* p) {
    if constexpr (D == STRATA_F32) return _mm_loadu_ps(reinterpret_cast<const float*>(p));
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }

  static __m256i with_one_nan(Float value) {
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(_mm256_castps_si256(value), _mm256_set1_epi32(static_cast<int>(kNaN32)), nan);
  }

  // Rounded bf16 in the low half of each lane; NaN lanes are replaced by the caller.
  template <strata_rounding R>
  static __m256i bf16_bits(__m256i bits) {
    __m256i bias = _mm256_set1_epi32(0x8000);
    if constexpr (R == STRATA_ROUND_EVEN) {
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      bias = _mm256_add_epi32(_mm256_set1_epi32(0x7FFF), odd);
    }
    return _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  }

  // The same for binary16. The hardware rounds to even; away from zero follows numbers.h, all cases side by side.
  template <strata_rounding R>
  static __m256i f16_bits(Float value) {
    if constexpr (R == STRATA_ROUND_EVEN) {
      return _mm256_cvtepu16_epi32(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x8000));
    const __m256i normal = _mm256_srli_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(0x1000 - 0x38000000)), 13);
    const __m256i significand =
        _mm256_or_si256(_mm256_and_si256(magnitude, _mm256_set1_epi32(0x7FFFFF)), _mm256_set1_epi32(0x800000));
    // Shifts of 32 and more give 0, so magnitudes below half the smallest subnormal vanish by themselves.
    const __m256i shift = _mm256_sub_epi32(_mm256_set1_epi32(126), _mm256_srli_epi32(magnitude, 23));
    const __m256i half = _mm256_sllv_epi32(_mm256_set1_epi32(1), _mm256_sub_epi32(shift, _mm256_set1_epi32(1)));
    const __m256i subnormal = _mm256_srlv_epi32(_mm256_add_epi32(significand, half), shift);
    __m256i result =
        _mm256_blendv_epi8(normal, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x38800000), magnitude));
    result = _mm256_blendv_epi8(result, _mm256_set1_epi32(0x7C00),
                                _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x477FFFFF)));
    return _mm256_or_si256(result, sign);
  }
};

}  // namespace

const Kernels* avx2_kernels() { return kernel_table<Avx2>("avx2"); }

}  // namespace strata::device_host
