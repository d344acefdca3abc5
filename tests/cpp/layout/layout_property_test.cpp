#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tandem/layout/cache_layout.h"

namespace tandem::layout {
namespace {

constexpr std::uint64_t kSeed = 20240607;

struct Case {
  std::vector<TileSpec> tiles;
  std::int32_t tokens_per_page;
  Shard shard;
  std::int64_t alignment;
};

template <typename T, std::size_t N>
T pick(std::mt19937_64& rng, const std::array<T, N>& from) {
  return from[rng() % N];
}

Case random_case(std::mt19937_64& rng) {
  Case c;
  c.tokens_per_page = pick(rng, std::array{1, 4, 12, 32, 128});
  c.shard.size = pick(rng, std::array{1, 1, 2, 3, 4, 6, 8});
  c.shard.rank = static_cast<std::int32_t>(rng() % static_cast<std::uint64_t>(c.shard.size));
  c.alignment = std::int64_t{128} << (rng() % 4);
  // Head counts that this shard can split.
  std::vector<std::int32_t> heads;
  for (std::int32_t count = 1; count <= 24; ++count) {
    if (count >= c.shard.size ? count % c.shard.size == 0 : c.shard.size % count == 0) {
      heads.push_back(count);
    }
  }
  const std::int32_t num_layers = 1 + static_cast<std::int32_t>(rng() % 5);
  for (std::int32_t layer = 0; layer < num_layers; ++layer) {
    const std::int32_t layer_heads = heads[rng() % heads.size()];
    const bool replicated = rng() % 5 == 0;
    const ElementType dtype = pick(rng, kElementTypes);
    for (const Role role : {Role::K, Role::V}) {
      if (dtype == ElementType::NVFP4) {
        const std::int32_t dim = 16 * (1 + static_cast<std::int32_t>(rng() % 8));
        c.tiles.push_back({LayerId{layer}, role, dtype, layer_heads, dim, replicated});
        c.tiles.push_back({LayerId{layer}, role == Role::K ? Role::K_SCALE : Role::V_SCALE, ElementType::FP8_E4M3,
                           layer_heads, dim / 16, replicated});
      } else {
        const std::int32_t dim = 1 + static_cast<std::int32_t>(rng() % 130);
        c.tiles.push_back({LayerId{layer}, role, dtype, layer_heads, dim, replicated});
      }
    }
    if (rng() % 2 == 0) {
      c.tiles.push_back({LayerId{layer}, Role::INDEX_K, ElementType::FP8_E4M3, 1 + static_cast<std::int32_t>(rng() % 2),
                         1 + static_cast<std::int32_t>(rng() % 64), true});
    }
  }
  std::ranges::shuffle(c.tiles, rng);
  return c;
}

// Where the design says that tiles lie, told without strides: append each tile of each head of each section in turn.
// Returns the first byte of every (layer, role, local head) in a slot and the slot's size.
std::pair<std::map<std::tuple<std::int32_t, Role, std::int32_t>, std::int64_t>, std::int64_t> append_tiles(Case c) {
  std::ranges::sort(c.tiles, {}, [](const TileSpec& t) { return std::pair(t.layer, t.role); });
  std::vector<std::pair<bool, std::int32_t>> sections;
  for (const bool replicated : {false, true}) {
    for (const TileSpec& tile : c.tiles) {
      const std::pair key(tile.replicated, tile.heads);
      if (tile.replicated == replicated && std::ranges::find(sections, key) == sections.end()) {
        sections.push_back(key);
      }
    }
  }
  std::map<std::tuple<std::int32_t, Role, std::int32_t>, std::int64_t> starts;
  std::int64_t end = 0;
  for (const auto& [replicated, heads] : sections) {
    const std::int32_t num_local = replicated ? heads : std::max(1, heads / c.shard.size);
    for (std::int32_t head = 0; head < num_local; ++head) {
      for (const TileSpec& tile : c.tiles) {
        if (tile.replicated == replicated && tile.heads == heads) {
          starts[{tile.layer.value(), tile.role, head}] = end;
          end += c.tokens_per_page * tile.dim * element_bits(tile.dtype) / 8;
          while (end % c.alignment != 0) {
            ++end;
          }
        }
      }
    }
  }
  return {starts, end};
}

TEST(LayoutProperties, TilesLieWhereAppendingThemPutsThem) {
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937_64 rng(kSeed);
  for (int round = 0; round < 400; ++round) {
    const Case c = random_case(rng);
    const CacheLayout layout(c.tiles, c.tokens_per_page, c.shard, c.alignment);
    const auto [starts, slot_bytes] = append_tiles(c);
    ASSERT_EQ(layout.slot_bytes(), slot_bytes);
    std::size_t num_seen = 0;
    for (const PlacedTile& tile : layout.tiles()) {
      const View view = layout.view(tile.spec.layer, tile.spec.role);
      for (std::int32_t head = 0; head < view.heads; ++head, ++num_seen) {
        const auto it = starts.find({tile.spec.layer.value(), tile.spec.role, head});
        ASSERT_NE(it, starts.end());
        ASSERT_EQ(view.offset(SlotId{0}, head, 0, 0), it->second);
        ASSERT_EQ(view.offset(SlotId{3}, head, 0, 0), it->second + 3 * slot_bytes);
      }
    }
    ASSERT_EQ(num_seen, starts.size());
  }
}

TEST(LayoutProperties, TilesAreAlignedDisjointAndInsideTheirSlot) {
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937_64 rng(kSeed + 1);
  for (int round = 0; round < 400; ++round) {
    const Case c = random_case(rng);
    const CacheLayout layout(c.tiles, c.tokens_per_page, c.shard, c.alignment);
    std::vector<std::pair<std::int64_t, std::int64_t>> extents;
    std::int64_t content = 0;
    for (const PlacedTile& tile : layout.tiles()) {
      const View view = layout.view(tile.spec.layer, tile.spec.role);
      for (std::int32_t head = 0; head < view.heads; ++head) {
        const std::int64_t start = view.offset(SlotId{0}, head, 0, 0);
        ASSERT_EQ(start % c.alignment, 0);
        extents.emplace_back(start, start + view.sub_page_bytes());
        content += view.sub_page_bytes();
      }
    }
    std::ranges::sort(extents);
    ASSERT_GE(extents.front().first, 0);
    ASSERT_LE(extents.back().second, layout.slot_bytes());
    for (std::size_t i = 1; i < extents.size(); ++i) {
      ASSERT_LE(extents[i - 1].second, extents[i].first);
    }
    ASSERT_EQ(layout.slot_bytes() % c.alignment, 0);
    ASSERT_EQ(content, layout.bytes_per_token() * c.tokens_per_page);
  }
}

TEST(LayoutProperties, EveryViewOfATileAddressesTheSameBytesWithinItsBound) {
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937_64 rng(kSeed + 2);
  for (int round = 0; round < 100; ++round) {
    const Case c = random_case(rng);
    const CacheLayout layout(c.tiles, c.tokens_per_page, c.shard, c.alignment);
    for (const PlacedTile& tile : layout.tiles()) {
      const View whole = layout.view(tile.spec.layer, tile.spec.role);
      for (std::int32_t page = 1; page <= c.tokens_per_page; ++page) {
        if (c.tokens_per_page % page != 0) {
          continue;
        }
        const View view = layout.view(tile.spec.layer, tile.spec.role, page);
        const std::int32_t head = static_cast<std::int32_t>(rng() % static_cast<std::uint64_t>(view.heads));
        const SlotId slot{static_cast<std::int32_t>(rng() % 1'000'000)};
        std::int64_t last = 0;
        for (std::int32_t token = 0; token < c.tokens_per_page; ++token) {
          last = view.offset(slot, head, token / page, token % page);
          ASSERT_EQ(last, whole.offset(slot, head, 0, 0) + token * tile.spec.row_bytes());
        }
        ASSERT_LE(last + view.row_bytes(), view.bound(slot.value() + 1));
        ASSERT_LE(view.bound(slot.value() + 1), (slot.value() + std::int64_t{1}) * layout.slot_bytes());
      }
    }
  }
}

TEST(LayoutProperties, RanksTogetherHoldEveryHeadAsOftenAsItsReplicas) {
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937_64 rng(kSeed + 3);
  for (int round = 0; round < 100; ++round) {
    const Case c = random_case(rng);
    std::map<std::pair<std::size_t, std::int32_t>, std::int32_t> holders;
    std::map<std::size_t, Section> sections;
    for (std::int32_t rank = 0; rank < c.shard.size; ++rank) {
      const CacheLayout layout(c.tiles, c.tokens_per_page, {c.shard.size, rank}, c.alignment);
      for (std::size_t i = 0; i < layout.sections().size(); ++i) {
        sections[i] = layout.sections()[i];
        for (std::int32_t head = 0; head < sections[i].heads.count; ++head) {
          ++holders[{i, sections[i].heads.first + head}];
        }
      }
    }
    for (const auto& [i, section] : sections) {
      for (std::int32_t head = 0; head < section.global_heads; ++head) {
        ASSERT_EQ((holders[{i, head}]), section.heads.replicas);
      }
    }
  }
}

}  // namespace
}  // namespace tandem::layout
