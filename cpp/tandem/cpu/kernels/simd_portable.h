#pragma once

#include <cstdint>

#include "tandem/cpu/types.h"

// Four floats of the compiler's vector extension: the baseline of any machine. Products and sums round apart.
namespace tandem::cpu::portable {

struct Simd {
  static constexpr int width = 4;
  static constexpr int max_rows = 1;  // of a linear tile
  static constexpr int max_accumulators = 8;
  static constexpr int dot_rows = 2;
  using F = float __attribute__((vector_size(16)));
  using I = std::int32_t __attribute__((vector_size(16)));
  using U = std::uint32_t __attribute__((vector_size(16)));
  struct Pair {
    F lo, hi;
  };

  static F zero() { return F{0, 0, 0, 0}; }
  static F set1(float x) { return F{x, x, x, x}; }
  static F load(const float* p) {
    F v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  // The second operand where they do not compare, so a NaN in `a` is dropped.
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }

  static F load(const Bf16* p) { return F{widen(p[0].bits), widen(p[1].bits), widen(p[2].bits), widen(p[3].bits)}; }
  static void store(Bf16* p, F v) {
    const U bits = reinterpret_cast<U>(v);
    for (int i = 0; i < width; ++i) p[i].bits = narrow(bits[i]);
  }
  // 2 * width elements; fp32 in order, bf16 as (even elements, odd elements).
  static Pair load_pair(const float* p) { return {load(p), load(p + width)}; }
  static Pair load_pair(const Bf16* p) {
    U words;
    __builtin_memcpy(&words, p, sizeof words);
    return {reinterpret_cast<F>(words << 16), reinterpret_cast<F>(words & 0xffff0000u)};
  }
  // Two rows of packed weights: k, then k + 1.
  static Pair load_weights(const float* p) { return {load(p), load(p + 32)}; }
  static Pair load_weights(const Bf16* p) {
    const Pair words = load_pair(p);
    return {words.hi, words.lo};
  }

  static F nearest(F x) {
    constexpr float magic = 12582912.0f;  // 1.5 * 2^23: adding it leaves no fraction bits
    return (x + magic) - magic;
  }
  // 2^n for integral n in [-126, 127].
  static F pow2(F n) {
    const I bits = (__builtin_convertvector(n, I) + 127) << 23;
    return reinterpret_cast<F>(bits);
  }

  static float reduce_add(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
  static float reduce_max(F v) {
    const float a = v[0] > v[2] ? v[0] : v[2];
    const float b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
  }
  // Lane i of the result is reduce_add(v[i]).
  static F reduce_tile(const F v[width]) {
    return F{reduce_add(v[0]), reduce_add(v[1]), reduce_add(v[2]), reduce_add(v[3])};
  }
  static bool any_greater(F a, F b) {
    const I mask = a > b;
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
  }

 private:
  static float widen(std::uint16_t bits) { return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16); }
  static std::uint16_t narrow(std::uint32_t bits) {
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
};

}  // namespace tandem::cpu::portable
