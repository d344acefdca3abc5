#include "tandem/kv/page_pool.h"

#include <gtest/gtest.h>

#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "tandem/base/check.h"

namespace tandem::kv {
namespace {

static_assert(!std::is_copy_constructible_v<PageRef> && !std::is_copy_assignable_v<PageRef>, "a handle is one owner");
static_assert(std::is_nothrow_move_constructible_v<PageRef> && std::is_nothrow_move_assignable_v<PageRef>,
              "vectors of handles move, never copy");
static_assert(std::is_nothrow_default_constructible_v<PageRef> && std::is_nothrow_destructible_v<PageRef>);
static_assert(!std::is_constructible_v<PageRef, SlotId> && !std::is_constructible_v<PageRef, std::int32_t>,
              "no integer makes a handle");
static_assert(!std::is_convertible_v<PageRef, bool>, "a handle must not turn into a number");
static_assert(!std::is_copy_constructible_v<PagePool> && !std::is_move_constructible_v<PagePool>,
              "handles point at their pool");

PageRef take(PagePool& pool, Holder holder = Holder::Sequence) {
  std::optional<PageRef> page = pool.allocate(holder);
  EXPECT_TRUE(page.has_value());
  return std::move(*page);
}

TEST(PagePool, HandsOutEachSlotOnceAndThenNothing) {
  PagePool pool(3);
  std::vector<PageRef> pages;
  std::vector<bool> seen(3, false);
  for (int i = 0; i < 3; ++i) {
    pages.push_back(take(pool));
    EXPECT_FALSE(seen[pages.back().slot().index()]);
    seen[pages.back().slot().index()] = true;
  }
  EXPECT_EQ(pool.allocate(), std::nullopt);
  EXPECT_EQ(pool.num_free(), 0);
  pages.pop_back();
  EXPECT_TRUE(pool.allocate().has_value());
}

TEST(PagePool, HandsOutAdjoiningSlotsWhenNewAndAfterAReleaseFromTheBack) {
  PagePool pool(8);
  for (int round = 0; round < 2; ++round) {
    std::vector<PageRef> pages;
    for (std::int32_t i = 0; i < 8; ++i) {
      pages.push_back(take(pool));
      EXPECT_EQ(pages.back().slot().value(), i);
    }
    while (!pages.empty()) {
      pages.pop_back();
    }
  }
}

TEST(PagePool, FreesASlotWhenItsLastHandleGoesWhateverTheOrder) {
  PagePool pool(1);
  PageRef first = take(pool);
  PageRef second = first.share(Holder::Step);
  PageRef third = second.share(Holder::Lease);
  first.reset();
  third.reset();
  EXPECT_EQ(pool.num_free(), 0);
  second.reset();
  EXPECT_EQ(pool.num_free(), 1);
}

TEST(PagePool, RefusesToHaveNoSlots) {
  EXPECT_THROW(PagePool(0), InvalidArgument);
  EXPECT_THROW(PagePool(-4), InvalidArgument);
}

TEST(PagePool, RefusesQuestionsAboutSlotsItDoesNotHave) {
  const PagePool pool(2);
  EXPECT_THROW((void)pool.state(SlotId{2}), InvalidArgument);
  EXPECT_THROW((void)pool.num_handles(SlotId{-1}, Holder::Tree), InvalidArgument);
}

TEST(PagePool, DerivesTheStateOfASlotFromWhoHoldsIt) {
  PagePool pool(1);
  const SlotId slot{0};
  EXPECT_EQ(pool.state(slot), PageState::Free);
  PageRef lease = take(pool, Holder::Lease);
  EXPECT_EQ(pool.state(slot), PageState::Leased);
  PageRef step = lease.share(Holder::Step);
  EXPECT_EQ(pool.state(slot), PageState::Held);
  PageRef sequence = lease.share(Holder::Sequence);
  step.reset();
  EXPECT_EQ(pool.state(slot), PageState::Held);
  PageRef tree = lease.share(Holder::Tree);
  sequence.reset();
  EXPECT_EQ(pool.state(slot), PageState::Leased);
  lease.reset();
  EXPECT_EQ(pool.state(slot), PageState::Cached);
  EXPECT_EQ(pool.ledger(), (Ledger{.free = 0, .cached = 1, .held = 0, .leased = 0, .total = 1}));
  tree.reset();
  EXPECT_EQ(pool.state(slot), PageState::Free);
}

TEST(PagePool, CountsEachSlotInExactlyOneState) {
  PagePool pool(5);
  const PageRef held = take(pool);
  const PageRef held_and_leased = take(pool);
  const PageRef its_lease = held_and_leased.share(Holder::Lease);
  const PageRef leased = take(pool, Holder::Lease);
  const PageRef in_flight = take(pool, Holder::Step);
  EXPECT_EQ(pool.ledger(), (Ledger{.free = 1, .cached = 0, .held = 3, .leased = 1, .total = 5}));
  pool.check();
}

TEST(PagePool, CountsAsPendingWhatOnlyStepsHold) {
  PagePool pool(3);
  PageRef sequence = take(pool);
  PageRef step = sequence.share(Holder::Step);
  EXPECT_EQ(pool.num_pending(), 0);
  sequence.reset();
  EXPECT_EQ(pool.num_pending(), 1);
  PageRef lease = step.share(Holder::Lease);
  EXPECT_EQ(pool.num_pending(), 0);
  lease.reset();
  PageRef second_step = step.share(Holder::Step);
  EXPECT_EQ(pool.num_pending(), 1);
  step.reset();
  EXPECT_EQ(pool.num_pending(), 1);
  second_step.reset();
  EXPECT_EQ(pool.num_pending(), 0);
  pool.check();
}

TEST(PageRef, RetaggedChangesItsHolderAndStaysOneHandle) {
  PagePool pool(1);
  PageRef page = take(pool);
  page.retag(Holder::Step);
  EXPECT_EQ(page.holder(), Holder::Step);
  EXPECT_EQ(pool.num_handles(SlotId{0}, Holder::Sequence), 0U);
  EXPECT_EQ(pool.num_handles(SlotId{0}, Holder::Step), 1U);
  EXPECT_EQ(pool.num_pending(), 1);
  page.reset();
  EXPECT_EQ(pool.num_free(), 1);
}

TEST(PageRef, MovedFromHoldsNothingAndMayBeUsedAgain) {
  PagePool pool(2);
  PageRef from = take(pool);
  const SlotId slot = from.slot();
  PageRef to = std::move(from);
  EXPECT_FALSE(static_cast<bool>(from));  // NOLINT(bugprone-use-after-move): the state after a move is the subject
  EXPECT_EQ(to.slot(), slot);
  from.reset();
  EXPECT_EQ(pool.num_free(), 1);
  from = take(pool);
  EXPECT_TRUE(static_cast<bool>(from));
  to = std::move(from);  // drops what it held
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_NE(to.slot(), slot);
}

TEST(PageRef, MovedToItselfStaysWhatItIs) {
  PagePool pool(1);
  PageRef page = take(pool);
  PageRef& alias = page;
  page = std::move(alias);
  EXPECT_TRUE(static_cast<bool>(page));
  EXPECT_EQ(pool.num_free(), 0);
}

TEST(PageRefDeathTest, EmptyHasNoSlotToTell) {
  const PageRef empty;
  EXPECT_DEATH((void)empty.slot(), "empty page handle");
  EXPECT_DEATH((void)empty.share(Holder::Step), "empty page handle");
}

TEST(PagePoolDeathTest, DestroyedWithLiveHandlesSaysHowMany) {
  EXPECT_DEATH(
      {
        std::vector<PageRef> survivors;
        PagePool pool(7);
        survivors.push_back(take(pool));
        survivors.push_back(take(pool));
      },
      "page pool destroyed with 2 of 7 pages still held by handles");
}

}  // namespace
}  // namespace tandem::kv
