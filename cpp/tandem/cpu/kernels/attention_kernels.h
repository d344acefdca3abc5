#pragma once

#include "tandem/cpu/kernels/common.h"
#include "tandem/cpu/kernels/row_kernels.h"

// Keys and values are read in groups of 2 * width elements. A bf16 group unpacks into its even and its odd elements,
// so queries and accumulators of a bf16 cache are kept in that order ("cache order").
namespace tandem::cpu::kernels {

template <class S>
std::int64_t query_floats(std::int64_t dim) {
  constexpr std::int64_t group = 2 * S::width;
  return (dim + group - 1) / group * group;
}

template <class S>
void prepare_query(DType dtype, const void* query, std::int64_t dim, DType cache, float* out) {
  constexpr std::int64_t group = 2 * S::width;
  with_type(dtype, [&](auto* type) {
    using C = const std::remove_pointer_t<decltype(type)>*;
    for_groups<S>(dim, [&](std::int64_t i, auto count) {
      store_group<S>(out + i, load_group<S>(static_cast<C>(query) + i, count), count);
    });
  });
  const std::int64_t padded = query_floats<S>(dim);
  for (std::int64_t i = dim; i < padded; ++i) out[i] = 0.0f;
  if (cache == DType::F32) return;
  for (std::int64_t base = 0; base < padded; base += group) {
    float plain[group];
    __builtin_memcpy(plain, out + base, sizeof plain);
    for (int i = 0; i < S::width; ++i) {
      out[base + i] = plain[2 * i];
      out[base + S::width + i] = plain[2 * i + 1];
    }
  }
}

// Lane r * (width / R) + j of the result is queries[r] . keys[j]. A product is a chain over the groups in each lane and
// then the tree of reduce_add, whichever tile it is part of. `Whole`: dim is a multiple of the group.
template <class S, class T, int R, bool Whole>
[[gnu::always_inline]] inline typename S::F dot_tile(const float* const queries[R], const T* const keys[S::width / R],
                                                     std::int64_t dim) {
  using F = typename S::F;
  constexpr int K = S::width / R;
  constexpr std::int64_t group = 2 * S::width;
  F sum[S::width];
#pragma GCC unroll 16
  for (int i = 0; i < S::width; ++i) sum[i] = S::zero();
  for (std::int64_t at = 0; at < dim; at += group) {
    F lo[R], hi[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      lo[r] = S::load(queries[r] + at);
      hi[r] = S::load(queries[r] + at + S::width);
    }
#pragma GCC unroll 16
    for (int j = 0; j < K; ++j) {
      typename S::Pair key;
      if constexpr (Whole) {
        key = S::load_pair(keys[j] + at);
      } else {
        key = at + group <= dim ? S::load_pair(keys[j] + at) : load_pair_part<S>(keys[j] + at, dim - at);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r * K + j] = S::fma(key.lo, lo[r], sum[r * K + j]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r * K + j] = S::fma(key.hi, hi[r], sum[r * K + j]);
    }
  }
  return S::reduce_tile(sum);
}

// Fetches the vector of `run.ahead` that corresponds to vector `index`.
template <class T>
void fetch_vector(const CacheRun& run, std::int64_t index, std::int64_t dim) {
  const auto vector = reinterpret_cast<std::uintptr_t>(run.ahead) + static_cast<std::uintptr_t>(index * run.stride);
  const auto num_bytes = static_cast<std::uintptr_t>(dim) * sizeof(T);
  for (std::uintptr_t line = 0; line < num_bytes; line += kCacheLine) fetch_ahead(vector + line);
}

// Calls sink(row, key, valid keys, products) for tiles of R rows. Key places past the run repeat its last key, so
// nothing else is read.
template <class S, class T, int R, bool Whole, class Sink>
void dot_rows(const QueryRows& queries, std::int64_t row, const CacheRun& keys, std::int64_t dim, Sink& sink) {
  constexpr int K = S::width / R;
  const float* q[R];
  for (int r = 0; r < R; ++r) q[r] = queries.data + (row + r) * queries.stride;
  for (std::int64_t key = 0; key < keys.count; key += K) {
    const T* at[K];
    const std::int64_t valid = keys.count - key < K ? keys.count - key : K;
    if (row == 0 && keys.ahead != nullptr) {
      for (std::int64_t j = 0; j < valid; ++j) fetch_vector<T>(keys, key + j, dim);
    }
#pragma GCC unroll 16
    for (int j = 0; j < K; ++j) {
      const std::int64_t index = key + (j < valid ? j : valid - 1);
      at[j] = reinterpret_cast<const T*>(static_cast<const char*>(keys.data) + index * keys.stride);
    }
    sink(Int<R>{}, row, key, valid, dot_tile<S, T, R, Whole>(q, at, dim));
  }
}

template <class S, class T, bool Whole, class Sink>
void dot_tiles(const QueryRows& queries, const CacheRun& keys, std::int64_t dim, Sink& sink) {
  std::int64_t row = 0;
  for (; row + S::dot_rows <= queries.count; row += S::dot_rows) {
    dot_rows<S, T, S::dot_rows, Whole>(queries, row, keys, dim, sink);
  }
  if constexpr (S::dot_rows > 2) {
    for (; row + 2 <= queries.count; row += 2) dot_rows<S, T, 2, Whole>(queries, row, keys, dim, sink);
  }
  for (; row < queries.count; ++row) dot_rows<S, T, 1, Whole>(queries, row, keys, dim, sink);
}

template <class S, class T, class Sink>
void dot_all(const QueryRows& queries, const CacheRun& keys, std::int64_t dim, Sink sink) {
  if (dim % (2 * S::width) == 0) {
    dot_tiles<S, T, true>(queries, keys, dim, sink);
  } else {
    dot_tiles<S, T, false>(queries, keys, dim, sink);
  }
}

template <class S, class T>
void dot_typed(const QueryRows& queries, const CacheRun& keys, std::int64_t dim, float* out, std::int64_t out_stride) {
  dot_all<S, T>(queries, keys, dim,
                [&](auto rows, std::int64_t row, std::int64_t key, std::int64_t valid, typename S::F products) {
                  constexpr int R = decltype(rows)::value;
                  constexpr int K = S::width / R;
                  float plain[S::width];
                  S::store(plain, products);
                  for (int r = 0; r < R; ++r) {
                    float* to = out + (row + r) * out_stride + key;
                    if (valid == K) {
                      __builtin_memcpy(to, plain + r * K, K * sizeof(float));
                    } else {
                      for (std::int64_t j = 0; j < valid; ++j) to[j] = plain[r * K + j];
                    }
                  }
                });
}

template <class S>
void dot(DType cache, const QueryRows& queries, const CacheRun& keys, std::int64_t dim, float* out,
         std::int64_t out_stride) {
  if (cache == DType::F32) {
    dot_typed<S, float>(queries, keys, dim, out, out_stride);
  } else {
    dot_typed<S, Bf16>(queries, keys, dim, out, out_stride);
  }
}

template <class S, class T>
void dot_max_typed(const QueryRows& queries, const CacheRun& keys, std::int64_t dim, float* maxima) {
  using F = typename S::F;
  F best = S::set1(-__builtin_inff());
  dot_all<S, T>(queries, keys, dim, [&](auto rows, std::int64_t row, std::int64_t key, std::int64_t, F products) {
    constexpr int R = decltype(rows)::value;
    constexpr int K = S::width / R;
    best = S::max(products, best);
    if (key + K < keys.count) return;
    float plain[S::width];
    S::store(plain, best);
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < K; ++j) {
        const float product = plain[r * K + j];
        if (product > maxima[row + r]) maxima[row + r] = product;
      }
    }
    best = S::set1(-__builtin_inff());
  });
}

