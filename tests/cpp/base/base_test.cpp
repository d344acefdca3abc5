#include <gtest/gtest.h>

#include <string>
#include <type_traits>
#include <unordered_set>

#include "tandem/base/check.h"
#include "tandem/base/strong_id.h"

namespace tandem {
namespace {

static_assert(!std::is_convertible_v<std::int32_t, SlotId>, "a plain integer must not become a slot by itself");
static_assert(!std::is_convertible_v<SlotId, std::int32_t>, "a slot must not become a plain integer by itself");
static_assert(!std::is_constructible_v<SlotId, SeatId>, "one kind of id must not become another");
static_assert(sizeof(SlotId) == sizeof(std::int32_t) && std::is_trivially_copyable_v<SlotId>);

TEST(StrongId, StartsAsNone) { EXPECT_EQ(SlotId{}.value(), -1); }

TEST(StrongId, ComparesAndHashesByValue) {
  EXPECT_LT(SlotId{2}, SlotId{3});
  EXPECT_EQ(SlotId{7}, SlotId{7});
  const std::unordered_set<SlotId> slots = {SlotId{1}, SlotId{1}, SlotId{2}};
  EXPECT_EQ(slots.size(), 2U);
}

TEST(Check, PassesSilentlyAndDoesNotBuildItsMessage) {
  int built = 0;
  const auto message = [&] {
    ++built;
    return std::string("unused");
  };
  TANDEM_CHECK(1 + 1 == 2, message());
  EXPECT_EQ(built, 0);
}

TEST(CheckDeathTest, AbortsWithPlaceConditionAndMessage) {
  const int two = 2;
  EXPECT_DEATH(TANDEM_CHECK(two == 3, "arithmetic is off"),
               "internal error at .*base_test\\.cpp:[0-9]+: arithmetic is off \\(two == 3\\)");
}

}  // namespace
}  // namespace tandem
