#pragma once

#include <cstdint>
#include <vector>

#include "tandem/cpu/cache_write.h"

namespace tandem::cpu {

// Neighbouring tokens of one seat, computed together so that a key is loaded once for all.
struct TokenTile {
  std::int64_t first = 0;
  std::int64_t count = 0;
  std::int64_t longest = 0;  // largest number of visible keys
};

// Cuts the tokens that see any key into tiles of at most `most` tokens; padding (no visible key) is in none.
inline std::vector<TokenTile> token_tiles(const TokenPlaces& places, std::int64_t most) {
  std::vector<TokenTile> tiles;
  for (std::int64_t t = 0; t < places.count; ++t) {
    const std::int64_t length = places.index[t];
    if (length <= 0) continue;
    if (!tiles.empty() && tiles.back().first + tiles.back().count == t && tiles.back().count < most &&
        places.seat[tiles.back().first] == places.seat[t]) {
      TokenTile& tile = tiles.back();
      ++tile.count;
      if (length > tile.longest) tile.longest = length;
    } else {
      tiles.push_back({.first = t, .count = 1, .longest = length});
    }
  }
  return tiles;
}

}  // namespace tandem::cpu
