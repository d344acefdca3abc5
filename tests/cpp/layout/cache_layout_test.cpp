#include "tandem/layout/cache_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "layout/m3_tiles.h"
#include "tandem/base/check.h"
#include "tandem/layout/digest.h"

namespace tandem::layout {
namespace {

constexpr std::int64_t kKiB = 1024;

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TileSpec tile(std::int32_t layer, Role role, ElementType dtype = ElementType::BF16, std::int32_t heads = 4,
              std::int32_t dim = 128, bool replicated = false) {
  return {LayerId{layer}, role, dtype, heads, dim, replicated};
}

TEST(M3Layout, HasTheWorkedSizesOnOneRank) {
  const CacheLayout layout(m3_tiles(), 128);
  ASSERT_EQ(layout.sections().size(), 2U);
  EXPECT_EQ(layout.sections()[0].head_stride, 3904 * kKiB);
  EXPECT_EQ(layout.sections()[0].heads, (HeadRange{0, 4, 1}));
  EXPECT_TRUE(layout.sections()[1].replicated);
  EXPECT_EQ(layout.sections()[1].bytes(), 1824 * kKiB);
  EXPECT_EQ(layout.slot_bytes(), 17440 * kKiB);
  EXPECT_EQ(layout.bytes_per_token(), 61 * 2048 + 57 * 256);
}

TEST(M3Layout, HasTheWorkedSizesOnOneOfFourRanks) {
  for (std::int32_t rank = 0; rank < 4; ++rank) {
    const CacheLayout layout(m3_tiles(), 128, {4, rank});
    EXPECT_EQ(layout.sections()[0].heads, (HeadRange{rank, 1, 1}));
    EXPECT_EQ(layout.slot_bytes(), 5728 * kKiB);
  }
}

TEST(M3Layout, PassesTwoGiBWithin121SlotsOnOneRank) {
  const View view = CacheLayout(m3_tiles(), 128).view(LayerId{0}, Role::K);
  EXPECT_LT(view.offset(SlotId{120}, 0, 0, 0), std::int64_t{1} << 31);
  EXPECT_GT(view.offset(SlotId{121}, 0, 0, 0), std::int64_t{1} << 31);
}

TEST(M3Layout, GivesAnMhaDrafterASectionOfItsOwn) {
  // 64 draft heads of 2 x 32 KiB beside 4 target heads of 60 x 2 x 32 KiB.
  const CacheLayout one(m3_tiles(64), 128);
  ASSERT_EQ(one.sections().size(), 3U);
  EXPECT_EQ(one.sections()[0].head_stride, 3840 * kKiB);
  EXPECT_EQ(one.sections()[1].global_heads, 64);
  EXPECT_EQ(one.sections()[1].offset, 4 * 3840 * kKiB);
  EXPECT_EQ(one.sections()[1].head_stride, 64 * kKiB);
  EXPECT_TRUE(one.sections()[2].replicated);
  EXPECT_EQ(one.slot_bytes(), (4 * 3840 + 64 * 64 + 1824) * kKiB);

  const CacheLayout four(m3_tiles(64), 128, {4, 1});
  EXPECT_EQ(four.sections()[1].heads, (HeadRange{16, 16, 1}));
  EXPECT_EQ(four.slot_bytes(), (3840 + 16 * 64 + 1824) * kKiB);

  // 16 ranks: each target head lives on 4 of them, draft heads are split further.
  const CacheLayout sixteen(m3_tiles(64), 128, {16, 13});
  EXPECT_EQ(sixteen.sections()[0].heads, (HeadRange{3, 1, 4}));
  EXPECT_EQ(sixteen.sections()[1].heads, (HeadRange{52, 4, 1}));
  EXPECT_EQ(sixteen.sections()[2].heads, (HeadRange{0, 1, 16}));
}

TEST(M3Layout, PutsAHeadsTilesInOneRunByLayerAndRole) {
  const CacheLayout layout(m3_tiles(), 128);
  const std::int64_t tile_bytes = 32 * kKiB;
  for (std::int32_t layer = 0; layer <= 60; ++layer) {
    for (const Role role : {Role::K, Role::V}) {
      const View view = layout.view(LayerId{layer}, role);
      EXPECT_EQ(view.base_offset, (2 * layer + (role == Role::V ? 1 : 0)) * tile_bytes);
      EXPECT_EQ(view.head_stride, 3904 * kKiB);
      EXPECT_EQ(view.token_stride, 256);
    }
  }
  for (std::int32_t layer = 3; layer < 60; ++layer) {
    const View view = layout.view(LayerId{layer}, Role::INDEX_K);
    EXPECT_EQ(view.base_offset, 4 * 3904 * kKiB + (layer - 3) * tile_bytes);
    EXPECT_EQ(view.heads, 1);
  }
}

TEST(CacheLayout, DoesNotDependOnTheOrderOfDeclaration) {
  std::vector<TileSpec> tiles = m3_tiles(64);
  const CacheLayout forward(tiles, 128);
  const CacheLayout backward({tiles.rbegin(), tiles.rend()}, 128);
  EXPECT_EQ(forward.digest(), backward.digest());
  for (const PlacedTile& each : forward.tiles()) {
    EXPECT_EQ(forward.view(each.spec.layer, each.spec.role), backward.view(each.spec.layer, each.spec.role));
  }
}

TEST(CacheLayout, RoundsTilesHeadsSectionsAndSlotsUpToTheAlignment) {
  // Rows of 6 bytes, 5 tokens: 30 bytes a tile, each on its own 256.
  const CacheLayout layout({tile(0, Role::K, ElementType::BF16, 2, 3), tile(0, Role::V, ElementType::BF16, 2, 3),
                            tile(0, Role::INDEX_K, ElementType::FP32, 1, 1, true)},
                           5, {}, 256);
  EXPECT_EQ(layout.view(LayerId{0}, Role::V).base_offset, 256);
  EXPECT_EQ(layout.sections()[0].head_stride, 512);
  EXPECT_EQ(layout.sections()[1].offset, 1024);
  EXPECT_EQ(layout.slot_bytes(), 1280);
  EXPECT_EQ(layout.bytes_per_token(), 2 * 2 * 6 + 4);
}

TEST(CacheLayout, PutsReplicatedSectionsLastWhateverTheirLayer) {
  const CacheLayout layout({tile(0, Role::INDEX_K, ElementType::BF16, 1, 128, true), tile(0, Role::K),
                            tile(1, Role::K, ElementType::BF16, 8, 128)},
                           16, {2, 1});
  ASSERT_EQ(layout.sections().size(), 3U);
  EXPECT_EQ(layout.sections()[0].global_heads, 4);
  EXPECT_EQ(layout.sections()[1].global_heads, 8);
  EXPECT_TRUE(layout.sections()[2].replicated);
  EXPECT_EQ(layout.view(LayerId{0}, Role::INDEX_K).base_offset, layout.sections()[2].offset);
}

TEST(CacheLayout, KeepsReplicatedAndSplitTilesOfOneHeadCountApart) {
  const CacheLayout layout({tile(0, Role::K), tile(0, Role::V, ElementType::BF16, 4, 128, true)}, 16, {2, 0});
  ASSERT_EQ(layout.sections().size(), 2U);
  EXPECT_EQ(layout.view(LayerId{0}, Role::K).heads, 2);
  EXPECT_EQ(layout.view(LayerId{0}, Role::V).heads, 4);
}

TEST(CacheLayout, StoresNvfp4AsHalfBytesWithAnE4M3ScalePer16) {
  const CacheLayout layout(nvfp4_tiles(0, 4, 128), 128);
  EXPECT_EQ(layout.view(LayerId{0}, Role::K).token_stride, 64);
  EXPECT_EQ(layout.view(LayerId{0}, Role::K_SCALE).token_stride, 8);
  EXPECT_EQ(layout.view(LayerId{0}, Role::K_SCALE).base_offset, 2 * 128 * 64);
  EXPECT_EQ(layout.slot_bytes(), 4 * 128 * (2 * 64 + 2 * 8));
}

TEST(CacheLayout, DescribesEachTileByNamedAxes) {
  const CacheLayout layout(m3_tiles(), 128, {2, 1});
  const PlacedTile& first = layout.tiles().front();
  EXPECT_EQ(first.axes, (TileAxes{Axis{AxisName::Head, 2, 3904 * kKiB}, Axis{AxisName::TokenGroup, 1, 32 * kKiB},
                                  Axis{AxisName::Token, 128, 256}, Axis{AxisName::Dim, 256, 1}}));
}

TEST(LocalHeads, SplitEvenlyWhereThereAreEnough) {
  EXPECT_EQ(local_heads(8, false, {4, 3}), (HeadRange{6, 2, 1}));
  EXPECT_EQ(local_heads(4, false, {4, 2}), (HeadRange{2, 1, 1}));
}

TEST(LocalHeads, AreReplicatedWhereThereAreFewerThanRanks) {
  // head rank * heads // size
  for (std::int32_t rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(local_heads(4, false, {8, rank}), (HeadRange{rank * 4 / 8, 1, 2}));
  }
  EXPECT_EQ(local_heads(1, false, {8, 5}), (HeadRange{0, 1, 8}));
}

TEST(LocalHeads, AreAllOfAReplicatedTileEverywhere) { EXPECT_EQ(local_heads(3, true, {8, 5}), (HeadRange{0, 3, 8})); }

TEST(LocalHeads, RefuseAShardThatDividesNeitherWay) {
  EXPECT_EQ(error_of([] { (void)local_heads(8, false, {3, 0}); }), "shard size is 3, must divide the 8 heads");
  EXPECT_EQ(error_of([] { (void)local_heads(4, false, {6, 0}); }),
            "shard size is 6, must be a multiple of the 4 heads that are fewer");
}

TEST(CacheLayoutErrors, NameTheTileTheValueAndWhatIsAllowed) {
  const auto error = [](std::vector<TileSpec> tiles, std::int32_t page = 128, Shard shard = {},
                        std::int64_t align = 128) {
    return error_of([&] { CacheLayout(std::move(tiles), page, shard, align); });
  };
  EXPECT_EQ(error({}), "a cache layout needs at least one tile, 0 were given");
  EXPECT_EQ(error({tile(0, Role::K)}, 0), "tokens_per_page is 0, must be at least 1");
  EXPECT_EQ(error({tile(0, Role::K)}, 128, {0, 0}), "shard size is 0, must be at least 1");
  EXPECT_EQ(error({tile(0, Role::K)}, 128, {2, 2}), "shard rank is 2, must be from 0 to 1");
  EXPECT_EQ(error({tile(0, Role::K)}, 128, {}, 64), "alignment is 64, must be a power of two of at least 128");
  EXPECT_EQ(error({tile(0, Role::K)}, 128, {}, 384), "alignment is 384, must be a power of two of at least 128");
  EXPECT_EQ(error({tile(-1, Role::K)}), "the layer of a tile is -1, must be at least 0");
  EXPECT_EQ(error({tile(3, Role::V, ElementType::BF16, 0)}), "layer 3 V: heads is 0, must be at least 1");
  EXPECT_EQ(error({tile(3, Role::V, ElementType::BF16, 4, 0)}), "layer 3 V: dim is 0, must be at least 1");
  EXPECT_EQ(error({tile(3, Role::V), tile(3, Role::V, ElementType::FP32)}), "layer 3 V is declared twice");
  EXPECT_EQ(error({tile(3, Role::V)}, 128, {3, 0}), "layer 3 V: shard size is 3, must divide the 4 heads");
  const std::int32_t huge = 2147483647;
  EXPECT_EQ(error({tile(0, Role::K, ElementType::FP32, huge, huge)}, huge),
            "the slot of this layout would exceed 63 bits of bytes");
}

TEST(CacheLayoutErrors, RefuseNvfp4WithoutFittingScales) {
  const auto error = [](std::vector<TileSpec> tiles) { return error_of([&] { CacheLayout(std::move(tiles), 128); }); };
  EXPECT_EQ(error({tile(2, Role::K, ElementType::NVFP4)}),
            "layer 2 K is NVFP4 and needs a tile layer 2 K_SCALE, which is not declared");
  EXPECT_EQ(error({tile(2, Role::K, ElementType::NVFP4), tile(2, Role::K_SCALE, ElementType::FP8_E4M3, 4, 16)}),
            "layer 2 K_SCALE is FP8_E4M3 with 4 heads of 16, must be FP8_E4M3 with 4 heads of 8");
  EXPECT_EQ(error({tile(2, Role::K, ElementType::NVFP4), tile(2, Role::K_SCALE, ElementType::BF16, 4, 8)}),
            "layer 2 K_SCALE is BF16 with 4 heads of 8, must be FP8_E4M3 with 4 heads of 8");
  EXPECT_EQ(error({tile(2, Role::K, ElementType::NVFP4, 4, 24)}),
            "layer 2 K: dim is 24, must be a multiple of 16 for NVFP4");
  EXPECT_EQ(error({tile(2, Role::K, ElementType::NVFP4, 4, 33)}),
            "layer 2 K: dim is 33, must be a multiple of 2 for NVFP4");
  EXPECT_EQ(error({tile(2, Role::INDEX_K, ElementType::NVFP4)}),
            "layer 2 INDEX_K: dtype is NVFP4, only K and V have scale tiles for it");
  EXPECT_EQ(error({tile(2, Role::V), tile(2, Role::V_SCALE, ElementType::FP8_E4M3, 4, 8)}),
            "layer 2 V_SCALE scales an NVFP4 tile, but layer 2 V is BF16");
  EXPECT_EQ(error({tile(2, Role::K), tile(2, Role::V_SCALE, ElementType::FP8_E4M3, 4, 8)}),
            "layer 2 V_SCALE scales an NVFP4 tile, but the layer has no V");
}

TEST(Digest, IsFnv1aOf128Bits) {
  EXPECT_EQ(digest_of(""), "6c62272e07bb014262b821756295c58d");
  EXPECT_EQ(digest_of("a"), "d228cb696f1a8caf78912b704e4a8964");
  EXPECT_EQ(digest_of("foobar"), "343e1662793c64bf6f0d3597ba446f18");
}

TEST(Digest, OfM3StaysWhatPeersOfEarlierBuildsSend) {
  EXPECT_EQ(CacheLayout(m3_tiles(), 128).digest(), "042b404b124e9b7c83a2cb4c64e05abf");
}

TEST(Digest, ChangesWithContentAndPlaceAndContentDigestWithContentOnly) {
  const CacheLayout base(m3_tiles(), 128);
  const std::vector<CacheLayout> placed_otherwise = {CacheLayout(m3_tiles(), 64), CacheLayout(m3_tiles(), 128, {4, 0}),
                                                     CacheLayout(m3_tiles(), 128, {4, 1}),
                                                     CacheLayout(m3_tiles(), 128, {}, 4096)};
  std::vector<std::string> digests = {base.digest()};
  for (const CacheLayout& other : placed_otherwise) {
    EXPECT_EQ(other.content_digest(), base.content_digest());
    EXPECT_THAT(digests, testing::Not(testing::Contains(other.digest())));
    digests.push_back(other.digest());
  }
  std::vector<std::string> contents = {base.content_digest()};
  const auto change = [](auto edit) {
    std::vector<TileSpec> tiles = m3_tiles();
    edit(tiles.back());
    return CacheLayout(tiles, 128);
  };
  for (const CacheLayout& other :
       {change([](TileSpec& t) { t.layer = LayerId{61}; }), change([](TileSpec& t) { t.role = Role::INDEX_K; }),
        change([](TileSpec& t) { t.dtype = ElementType::FP16; }), change([](TileSpec& t) { t.heads = 8; }),
        change([](TileSpec& t) { t.dim = 64; }), change([](TileSpec& t) { t.replicated = true; })}) {
    EXPECT_THAT(contents, testing::Not(testing::Contains(other.content_digest())));
    contents.push_back(other.content_digest());
  }
}

}  // namespace
}  // namespace tandem::layout
