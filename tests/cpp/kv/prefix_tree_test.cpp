#include "tandem/kv/prefix_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "tandem/base/check.h"

namespace tandem::kv {
namespace {

using testing::ElementsAre;
using Tokens = std::vector<TokenId>;

// A pool of 8 pages of 2 tokens with its tree.
class PrefixTreeTest : public testing::Test {
 protected:
  ~PrefixTreeTest() override {
    pool_.check();
    tree_.check();
  }

  // Enters the full pages of `tokens` with new slots and lets them go from the back, as sequences do. Returns the
  // slots.
  std::vector<std::int32_t> cache(const Tokens& tokens, std::string_view salt = {}) {
    std::vector<PageRef> pages = take(tokens.size() / 2);
    tree_.insert(tokens, pages, salt);
    return let_go(std::move(pages));
  }

  std::vector<PageRef> take(std::size_t n) {
    std::vector<PageRef> pages;
    for (std::size_t i = 0; i < n; ++i) {
      pages.push_back(std::move(pool_.allocate().value()));
    }
    return pages;
  }

  static std::vector<std::int32_t> slots(const std::vector<PageRef>& pages) {
    std::vector<std::int32_t> out;
    for (const PageRef& page : pages) {
      out.push_back(page.slot().value());
    }
    return out;
  }

  static std::vector<std::int32_t> let_go(std::vector<PageRef> pages) {
    std::vector<std::int32_t> out = slots(pages);
    while (!pages.empty()) {
      pages.pop_back();
    }
    return out;
  }

  // Pages that a match of `tokens` covers, let go at once.
  std::size_t hit(const Tokens& tokens, std::string_view salt = {}) { return let_go(tree_.match(tokens, salt)).size(); }

  // How many pages a match would cover, without using any.
  std::int64_t probe(const Tokens& tokens) {
    PageHashes hashes(2, "");
    return tree_.probe(tokens, hashes) / 2;
  }

