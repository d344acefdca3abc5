#pragma once

#include <vector>

#include "tandem/layout/cache_layout.h"

namespace tandem::layout {

// MiniMax-M3 as published: 60 layers of 4 KV heads of 128, one index key of 128 in the 57 sparse layers from 3 on, and
// a drafter as layer 60 with its own head count. bf16.
inline std::vector<TileSpec> m3_tiles(std::int32_t draft_heads = 4) {
  std::vector<TileSpec> tiles;
  for (std::int32_t layer = 0; layer <= 60; ++layer) {
    const std::int32_t heads = layer == 60 ? draft_heads : 4;
    tiles.push_back({LayerId{layer}, Role::K, ElementType::BF16, heads, 128, false});
    tiles.push_back({LayerId{layer}, Role::V, ElementType::BF16, heads, 128, false});
    if (layer >= 3 && layer < 60) {
      tiles.push_back({LayerId{layer}, Role::INDEX_K, ElementType::BF16, 1, 128, true});
    }
  }
  return tiles;
}

// One NVFP4 layer with its scale tiles.
inline std::vector<TileSpec> nvfp4_tiles(std::int32_t layer, std::int32_t heads, std::int32_t dim) {
  return {{LayerId{layer}, Role::K, ElementType::NVFP4, heads, dim, false},
          {LayerId{layer}, Role::V, ElementType::NVFP4, heads, dim, false},
          {LayerId{layer}, Role::K_SCALE, ElementType::FP8_E4M3, heads, dim / 16, false},
          {LayerId{layer}, Role::V_SCALE, ElementType::FP8_E4M3, heads, dim / 16, false}};
}

}  // namespace tandem::layout