template <class S>
void dot_max(DType cache, const QueryRows& queries, const CacheRun& keys, std::int64_t dim, float* maxima) {
  if (cache == DType::F32) {
    dot_max_typed<S, float>(queries, keys, dim, maxima);
  } else {
    dot_max_typed<S, Bf16>(queries, keys, dim, maxima);
  }
}

template <class S>
float softmax_step(float* scores, std::int64_t n, float scale_log2e, float* maximum, float* sum) {
  using F = typename S::F;
  const F scale = S::set1(scale_log2e);
  const float before = *maximum;
  F lanes = S::set1(before);
  for_groups<S>(n, [&](std::int64_t i, auto count) {
    const F scaled = S::mul(load_group<S>(scores + i, count), scale);
    store_group<S>(scores + i, scaled, count);
    if constexpr (sizeof(count) == sizeof(Int<0>)) {
      lanes = S::max(scaled, lanes);
    } else {
      lanes = S::max(load_part<S>(scores + i, count, before), lanes);
    }
  });
  const float after = S::reduce_max(lanes);
  const F shift = S::set1(after);
  F total = S::zero();
  for_groups<S>(n, [&](std::int64_t i, auto count) {
    const F p = exp2<S>(S::sub(load_group<S>(scores + i, count), shift));
    store_group<S>(scores + i, p, count);
    if constexpr (sizeof(count) == sizeof(Int<0>)) {
      total = S::add(total, p);
    } else {
      total = S::add(total, load_part<S>(scores + i, count));
    }
  });
  float factor = 0.0f;
  if (before != -__builtin_inff()) {
    float plain[S::width];
    S::store(plain, exp2<S>(S::sub(S::set1(before), shift)));
    factor = plain[0];
  }
  *maximum = after;
  *sum = *sum * factor + S::reduce_add(total);
  return factor;
}

template <class S>
void scale_row(float* row, std::int64_t n, float factor) {
  for_groups<S>(n, [&](std::int64_t i, auto count) {
    store_group<S>(row + i, S::mul(load_group<S>(row + i, count), S::set1(factor)), count);
  });
}

