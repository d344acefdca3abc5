#pragma once

#include "tandem/cpu/kernels/common.h"

namespace tandem::cpu::kernels {

template <class S>
constexpr int panels_for(int rows) {
  constexpr int vectors = static_cast<int>(kPanelColumns) / S::width;
  constexpr int most = 8;
  const int panels = S::max_accumulators / (rows * vectors);
  return panels < 1 ? 1 : panels > most ? most : panels;
}

template <class S>
int max_panels(int rows) {
  return panels_for<S>(rows);
}

// Each output is one chain of multiply-adds over ascending k, in whatever tile it is computed.
template <class S, class T, int R, int P>
void multiply_panels(const LinearTile& tile) {
  using F = typename S::F;
  constexpr int V = static_cast<int>(kPanelColumns) / S::width;
  constexpr int words = 4 / static_cast<int>(sizeof(T));  // k per 4 bytes of a column
  F sum[P][V][R];
  for (int p = 0; p < P; ++p) {
    for (int v = 0; v < V; ++v) {
      for (int r = 0; r < R; ++r) sum[p][v][r] = S::zero();
    }
  }
  const char* panel[P];
  for (int p = 0; p < P; ++p) panel[p] = static_cast<const char*>(tile.panels) + p * tile.panel_bytes;
  constexpr std::int64_t step = 2 * kPanelColumns * static_cast<std::int64_t>(sizeof(T));  // bytes of two k in a panel
  const float* x = tile.x;
  // `ahead`: where what corresponds to the first panel's begin lies.
  const auto multiply = [&](std::int64_t begin, std::int64_t end, std::uintptr_t ahead) {
    for (std::int64_t at = begin; at < end; at += step, x += 2 * R) {
      for (int p = 0; p < P; ++p) {
        const std::uintptr_t lines = ahead + static_cast<std::uintptr_t>(p * tile.panel_bytes + at);
        for (int line = 0; line < step; line += kCacheLine) fetch_ahead(lines + static_cast<std::uintptr_t>(line));
        typename S::Pair weights[V];
        for (int v = 0; v < V; ++v) {
          weights[v] = S::load_weights(reinterpret_cast<const T*>(panel[p] + at) + v * S::width * words);
        }
        for (int r = 0; r < R; ++r) {
          const F even = S::set1(x[r]);
          for (int v = 0; v < V; ++v) sum[p][v][r] = S::fma(weights[v].lo, even, sum[p][v][r]);
        }
        for (int r = 0; r < R; ++r) {
          const F odd = S::set1(x[R + r]);
          for (int v = 0; v < V; ++v) sum[p][v][r] = S::fma(weights[v].hi, odd, sum[p][v][r]);
        }
      }
    }
  };
  // Each panel is a stream of its own, fetched `distance` bytes ahead: to its end, then into the panels read next.
  const std::int64_t distance = tile.panel_bytes < kFetchAhead ? tile.panel_bytes : kFetchAhead / step * step;
  const std::int64_t turn = tile.panel_bytes - distance;
  const auto here = reinterpret_cast<std::uintptr_t>(tile.panels);
  const auto next = tile.ahead == nullptr ? here : reinterpret_cast<std::uintptr_t>(tile.ahead);
  multiply(0, turn, here + static_cast<std::uintptr_t>(distance));
  multiply(turn, tile.panel_bytes, next - static_cast<std::uintptr_t>(turn));
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      for (int v = 0; v < V; ++v) {
        S::store(tile.out + (r * P + p) * kPanelColumns + v * S::width, sum[p][v][r]);
      }
    }
  }
}

template <class S, class T, int R, int P = 1>
void choose_panels(const LinearTile& tile) {
  if (tile.num_panels == P) {
    multiply_panels<S, T, R, P>(tile);
  } else if constexpr (P < panels_for<S>(R)) {
    choose_panels<S, T, R, P + 1>(tile);
  }
}

template <class S, class T, int R = 1>
void choose_rows(const LinearTile& tile) {
  if (tile.rows == R) {
    choose_panels<S, T, R>(tile);
  } else if constexpr (R < S::max_rows) {
    choose_rows<S, T, R + 1>(tile);
  }
}

template <class S>
void linear_tile(DType weight, const LinearTile& tile) {
  if (weight == DType::F32) {
    choose_rows<S, float>(tile);
  } else {
    choose_rows<S, Bf16>(tile);
  }
}

template <class S, class T>
void interleave_typed(const void* const* rows, int num_rows, std::int64_t k, std::int64_t k_padded, float* out) {
  for (int r = 0; r < num_rows; ++r) {
    const T* row = static_cast<const T*>(rows[r]);
    for_groups<S>(k, [&](std::int64_t i, auto count) {
      if (num_rows == 1) {
        store_group<S>(out + i, load_group<S>(row + i, count), count);
        return;
      }
      float plain[S::width];
      S::store(plain, load_group<S>(row + i, count));
      const std::int64_t n = k - i < S::width ? k - i : S::width;
      for (std::int64_t j = 0; j < n; ++j) out[(i + j) * num_rows + r] = plain[j];
    });
    for (std::int64_t i = k; i < k_padded; ++i) out[i * num_rows + r] = 0.0f;
  }
}

template <class S>
void interleave_rows(DType dtype, const void* const* rows, int num_rows, std::int64_t k, std::int64_t k_padded,
                     float* out) {
  if (dtype == DType::F32) {
    interleave_typed<S, float>(rows, num_rows, k, k_padded, out);
  } else {
    interleave_typed<S, Bf16>(rows, num_rows, k, k_padded, out);
  }
}

}  // namespace tandem::cpu::kernels
