#pragma once

#include <type_traits>

#include "tandem/cpu/kernels/common.h"

namespace tandem::cpu::kernels {

// Calls body with a null pointer of the element type.
template <class Body>
void with_type(DType dtype, Body body) {
  if (dtype == DType::F32) {
    body(static_cast<float*>(nullptr));
  } else {
    body(static_cast<Bf16*>(nullptr));
  }
}

template <class S, class T>
void store_typed(const float* in, std::int64_t n, T* out) {
  for_groups<S>(n, [&](std::int64_t i, auto count) { store_group<S>(out + i, load_group<S>(in + i, count), count); });
}

template <class S>
void store_row(const float* in, std::int64_t n, DType dtype, void* out) {
  with_type(dtype, [&](auto* type) { store_typed<S>(in, n, static_cast<decltype(type)>(out)); });
}

template <class S, class T>
void add_typed(const T* x, std::int64_t n, T* residual) {
  for_groups<S>(n, [&](std::int64_t i, auto count) {
    const auto sum = S::add(load_group<S>(residual + i, count), load_group<S>(x + i, count));
    store_group<S>(residual + i, sum, count);
  });
}

template <class S>
void add_row(DType dtype, const void* x, std::int64_t n, void* residual) {
  with_type(dtype, [&](auto* type) {
    using T = decltype(type);
    add_typed<S>(static_cast<const std::remove_pointer_t<T>*>(x), n, static_cast<T>(residual));
  });
}

// Sum of squares in four interleaved chains, then a fixed tree.
template <class S, class T>
float sum_of_squares(const T* x, std::int64_t n) {
  using F = typename S::F;
  F sum[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
  for_groups<S>(n, [&](std::int64_t i, auto count) {
    const F v = load_group<S>(x + i, count);
    F& chain = sum[(i / S::width) % 4];
    chain = S::fma(v, v, chain);
  });
  return S::reduce_add(S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3])));
}

template <class S>
float inverse_root(float sum, std::int64_t n, float eps) {
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
}

template <class S, class T, class Out>
void normalize(const T* x, const float* weight, std::int64_t n, float eps, bool one_plus, Out* out) {
  const auto scale = S::set1(inverse_root<S>(sum_of_squares<S>(x, n), n, eps));
  const auto base = S::set1(one_plus ? 1.0f : 0.0f);
  for_groups<S>(n, [&](std::int64_t i, auto count) {
    const auto gain = S::add(base, load_group<S>(weight + i, count));
    store_group<S>(out + i, S::mul(S::mul(load_group<S>(x + i, count), scale), gain), count);
  });
}

template <class S>
void rms_norm_row(DType dtype, const void* x, const float* weight, std::int64_t n, float eps, bool one_plus,
                  void* out) {
  with_type(dtype, [&](auto* type) {
    using T = decltype(type);
    normalize<S>(static_cast<const std::remove_pointer_t<T>*>(x), weight, n, eps, one_plus, static_cast<T>(out));
  });
}

// Half-split rotation of the first `rotary_dim` elements: pairs are (i, rotary_dim / 2 + i).
template <class S>
void rotate(float* x, std::int64_t rotary_dim, const float* cos, const float* sin) {
  const std::int64_t half = rotary_dim / 2;
  for_groups<S>(half, [&](std::int64_t i, auto count) {
    const auto a = load_group<S>(x + i, count), b = load_group<S>(x + half + i, count);
    const auto c = load_group<S>(cos + i, count), s = load_group<S>(sin + i, count);
    store_group<S>(x + i, S::sub(S::mul(a, c), S::mul(b, s)), count);
    store_group<S>(x + half + i, S::add(S::mul(b, c), S::mul(a, s)), count);
  });
}

template <class S>
void norm_rope_head(DType dtype, void* head, std::int64_t dim, const float* weight, float eps, bool one_plus,
                    std::int64_t rotary_dim, const float* cos, const float* sin) {
  float plain[kMaxHeadDim];
  with_type(dtype, [&](auto* type) {
    auto* elements = static_cast<decltype(type)>(head);
    if (weight != nullptr) {
      normalize<S>(elements, weight, dim, eps, one_plus, plain);
    } else {
      for_groups<S>(dim, [&](std::int64_t i, auto count) {
        store_group<S>(plain + i, load_group<S>(elements + i, count), count);
      });
    }
    rotate<S>(plain, rotary_dim, cos, sin);
    store_typed<S>(plain, dim, elements);
  });
}

template <class S, class T>
void swiglu_oai_typed(const T* gate, const T* up, std::int64_t n, float alpha, float limit, T* out) {
  for_groups<S>(n, [&](std::int64_t i, auto count) {
    const auto top = S::set1(limit);
    const auto g = S::min(top, load_group<S>(gate + i, count));
    const auto u = S::min(top, S::max(S::set1(-limit), load_group<S>(up + i, count)));
    const auto swish = S::mul(g, sigmoid<S>(S::mul(g, S::set1(alpha))));
    store_group<S>(out + i, S::mul(swish, S::add(u, S::set1(1.0f))), count);
  });
}

template <class S>
void swiglu_oai_row(DType dtype, const void* gate, const void* up, std::int64_t n, float alpha, float limit,
                    void* out) {
  with_type(dtype, [&](auto* type) {
    using T = decltype(type);
    using C = const std::remove_pointer_t<T>*;
    swiglu_oai_typed<S>(static_cast<C>(gate), static_cast<C>(up), n, alpha, limit, static_cast<T>(out));
  });
}

template <class S>
void silu_mul_row(DType dtype, const void* gate, const void* up, std::int64_t n, void* out) {
  with_type(dtype, [&](auto* type) {
    using T = decltype(type);
    using C = const std::remove_pointer_t<T>*;
    for_groups<S>(n, [&](std::int64_t i, auto count) {
      const auto g = load_group<S>(static_cast<C>(gate) + i, count);
      const auto u = load_group<S>(static_cast<C>(up) + i, count);
      store_group<S>(static_cast<T>(out) + i, S::mul(S::mul(g, sigmoid<S>(g)), u), count);
    });
  });
}

template <class S>
void add_scaled(const float* in, float weight, std::int64_t n, float* out) {
  for_groups<S>(n, [&](std::int64_t i, auto count) {
    const auto sum = S::fma(S::set1(weight), load_group<S>(in + i, count), load_group<S>(out + i, count));
    store_group<S>(out + i, sum, count);
  });
}

}  // namespace tandem::cpu::kernels
