#pragma once

#include <cstdint>

#include "tandem/cpu/types.h"

namespace tandem::cpu {

// Columns of a weight panel. The packed form is the same for every instruction set.
inline constexpr std::int64_t kPanelColumns = 32;

// Largest head of `norm_rope_head`.
inline constexpr std::int64_t kMaxHeadDim = 1024;

// One tile of a linear: `num_panels` neighbouring weight panels times `rows` input rows, over all of k.
// fp32 panels are [k][32]; bf16 panels are [k/2][32] words of two, the even k in the upper half.
struct LinearTile {
  const void* panels = nullptr;
  std::int64_t panel_bytes = 0;
  int num_panels = 1;
  int rows = 1;
  std::int64_t k = 0;        // even: an odd k is padded with zero weights and zero inputs
  const float* x = nullptr;  // [k][rows]
  float* out = nullptr;      // [rows][num_panels * 32]
  // Panels of the same size that are read next, fetched into the cache meanwhile; any address will do, null: nothing.
  const void* ahead = nullptr;
};

// Query rows in the element order of the cache type, see `prepare_query`.
struct QueryRows {
  const float* data = nullptr;  // [count][stride]
  std::int64_t stride = 0;
  std::int64_t count = 0;
};

// `count` vectors of `dim` elements, `stride` bytes apart.
struct CacheRun {
  const void* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t count = 0;
  // Where a run of the same shape is read next, fetched into the cache meanwhile; any address will do, null: nothing.
  const void* ahead = nullptr;
};

// One instruction set's kernels. Every output element has one fixed chain of fp32 operations, whatever the tile.
struct KernelTable {
  const char* name;
  int max_rows;                 // of a linear tile
  int (*max_panels)(int rows);  // of a linear tile with so many rows

  void (*linear_tile)(DType weight, const LinearTile& tile);
  // [rows] inputs of k elements to [k_padded][rows] floats.
  void (*interleave_rows)(DType dtype, const void* const* rows, int num_rows, std::int64_t k, std::int64_t k_padded,
                          float* out);
  // Rounds n floats to dtype, to nearest even.
  void (*store_row)(const float* in, std::int64_t n, DType dtype, void* out);
  // residual += x, rounded to dtype.
  void (*add_row)(DType dtype, const void* x, std::int64_t n, void* residual);
  // out = x * rsqrt(mean(x^2) + eps) * (weight + one_plus), rounded once. In place is allowed.
  void (*rms_norm_row)(DType dtype, const void* x, const float* weight, std::int64_t n, float eps, bool one_plus,
                       void* out);
  // In place on one head: RMS norm where `weight` is set, then rope on the first `rotary_dim`; rounded once.
  void (*norm_rope_head)(DType dtype, void* head, std::int64_t dim, const float* weight, float eps, bool one_plus,
                         std::int64_t rotary_dim, const float* cos, const float* sin);
  void (*swiglu_oai_row)(DType dtype, const void* gate, const void* up, std::int64_t n, float alpha, float limit,
                         void* out);
  void (*silu_mul_row)(DType dtype, const void* gate, const void* up, std::int64_t n, void* out);
  // out += weight * in
  void (*add_scaled)(const float* in, float weight, std::int64_t n, float* out);

  // Floats that `prepare_query` writes for `dim` elements, and that attention accumulators take.
  std::int64_t (*query_floats)(std::int64_t dim);
  // Lays a query out in the order in which keys of type `cache` are unpacked; pads with zeros.
  void (*prepare_query)(DType dtype, const void* query, std::int64_t dim, DType cache, float* out);
  // out[row * out_stride + key] = query[row] . keys[key]
  void (*dot)(DType cache, const QueryRows& queries, const CacheRun& keys, std::int64_t dim, float* out,
              std::int64_t out_stride);
  // maxima[row] = max(maxima[row], max over keys of the dot product); a NaN product counts for nothing.
  void (*dot_max)(DType cache, const QueryRows& queries, const CacheRun& keys, std::int64_t dim, float* maxima);
  // One step of an online softmax over n scores (in place: scores become probabilities relative to the new maximum).
  // Returns the factor by which the row's accumulator must be multiplied.
  float (*softmax_step)(float* scores, std::int64_t n, float scale_log2e, float* maximum, float* sum);
  void (*scale_row)(float* row, std::int64_t n, float factor);
  // accumulators[row] += sum over keys of probabilities[row][key] * values[key], keys ascending
  void (*accumulate)(DType cache, const float* const* probabilities, float* const* accumulators, std::int64_t rows,
                     const CacheRun& values, std::int64_t dim);
  // out = accumulator * factor in plain element order, rounded to dtype.
  void (*finish_row)(const float* accumulator, std::int64_t dim, DType cache, float factor, DType dtype, void* out);
  // The first index in [begin, n) whose score is greater than the threshold, else n.
  std::int64_t (*find_above)(const float* scores, std::int64_t begin, std::int64_t n, float threshold);
};

}  // namespace tandem::cpu
