#include "tandem/layout/view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "layout/m3_tiles.h"
#include "tandem/base/check.h"
#include "tandem/layout/cache_layout.h"

namespace tandem::layout {
namespace {

using testing::ElementsAre;

template <typename Action>
std::string error_of(Action action) {
  try {
    action();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(View, AddressesTheSameBytesInEveryPageSize) {
  const CacheLayout layout(m3_tiles(), 128);
  const View pages = layout.view(LayerId{7}, Role::V);
  for (const std::int32_t page : {1, 2, 32, 64, 128}) {
    const View view = layout.view(LayerId{7}, Role::V, page);
    EXPECT_EQ(view.sub_pages, 128 / page);
    for (const std::int32_t token : {0, 1, 31, 32, 100, 127}) {
      EXPECT_EQ(view.offset(SlotId{5}, 2, token / page, token % page), pages.offset(SlotId{5}, 2, 0, token));
    }
  }
}

TEST(View, RefusesAPageSizeThatDoesNotDivideTheLayouts) {
  const CacheLayout layout(m3_tiles(), 128);
  for (const std::int32_t page : {0, -1, 48, 256}) {
    EXPECT_EQ(error_of([&] { (void)layout.view(LayerId{0}, Role::K, page); }),
              "a view's tokens_per_page is " + std::to_string(page) + ", must divide the layout's 128");
  }
}

TEST(View, OfAMissingTileIsRefusedAndSaysWhatTheLayerHas) {
  const CacheLayout layout(m3_tiles(), 128);
  EXPECT_EQ(error_of([&] { (void)layout.view(LayerId{1}, Role::INDEX_K); }),
            "the layout has no tile layer 1 INDEX_K; that layer has K, V");
  EXPECT_EQ(error_of([&] { (void)layout.view(LayerId{61}, Role::K); }),
            "the layout has no tile layer 61 K; that layer has none");
}

TEST(View, RefusesCoordinatesOutOfRangeByName) {
  const View view = CacheLayout(m3_tiles(), 128, {2, 0}).view(LayerId{0}, Role::K, 32);
  EXPECT_EQ(error_of([&] { (void)view.offset(SlotId{-1}, 0, 0, 0); }), "slot is -1, must be from 0 to 2147483646");
  EXPECT_EQ(error_of([&] { (void)view.offset(SlotId{0}, 2, 0, 0); }), "head is 2, must be from 0 to 1");
  EXPECT_EQ(error_of([&] { (void)view.offset(SlotId{0}, 0, 4, 0); }), "sub_page is 4, must be from 0 to 3");
  EXPECT_EQ(error_of([&] { (void)view.offset(SlotId{0}, 0, 0, 32); }), "token is 32, must be from 0 to 31");
}

TEST(View, BoundIsTheEndOfItsLastRow) {
  const CacheLayout layout(m3_tiles(), 128);
  for (const std::int32_t page : {16, 128}) {
    const View view = layout.view(LayerId{60}, Role::V, page);
    EXPECT_EQ(view.bound(9), view.offset(SlotId{8}, 3, view.sub_pages - 1, page - 1) + 256);
  }
  EXPECT_EQ(layout.view(LayerId{0}, Role::K).bound(0), 0);
  EXPECT_LE(layout.view(LayerId{59}, Role::INDEX_K).bound(9), 9 * layout.slot_bytes());
  EXPECT_EQ(error_of([&] { (void)layout.view(LayerId{0}, Role::K).bound(-1); }), "num_slots is -1, must be at least 0");
}

TEST(FlatIds, NumberTheUnitsOfThePool) {
  const CacheLayout layout(m3_tiles(), 128);
  const View view = layout.view(LayerId{3}, Role::INDEX_K, 64);
  std::vector<std::int32_t> ids(6);
  view.flat_ids(std::vector<std::int32_t>{2, -1, 0}, 3, 0, ids);
  const auto unit = [&](std::int32_t slot, std::int32_t sub_page) {
    return static_cast<std::int32_t>(view.offset(SlotId{slot}, 0, sub_page, 0) / view.sub_page_bytes());
  };
  EXPECT_THAT(ids, ElementsAre(unit(2, 0), unit(2, 1), -1, -1, unit(0, 0), unit(0, 1)));
}

TEST(FlatIds, StartAtTheAskedHead) {
  const View view = CacheLayout(m3_tiles(), 128).view(LayerId{1}, Role::V);
  std::vector<std::int32_t> ids(1);
  view.flat_ids(std::vector<std::int32_t>{1}, 2, 3, ids);
  EXPECT_EQ(std::int64_t{ids[0]} * view.sub_page_bytes(), view.offset(SlotId{1}, 3, 0, 0));
}

TEST(FlatIds, AreRefusedWhereAStrideIsNoMultipleOfTheSubPage) {
  // Page 4 of 96-byte rows: 384 bytes a tile on 128: the stride of a slot is no multiple of a tile of 3 x 128.
  const std::vector<TileSpec> tiles = {{LayerId{0}, Role::K, ElementType::BF16, 1, 48, false},
                                       {LayerId{0}, Role::V, ElementType::BF16, 1, 16, false}};
  const CacheLayout layout(tiles, 4);
  std::vector<std::int32_t> ids(1);
  const std::vector<std::int32_t> table = {0};
  EXPECT_EQ(
      error_of([&] { layout.view(LayerId{0}, Role::K).flat_ids(table, 1, 0, ids); }),
      "the view of layer 0 K in pages of 4 tokens has no flat ids: its slot stride of 512 bytes is no multiple of "
      "the sub-page's 384");
  EXPECT_EQ(error_of([&] { layout.view(LayerId{0}, Role::V).flat_ids(table, 1, 0, ids); }), "no error");
  const CacheLayout wide({tiles[0], {LayerId{0}, Role::V, ElementType::BF16, 1, 64, false}}, 4, {}, 512);
  EXPECT_EQ(error_of([&] { wide.view(LayerId{0}, Role::V).flat_ids(table, 1, 0, ids); }), "no error");
  const CacheLayout shifted({tiles[0], {LayerId{0}, Role::V, ElementType::BF16, 1, 64, false}}, 4, {}, 128);
  EXPECT_EQ(
      error_of([&] { shifted.view(LayerId{0}, Role::V).flat_ids(table, 1, 0, ids); }),
      "the view of layer 0 V in pages of 4 tokens has no flat ids: its base offset of 384 bytes is no multiple of "
      "the sub-page's 512");
}

TEST(FlatIds, RefuseSlotsOutsideThePoolAndNumbersPast32Bits) {
  const View view = CacheLayout(m3_tiles(), 128).view(LayerId{0}, Role::K, 1);
  std::vector<std::int32_t> ids(128);
  EXPECT_EQ(error_of([&] { view.flat_ids(std::vector<std::int32_t>{4}, 4, 0, ids); }),
            "a slot of the table (or -1 where there is none) is 4, must be from 0 to 3");
  EXPECT_EQ(error_of([&] { view.flat_ids(std::vector<std::int32_t>{-2}, 4, 0, ids); }),
            "a slot of the table (or -1 where there is none) is -2, must be from 0 to 3");
  // A slot has 69,760 units of 256 bytes: the first number past 32 bits is in slot 30,784.
  view.flat_ids(std::vector<std::int32_t>{30783}, 40000, 0, ids);
  EXPECT_EQ(ids.back(), 30783 * 69760 + 127);
  EXPECT_EQ(
      error_of([&] { view.flat_ids(std::vector<std::int32_t>{30784}, 40000, 0, ids); }),
      "the view of layer 0 K in pages of 1 tokens has no flat ids: slot 30784 would be number 2147491840, past 32 "
      "bits");
}

}  // namespace
}  // namespace tandem::layout