// R rows times G groups of 2 * width elements from element `at`; each sum is a chain over ascending keys.
template <class S, class T, int R, int G>
void accumulate_tile(const float* const* probabilities, float* const* accumulators, const CacheRun& values,
                     std::int64_t at, std::int64_t dim) {
  using F = typename S::F;
  F sum[R][2 * G];
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < 2 * G; ++g) sum[r][g] = S::load(accumulators[r] + at + g * S::width);
  }
  const char* value = static_cast<const char*>(values.data) + at * static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t key = 0; key < values.count; ++key, value += values.stride) {
    if (at == 0 && values.ahead != nullptr) fetch_vector<T>(values, key, dim);
    const T* elements = reinterpret_cast<const T*>(value);
    typename S::Pair pair[G];
    for (int g = 0; g < G; ++g) pair[g] = S::load_pair(elements + g * 2 * S::width);
    for (int r = 0; r < R; ++r) {
      const F p = S::set1(probabilities[r][key]);
      for (int g = 0; g < G; ++g) {
        sum[r][2 * g] = S::fma(p, pair[g].lo, sum[r][2 * g]);
        sum[r][2 * g + 1] = S::fma(p, pair[g].hi, sum[r][2 * g + 1]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < 2 * G; ++g) S::store(accumulators[r] + at + g * S::width, sum[r][g]);
  }
}

// The last group of a dim that is no multiple of 2 * width.
template <class S, class T>
void accumulate_part(const float* probabilities, float* accumulator, const CacheRun& values, std::int64_t at,
                     std::int64_t n) {
  typename S::F lo = S::load(accumulator + at), hi = S::load(accumulator + at + S::width);
  const char* value = static_cast<const char*>(values.data) + at * static_cast<std::int64_t>(sizeof(T));
  for (std::int64_t key = 0; key < values.count; ++key, value += values.stride) {
    const typename S::Pair pair = load_pair_part<S>(reinterpret_cast<const T*>(value), n);
    const typename S::F p = S::set1(probabilities[key]);
    lo = S::fma(p, pair.lo, lo);
    hi = S::fma(p, pair.hi, hi);
  }
  S::store(accumulator + at, lo);
  S::store(accumulator + at + S::width, hi);
}

template <class S, class T, int R>
void accumulate_rows(const float* const* probabilities, float* const* accumulators, const CacheRun& values,
                     std::int64_t dim) {
  constexpr std::int64_t group = 2 * S::width;
  constexpr int G = R == 4 ? 2 : R == 2 && S::width < 16 ? 2 : 4;
  std::int64_t at = 0;
  for (; at + G * group <= dim; at += G * group)
    accumulate_tile<S, T, R, G>(probabilities, accumulators, values, at, dim);
  for (; at + group <= dim; at += group) accumulate_tile<S, T, R, 1>(probabilities, accumulators, values, at, dim);
  if (at == dim) return;
  for (int r = 0; r < R; ++r) accumulate_part<S, T>(probabilities[r], accumulators[r], values, at, dim - at);
}

template <class S, class T>
void accumulate_typed(const float* const* probabilities, float* const* accumulators, std::int64_t rows,
                      const CacheRun& values, std::int64_t dim) {
  std::int64_t row = 0;
  if constexpr (S::dot_rows == 4) {
    for (; row + 4 <= rows; row += 4) {
      accumulate_rows<S, T, 4>(probabilities + row, accumulators + row, values, dim);
    }
  }
  for (; row + 2 <= rows; row += 2) {
    accumulate_rows<S, T, 2>(probabilities + row, accumulators + row, values, dim);
  }
  if (row < rows) accumulate_rows<S, T, 1>(probabilities + row, accumulators + row, values, dim);
}

template <class S>
void accumulate(DType cache, const float* const* probabilities, float* const* accumulators, std::int64_t rows,
                const CacheRun& values, std::int64_t dim) {
  if (cache == DType::F32) {
    accumulate_typed<S, float>(probabilities, accumulators, rows, values, dim);
  } else {
    accumulate_typed<S, Bf16>(probabilities, accumulators, rows, values, dim);
  }
}

template <class S>
void finish_row(const float* accumulator, std::int64_t dim, DType cache, float factor, DType dtype, void* out) {
  constexpr std::int64_t group = 2 * S::width;
  with_type(dtype, [&](auto* type) {
    auto* elements = static_cast<decltype(type)>(out);
    for (std::int64_t base = 0; base < dim; base += group) {
      float plain[group];
      for (int i = 0; i < S::width; ++i) {
        const float lo = accumulator[base + i] * factor, hi = accumulator[base + S::width + i] * factor;
        plain[cache == DType::F32 ? i : 2 * i] = lo;
        plain[cache == DType::F32 ? S::width + i : 2 * i + 1] = hi;
      }
      const std::int64_t left = dim - base;
      store_typed<S>(plain, left < group ? left : group, elements + base);
    }
  });
}

template <class S>
std::int64_t find_above(const float* scores, std::int64_t begin, std::int64_t n, float threshold) {
  const typename S::F bar = S::set1(threshold);
  std::int64_t i = begin;
  while (i + S::width <= n && !S::any_greater(S::load(scores + i), bar)) i += S::width;
  while (i < n && !(scores[i] > threshold)) ++i;
  return i;
}

}  // namespace tandem::cpu::kernels
