#pragma once

#include <immintrin.h>

#include "tandem/cpu/types.h"

namespace tandem::cpu::avx2 {

struct Simd {
  static constexpr int width = 8;
  static constexpr int max_rows = 3;
  static constexpr int max_accumulators = 12;
  static constexpr int dot_rows = 2;
  using F = __m256;
  struct Pair {
    F lo, hi;
  };

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // The second operand where they do not compare, so a NaN in `a` is dropped.
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }

  static F load(const Bf16* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static void store(Bf16* p, F v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i words = _mm256_blendv_epi8(rounded, quiet, is_nan);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  // 2 * width elements; fp32 in order, bf16 as (even elements, odd elements).
  static Pair load_pair(const float* p) { return {load(p), load(p + width)}; }
  static Pair load_pair(const Bf16* p) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(words, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  // Two rows of packed weights: k, then k + 1.
  static Pair load_weights(const float* p) { return {load(p), load(p + 32)}; }
  static Pair load_weights(const Bf16* p) {
    const Pair words = load_pair(p);
    return {words.hi, words.lo};
  }

  static F nearest(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // 2^n for integral n in [-126, 127].
  static F pow2(F n) {
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }

  static float reduce_add(F v) {
    v = _mm256_add_ps(v, _mm256_permute2f128_ps(v, v, 0x01));
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4e));
    v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xb1));
    return _mm256_cvtss_f32(v);
  }
  static float reduce_max(F v) {
    v = _mm256_max_ps(v, _mm256_permute2f128_ps(v, v, 0x01));
    v = _mm256_max_ps(v, _mm256_permute_ps(v, 0x4e));
    v = _mm256_max_ps(v, _mm256_permute_ps(v, 0xb1));
    return _mm256_cvtss_f32(v);
  }
  // Lane i of the result is reduce_add(v[i]): the same tree, lanes 4, 2 and 1 apart, for eight vectors at once.
  static F reduce_tile(const F v[width]) {
    const F a = halves(v[0], v[4]), b = halves(v[1], v[5]), c = halves(v[2], v[6]), d = halves(v[3], v[7]);
    return singles(doubles(a, c), doubles(b, d));
  }
  static bool any_greater(F a, F b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0; }

 private:
  static F halves(F a, F b) { return _mm256_add_ps(_mm256_blend_ps(a, b, 0xf0), _mm256_permute2f128_ps(a, b, 0x21)); }
  static F doubles(F a, F b) { return _mm256_add_ps(_mm256_blend_ps(a, b, 0xcc), _mm256_shuffle_ps(a, b, 0x4e)); }
  static F singles(F a, F b) {
    return _mm256_add_ps(_mm256_blend_ps(a, b, 0xaa), _mm256_permute_ps(_mm256_blend_ps(b, a, 0xaa), 0xb1));
  }
};

}  // namespace tandem::cpu::avx2
