#pragma once

#include <cstdint>

#include "tandem/cpu/kernel_table.h"

// Helpers of the kernel templates. `S` is the instruction set's vector type, `T` an element type in memory. Everything
// here is a template over S, so that code compiled for one instruction set is never linked into another's kernels.
namespace tandem::cpu::kernels {

inline constexpr int kCacheLine = 64;
// How far ahead a stream is fetched: enough for the latency of memory that others use too.
inline constexpr std::int64_t kFetchAhead = 8192;

// Brings the line at an address to the second cache level; no address can fault.
inline void fetch_ahead(std::uintptr_t address) { __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2); }

template <int N>
struct Int {
  static constexpr int value = N;
};

// The first n of `width` elements, the others `fill`; reads nothing past them.
template <class S, class T>
typename S::F load_part(const T* p, std::int64_t n, float fill = 0.0f) {
  T buffer[S::width] = {};
  __builtin_memcpy(buffer, p, static_cast<std::size_t>(n) * sizeof(T));
  float plain[S::width];
  S::store(plain, S::load(buffer));
  for (std::int64_t i = n; i < S::width; ++i) plain[i] = fill;
  return S::load(plain);
}

template <class S, class T>
void store_part(T* p, typename S::F v, std::int64_t n) {
  T buffer[S::width];
  S::store(buffer, v);
  __builtin_memcpy(p, buffer, static_cast<std::size_t>(n) * sizeof(T));
}

// The first n of 2 * width elements in cache order, the others zero.
template <class S, class T>
typename S::Pair load_pair_part(const T* p, std::int64_t n) {
  T buffer[2 * S::width] = {};
  __builtin_memcpy(buffer, p, static_cast<std::size_t>(n) * sizeof(T));
  return S::load_pair(buffer);
}

// Applies body(index, count) to groups of `width`; count is an Int for whole groups, a number for the last part.
template <class S, class Body>
void for_groups(std::int64_t n, Body body) {
  std::int64_t i = 0;
  for (; i + S::width <= n; i += S::width) body(i, Int<S::width>{});
  if (i < n) body(i, n - i);
}

template <class S, class T>
typename S::F load_group(const T* p, Int<S::width>) {
  return S::load(p);
}
template <class S, class T>
typename S::F load_group(const T* p, std::int64_t n) {
  return load_part<S>(p, n);
}
template <class S, class T>
void store_group(T* p, typename S::F v, Int<S::width>) {
  S::store(p, v);
}
template <class S, class T>
void store_group(T* p, typename S::F v, std::int64_t n) {
  store_part<S>(p, v, n);
}

// 2^x, relative error below 2^-22; x below -126 gives 2^-126, a NaN stays one.
template <class S>
typename S::F exp2(typename S::F x) {
  using F = typename S::F;
  x = S::min(S::set1(127.0f), S::max(S::set1(-126.0f), x));
  const F whole = S::nearest(x);
  // e^(r ln 2) on |r| <= 1/2 by its Taylor series to the seventh power: the next term is below 2^-27.
  const F r = S::mul(S::sub(x, whole), S::set1(0.693147180559945f));
  F sum = S::set1(1.0f / 5040.0f);
  sum = S::fma(sum, r, S::set1(1.0f / 720.0f));
  sum = S::fma(sum, r, S::set1(1.0f / 120.0f));
  sum = S::fma(sum, r, S::set1(1.0f / 24.0f));
  sum = S::fma(sum, r, S::set1(1.0f / 6.0f));
  sum = S::fma(sum, r, S::set1(0.5f));
  sum = S::fma(sum, r, S::set1(1.0f));
  sum = S::fma(sum, r, S::set1(1.0f));
  return S::mul(sum, S::pow2(whole));
}

inline constexpr float kLog2e = 1.44269504088896f;

template <class S>
typename S::F sigmoid(typename S::F x) {
  const typename S::F one = S::set1(1.0f);
  return S::div(one, S::add(one, exp2<S>(S::mul(x, S::set1(-kLog2e)))));
}

}  // namespace tandem::cpu::kernels