  PagePool pool_{8};
  PrefixTree tree_{pool_, 2};
};

TEST_F(PrefixTreeTest, MatchesTheLongestRunOfWholePagesAndPinsThem) {
  const auto cached = cache({1, 2, 3, 4, 5, 6});
  {
    const auto pages = tree_.match(Tokens{1, 2, 3, 4, 5, 9});
    EXPECT_EQ(slots(pages), (std::vector{cached[0], cached[1]}));
    EXPECT_EQ(pool_.state(SlotId{cached[1]}), PageState::Held);
    EXPECT_EQ(pool_.state(SlotId{cached[2]}), PageState::Cached);
  }
  EXPECT_EQ(hit({1, 2, 3, 4, 5, 6}), 3U);
  EXPECT_EQ(hit({1, 2, 3, 4, 5}), 2U);
  EXPECT_EQ(hit({1}), 0U);
  EXPECT_EQ(hit({}), 0U);
  EXPECT_EQ(hit({2, 2, 3, 4}), 0U);
}

TEST_F(PrefixTreeTest, KeepsPagesWithTheSameTokensApartByTheirPrefix) {
  cache({1, 2, 7, 7});
  cache({3, 4, 7, 7});
  EXPECT_EQ(tree_.num_pages(), 4);
  EXPECT_NE(slots(tree_.match(Tokens{1, 2, 7, 7}))[1], slots(tree_.match(Tokens{3, 4, 7, 7}))[1]);
  EXPECT_EQ(hit({7, 7}), 0U);
}

TEST_F(PrefixTreeTest, NeverSharesAcrossSalts) {
  cache({1, 2, 3, 4}, "x");
  EXPECT_EQ(hit({1, 2, 3, 4}, "x"), 2U);
  EXPECT_EQ(hit({1, 2, 3, 4}, "y"), 0U);
  EXPECT_EQ(hit({1, 2, 3, 4}), 0U);
  cache({1, 2}, "y");
  EXPECT_EQ(hit({1, 2, 3, 4}, "y"), 1U);
  EXPECT_EQ(hit({1, 2, 3, 4}, "x"), 2U);
}

TEST_F(PrefixTreeTest, ForgetsASaltWithItsLastPageAndStartsItAfresh) {
  cache({1, 2}, "x");
  cache({1, 2}, "y");
  EXPECT_EQ(tree_.evict(1), 1);
  EXPECT_EQ(hit({1, 2}, "x"), 0U);
  EXPECT_EQ(hit({1, 2}, "y"), 1U);
  cache({5, 6}, "z");
  cache({5, 6}, "x");
  EXPECT_EQ(hit({1, 2}, "z"), 0U);
  EXPECT_EQ(hit({5, 6}, "x"), 1U);
  EXPECT_EQ(hit({5, 6}, "z"), 1U);
}

TEST_F(PrefixTreeTest, ComparesTokensWhereHashesCollide) {
  const Tokens mine = {1, 2};
  const Tokens other = {3, 4};
  const std::uint64_t collision = hash_page(hash_salt(""), other);
  {
    const auto pages = take(2);
    EXPECT_TRUE(tree_.insert({}, mine, collision, "", pages[0]).entered);
    EXPECT_EQ(hit(other), 0U);
    EXPECT_TRUE(tree_.insert({}, other, collision, "", pages[1]).entered);
    EXPECT_THAT(slots(tree_.match(other)), ElementsAre(pages[1].slot().value()));
  }
  tree_.clear();  // the forged hash would not pass the check at the end
}

TEST_F(PrefixTreeTest, ComparesParentsWhereHashesCollide) {
  const Tokens same = {7, 7};
  {
    const auto pages = take(4);
    const TreeCursor left = tree_.insert({}, Tokens{1, 2}, hash_page(hash_salt(""), Tokens{1, 2}), "", pages[0]).at;
    const TreeCursor right = tree_.insert({}, Tokens{3, 4}, hash_page(hash_salt(""), Tokens{3, 4}), "", pages[1]).at;
    EXPECT_TRUE(tree_.insert(left, same, 99, "", pages[2]).entered);
    EXPECT_TRUE(tree_.insert(right, same, 99, "", pages[3]).entered);
  }
  tree_.clear();  // the forged hash would not pass the check at the end
}

TEST_F(PrefixTreeTest, KeepsTheFirstOfTwoEqualPagesAndLetsTheSecondBe) {
  auto first = take(2);
  auto second = take(2);
  EXPECT_EQ(tree_.insert(Tokens{1, 2, 3, 4}, first), 2);
  EXPECT_EQ(tree_.insert(Tokens{1, 2, 3, 4}, second), 0);
  EXPECT_FALSE(tree_.contains(second[0].slot()));
  EXPECT_EQ(slots(tree_.match(Tokens{1, 2, 3, 4})), slots(first));
  let_go(std::move(second));
  EXPECT_EQ(pool_.num_free(), 6);
  let_go(std::move(first));
  EXPECT_EQ(pool_.ledger().cached, 2);
}

TEST_F(PrefixTreeTest, RefusesAPageUnderASecondPrefixAndAPageOfAnotherPool) {
  auto pages = take(1);
  tree_.insert(Tokens{1, 2}, pages);
  EXPECT_EQ(tree_.insert(Tokens{1, 2}, pages), 0);
  EXPECT_THROW(tree_.insert(Tokens{3, 4}, pages), InvalidArgument);
  EXPECT_THROW(tree_.insert(Tokens{3, 4}, pages, "salt"), InvalidArgument);
  EXPECT_THROW(tree_.insert(Tokens{1, 2, 3, 4}, pages), InvalidArgument);
  EXPECT_THROW(tree_.insert(Tokens{-1, 4}, pages), InvalidArgument);
  EXPECT_THROW((void)tree_.match(Tokens{-1, 4}), InvalidArgument);
  PagePool other(8);
  std::vector<PageRef> foreign;
  foreign.push_back(std::move(other.allocate().value()));
  EXPECT_THROW(tree_.insert(Tokens{3, 4}, foreign), InvalidArgument);
  EXPECT_EQ(tree_.num_pages(), 1);
}

TEST_F(PrefixTreeTest, EvictsTheLeastRecentlyUsedLeafFirst) {
  cache({1, 1, 2, 2});
  cache({3, 3, 4, 4});
  EXPECT_EQ(hit({1, 1, 2, 2}), 2U);  // now used last
  EXPECT_EQ(tree_.evict(1), 1);
  EXPECT_EQ(probe({3, 3, 4, 4}), 1);
  EXPECT_EQ(tree_.evict(1), 1);
  EXPECT_EQ(probe({3, 3, 4, 4}), 0);
  EXPECT_EQ(probe({1, 1, 2, 2}), 2);
  EXPECT_EQ(tree_.evict(1), 1);
  EXPECT_EQ(probe({1, 1, 2, 2}), 1);
}

TEST_F(PrefixTreeTest, EvictsAPageLetGoEarlyOnlyWithTheLastOneBelowIt) {
  // [1 1] was let go before [3 3], but the page below it was in use until after.
  auto run = take(2);
  tree_.insert(Tokens{1, 1, 2, 2}, run);
  run[0].reset();
  cache({3, 3});
  run[1].reset();
  cache({4, 4});
  for (const Tokens& gone : {Tokens{3, 3}, Tokens{1, 1, 2, 2}, Tokens{1, 1}, Tokens{4, 4}}) {
    EXPECT_EQ(probe(gone), static_cast<std::int64_t>(gone.size()) / 2);
    EXPECT_EQ(tree_.evict(1), 1);
    EXPECT_EQ(probe(gone), static_cast<std::int64_t>(gone.size()) / 2 - 1);
  }
}

TEST_F(PrefixTreeTest, NeverEvictsAPageThatAnyoneElseHoldsNorOneAboveIt) {
  for (const Holder holder : {Holder::Sequence, Holder::Step, Holder::Lease}) {
    cache({1, 1, 2, 2, 3, 3});
    auto pages = tree_.match(Tokens{1, 1, 2, 2}, "", holder);
    EXPECT_EQ(tree_.num_evictable(), 1);
    EXPECT_EQ(tree_.evict(8), 1);
    EXPECT_EQ(probe({1, 1, 2, 2, 3, 3}), 2);
    let_go(std::move(pages));
    EXPECT_EQ(tree_.num_evictable(), 2);
    EXPECT_EQ(tree_.evict(8), 2);
    EXPECT_EQ(pool_.num_free(), 8);
  }
}

TEST_F(PrefixTreeTest, CountsAnUnpinnedPageAboveAPinnedOneAsNotEvictable) {
  // A pin does not imply pinned ancestors: the holder of the lower page may own another copy of the upper one.
  cache({1, 1, 2, 2});
  cache({1, 1, 9, 9});
  auto pages = tree_.match(Tokens{1, 1, 2, 2});
  pages.erase(pages.begin());
  EXPECT_EQ(pool_.state(tree_.match(Tokens{1, 1})[0].slot()), PageState::Held);
  EXPECT_EQ(tree_.num_evictable(), 1);
  EXPECT_EQ(tree_.evict(8), 1);
  EXPECT_EQ(probe({1, 1, 2, 2}), 2);
  EXPECT_EQ(tree_.num_evictable(), 0);
  let_go(std::move(pages));
  EXPECT_EQ(tree_.num_evictable(), 2);
}

TEST_F(PrefixTreeTest, LeavesNoEntryBehindOnAnyWayOut) {
  const Tokens tokens = {1, 1, 2, 2};
  cache(tokens);
  EXPECT_EQ(tree_.evict(2), 2);
  EXPECT_EQ(probe(tokens), 0);
  tree_.check();

  auto held = take(2);
  tree_.insert(tokens, held);
  tree_.clear();
  EXPECT_EQ(probe(tokens), 0);
  EXPECT_EQ(pool_.ledger(), (Ledger{.free = 6, .cached = 0, .held = 2, .leased = 0, .total = 8}));
  tree_.check();
  let_go(std::move(held));
  EXPECT_EQ(pool_.num_free(), 8);

  // The slots serve other tokens now, and the old ones can enter again.
  cache({5, 5, 6, 6});
  EXPECT_EQ(probe(tokens), 0);
  cache(tokens);
  EXPECT_EQ(probe(tokens), 2);
}

TEST_F(PrefixTreeTest, ProbesWithoutUsing) {
  cache({1, 1});
  cache({2, 2});
  EXPECT_EQ(probe({1, 1}), 1);
  EXPECT_EQ(tree_.evict(1), 1);
  EXPECT_EQ(probe({1, 1}), 0);
}

TEST_F(PrefixTreeTest, TellsAPlaceThatWasEvictedFromOneThatIsThere) {
  auto pages = take(2);
  const Tokens first = {1, 1};
  const std::uint64_t hash = hash_page(hash_salt(""), first);
  const TreeCursor at = tree_.insert({}, first, hash, "", pages[0]).at;
  EXPECT_TRUE(tree_.is_valid(at));
  const SlotId slot = pages[0].slot();
  pages[0].reset();
  tree_.evict(1);
  EXPECT_FALSE(tree_.is_valid(at));
  // The same slot, with the same tokens again, is another place.
  pages[0] = std::move(pool_.allocate().value());
  ASSERT_EQ(pages[0].slot(), slot);
  const TreeCursor again = tree_.insert({}, first, hash, "", pages[0]).at;
  EXPECT_FALSE(tree_.is_valid(at));
  EXPECT_TRUE(tree_.is_valid(again));
  tree_.clear();
  EXPECT_FALSE(tree_.is_valid(again));
  EXPECT_TRUE(tree_.is_valid(TreeCursor{}));
}

TEST_F(PrefixTreeTest, TakesTheOnlyPlaceOfItsPool) {
  EXPECT_THROW(PrefixTree(pool_, 2), InvalidArgument);
  PagePool other(1);
  EXPECT_THROW(PrefixTree(other, 0), InvalidArgument);
  {
    const PrefixTree first(other, 2);
  }
  const PrefixTree second(other, 2);
  EXPECT_EQ(second.num_pages(), 0);
}

TEST(PrefixTreeLife, DestroyedItLeavesHeldPagesToTheirHolders) {
  PagePool pool(2);
  std::optional<PageRef> page = pool.allocate();
  {
    PrefixTree tree(pool, 1);
    std::optional<PageRef> other = pool.allocate();
    const std::vector<TokenId> tokens = {1};
    tree.insert({}, tokens, hash_page(hash_salt(""), tokens), "", *page);
    const std::vector<TokenId> more = {2};
    tree.insert({}, more, hash_page(hash_salt(""), more), "", *other);
  }
  EXPECT_EQ(pool.ledger(), (Ledger{.free = 1, .cached = 0, .held = 1, .leased = 0, .total = 2}));
  page.reset();
  EXPECT_EQ(pool.num_free(), 2);
}

}  // namespace
}  // namespace tandem::kv
