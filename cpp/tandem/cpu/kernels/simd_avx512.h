#pragma once

#include <immintrin.h>

#include "tandem/cpu/types.h"

namespace tandem::cpu::avx512 {

struct Simd {
  static constexpr int width = 16;
  static constexpr int max_rows = 12;
  static constexpr int max_accumulators = 24;
  static constexpr int dot_rows = 4;
  using F = __m512;
  struct Pair {
    F lo, hi;
  };

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // The second operand where they do not compare, so a NaN in `a` is dropped.
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }

  static F load(const Bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static void store(Bf16* p, F v) {
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    const __m512i words = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(words));
  }
  // 2 * width elements; fp32 in order, bf16 as (even elements, odd elements).
  static Pair load_pair(const float* p) { return {load(p), load(p + width)}; }
  static Pair load_pair(const Bf16* p) {
    const __m512i words = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  // Two rows of packed weights: k, then k + 1.
  static Pair load_weights(const float* p) { return {load(p), load(p + 32)}; }
  static Pair load_weights(const Bf16* p) {
    const Pair words = load_pair(p);
    return {words.hi, words.lo};
  }

  static F nearest(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // 2^n for integral n in [-126, 127].
  static F pow2(F n) {
    const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
  }

  static float reduce_add(F v) {
    v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4e));
    v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xb1));
    return _mm512_cvtss_f32(v);
  }
  static float reduce_max(F v) {
    v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    v = _mm512_max_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    v = _mm512_max_ps(v, _mm512_permute_ps(v, 0x4e));
    v = _mm512_max_ps(v, _mm512_permute_ps(v, 0xb1));
    return _mm512_cvtss_f32(v);
  }
  // Lane i of the result is reduce_add(v[i]): the same tree, lanes 8, 4, 2 and 1 apart, for sixteen vectors at once.
  static F reduce_tile(const F v[width]) {
    F eight[8], four[4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) eight[i] = halves(v[i], v[i + 8]);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) four[i] = quarters(eight[i], eight[i + 4]);
    return singles(doubles(four[0], four[2]), doubles(four[1], four[3]));
  }
  static bool any_greater(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

 private:
  static F halves(F a, F b) {
    return _mm512_add_ps(_mm512_mask_mov_ps(a, 0xff00, b), _mm512_shuffle_f32x4(a, b, 0x4e));
  }
  static F quarters(F a, F b) {
    const F crossed = _mm512_mask_mov_ps(b, 0xf0f0, a);
    return _mm512_add_ps(_mm512_mask_mov_ps(a, 0xf0f0, b), _mm512_shuffle_f32x4(crossed, crossed, 0xb1));
  }
  static F doubles(F a, F b) { return _mm512_add_ps(_mm512_mask_mov_ps(a, 0xcccc, b), _mm512_shuffle_ps(a, b, 0x4e)); }
  static F singles(F a, F b) {
    return _mm512_add_ps(_mm512_mask_mov_ps(a, 0xaaaa, b), _mm512_permute_ps(_mm512_mask_mov_ps(b, 0xaaaa, a), 0xb1));
  }
};

}  // namespace tandem::cpu::avx512
