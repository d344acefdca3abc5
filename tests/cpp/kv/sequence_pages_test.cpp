#include "tandem/kv/sequence_pages.h"

#include <gtest/gtest.h>

#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include "tandem/base/check.h"

namespace tandem::kv {
namespace {

using Tokens = std::vector<TokenId>;

static_assert(!std::is_copy_constructible_v<SequencePages> && std::is_nothrow_move_constructible_v<SequencePages>);

Tokens numbered(std::int64_t n, TokenId first = 100) {
  Tokens tokens(static_cast<std::size_t>(n));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// Prefills `tokens` and offers its full pages.
void fill(SequencePages& sequence, const Tokens& tokens) {
  if (sequence.num_pages() == 0) {
    sequence.attach_prefix(tokens);
  }
  ASSERT_TRUE(sequence.grow(static_cast<std::int64_t>(tokens.size())));
  sequence.set_computed(static_cast<std::int64_t>(tokens.size()));
  sequence.commit(tokens);
}

std::vector<std::int32_t> slots(const SequencePages& sequence) {
  std::vector<std::int32_t> out;
  for (const PageRef& page : sequence.pages()) {
    out.push_back(page.slot().value());
  }
  return out;
}

// A pool of 8 pages of 4 tokens with its tree.
class SequencePagesTest : public testing::Test {
 protected:
  ~SequencePagesTest() override {
    pool_.check();
    tree_.check();
  }
  SequencePages sequence(const std::string& salt = "") { return SequencePages(pool_, &tree_, 4, salt); }

  PagePool pool_{8};
  PrefixTree tree_{pool_, 4};
};

TEST_F(SequencePagesTest, GrowsByWholePagesAndOnlyAsFarAsNeeded) {
  SequencePages pages = sequence();
  EXPECT_EQ(pages.pages_to_grow(0), 0);
  EXPECT_TRUE(pages.grow(0));
  EXPECT_TRUE(pages.grow(1));
  EXPECT_EQ(pages.capacity(), 4);
  EXPECT_TRUE(pages.grow(4));
  EXPECT_EQ(pages.num_pages(), 1);
  EXPECT_EQ(pages.pages_to_grow(9), 2);
  EXPECT_TRUE(pages.grow(9));
  EXPECT_EQ(pages.capacity(), 12);
  EXPECT_TRUE(pages.grow(2));
  EXPECT_EQ(pages.capacity(), 12);
}

TEST_F(SequencePagesTest, ARefusedGrowChangesNothing) {
  {
    SequencePages cached = sequence();
    fill(cached, numbered(8));
  }
  SequencePages other = sequence();
  ASSERT_TRUE(other.grow(12));
  SequencePages pages = sequence();
  ASSERT_TRUE(pages.grow(4));
  const Ledger before = pool_.ledger();
  const auto slots_before = slots(pages);
  // 2 free and 2 evictable: 4 more pages fit, 5 do not.
  EXPECT_FALSE(pages.grow(4 + 17));
  EXPECT_EQ(pool_.ledger(), before);
  EXPECT_EQ(slots(pages), slots_before);
  EXPECT_EQ(tree_.num_pages(), 2);
  EXPECT_EQ(sequence().probe_prefix(numbered(8)), 8);
  EXPECT_TRUE(pages.grow(4 + 16));
  EXPECT_EQ(pool_.num_free(), 0);
}

TEST_F(SequencePagesTest, EvictsNoMoreThanFreePagesDoNotCover) {
  {
    SequencePages cached = sequence();
    fill(cached, numbered(16));
  }
  SequencePages pages = sequence();
  EXPECT_TRUE(pages.grow(20));
  EXPECT_EQ(tree_.num_pages(), 3);
  EXPECT_EQ(pool_.num_free(), 0);
}

TEST_F(SequencePagesTest, NeverEvictsTheHitItHasPinned) {
  {
    SequencePages cached = sequence();
    fill(cached, numbered(16));
  }
  SequencePages pages = sequence();
  EXPECT_EQ(pages.attach_prefix(numbered(19)), 16);
  EXPECT_FALSE(pages.grow(36));
  EXPECT_TRUE(pages.grow(32));
  EXPECT_EQ(pages.committed(), 16);
  EXPECT_EQ(pages.computed(), 16);
}

TEST_F(SequencePagesTest, KeepsCommittedComputedAndCapacityInOrder) {
  SequencePages pages = sequence();
  const Tokens tokens = numbered(11);
  ASSERT_TRUE(pages.grow(11));
  EXPECT_THROW(pages.set_computed(13), InvalidArgument);
  pages.set_computed(7);
  EXPECT_EQ(pages.committed(), 0);
  EXPECT_THROW(pages.set_computed(6), InvalidArgument);
  EXPECT_THROW(pages.commit(numbered(6)), InvalidArgument);
  pages.commit(tokens);
  EXPECT_EQ(pages.committed(), 4);
  EXPECT_EQ(tree_.num_pages(), 1);
  pages.set_computed(11);
  pages.commit(tokens);
  EXPECT_EQ(pages.committed(), 8);
  EXPECT_EQ(pages.computed(), 11);
  EXPECT_EQ(pages.capacity(), 12);
}

TEST_F(SequencePagesTest, APageEntersTheTreeOnlyOnceItIsComputedInFull) {
  SequencePages pages = sequence();
  const Tokens tokens = numbered(12);
  ASSERT_TRUE(pages.grow(12));
  for (std::int64_t n = 1; n <= 12; ++n) {
    pages.set_computed(n);
    pages.commit(tokens);
    EXPECT_EQ(sequence().probe_prefix(tokens), n / 4 * 4);
  }
}

TEST_F(SequencePagesTest, AttachesAHitOfTheWholePrompt) {
  SequencePages first = sequence();
  fill(first, numbered(8));
  SequencePages second = sequence();
  EXPECT_EQ(second.attach_prefix(numbered(8)), 8);
  EXPECT_EQ(slots(second), slots(first));
  EXPECT_THROW((void)second.attach_prefix(numbered(8)), InvalidArgument);
}

TEST_F(SequencePagesTest, SequencesThatComputeTheSamePagesKeepTheirOwnAndTheFirstEnter) {
  SequencePages first = sequence();
  SequencePages second = sequence();
  const Tokens tokens = numbered(8);
  ASSERT_TRUE(first.grow(8));
  ASSERT_TRUE(second.grow(8));
  for (SequencePages* each : {&first, &second}) {
    each->set_computed(8);
    each->commit(tokens);
  }
  EXPECT_EQ(second.committed(), 8);
  EXPECT_EQ(tree_.num_pages(), 2);
  EXPECT_NE(slots(second), slots(first));
  SequencePages third = sequence();
  third.attach_prefix(tokens);
  EXPECT_EQ(slots(third), slots(first));
}

TEST_F(SequencePagesTest, EntersItsOwnPagesWhenAnotherSequencesCopiesAreGone) {
  // Both compute [0, 4); the first's page is in the tree.
  SequencePages first = sequence();
  SequencePages second = sequence();
  Tokens tokens = numbered(4);
  ASSERT_TRUE(first.grow(4));
  ASSERT_TRUE(second.grow(16));
  for (SequencePages* each : {&first, &second}) {
    each->set_computed(4);
    each->commit(tokens);
  }
  first.release();
  EXPECT_EQ(tree_.evict(8), 1);
  // Its place in the tree is gone, so both of its pages enter.
  tokens = numbered(9);
  second.set_computed(9);
  second.commit(tokens);
  EXPECT_EQ(tree_.num_pages(), 2);
  SequencePages third = sequence();
  EXPECT_EQ(third.attach_prefix(tokens), 8);
  EXPECT_EQ(slots(third), (std::vector{slots(second)[0], slots(second)[1]}));
}

TEST_F(SequencePagesTest, HoldsNoPageBelowOneThatNobodyHoldsAndEntersTheRestWhenItLetsGo) {
  // A page below an unheld copy would make that one unevictable: a sequence that may fill the pool alone could not.
  SequencePages first = sequence();
  SequencePages second = sequence();
  const Tokens tokens = numbered(32);
  ASSERT_TRUE(first.grow(4));
  ASSERT_TRUE(second.grow(12));
  first.set_computed(4);
  first.commit(tokens);
  second.set_computed(12);
  second.commit(tokens);
  first.release();
  EXPECT_EQ(tree_.num_pages(), 1);
  EXPECT_EQ(tree_.num_evictable(), 1);
  second.enter_all(tokens);
  EXPECT_EQ(tree_.num_pages(), 3);
  EXPECT_EQ(tree_.num_evictable(), 0);
  second.release();
  EXPECT_EQ(tree_.num_evictable(), 3);
  SequencePages third = sequence();
  EXPECT_EQ(third.attach_prefix(tokens), 12);
}

TEST_F(SequencePagesTest, GrowsToTheWholePoolWithADuplicateOfACachedPage) {
  SequencePages first = sequence();
  SequencePages second = sequence();
  const Tokens tokens = numbered(32);
  ASSERT_TRUE(first.grow(4));
  ASSERT_TRUE(second.grow(12));
  for (SequencePages* each : {&first, &second}) {
    each->set_computed(each->capacity());
    each->commit(tokens);
  }
  first.release();
  EXPECT_TRUE(second.grow(32));
}

TEST_F(SequencePagesTest, PutsNothingComputedBeforeAClearBackIntoTheTree) {
  SequencePages pages = sequence();
  fill(pages, numbered(5));
  tree_.clear();
  fill(pages, numbered(12));
  EXPECT_EQ(pages.committed(), 12);
  EXPECT_EQ(tree_.num_pages(), 0);
  // Started again after the clear, it computes anew and enters.
  pages.release();
  fill(pages, numbered(12));
  EXPECT_EQ(tree_.num_pages(), 3);
}

TEST_F(SequencePagesTest, HitsItsOwnPagesWhenItComesBackAfterPreemption) {
  SequencePages pages = sequence();
  const Tokens tokens = numbered(11);
  fill(pages, tokens);
  const auto before = slots(pages);
  pages.release();
  EXPECT_EQ(pages.capacity(), 0);
  EXPECT_EQ(pages.attach_prefix(tokens), 8);
  EXPECT_EQ(slots(pages), (std::vector{before[0], before[1]}));
}

TEST_F(SequencePagesTest, HandsItsPagesToTheStepThatStillUsesThem) {
  SequencePages pages = sequence();
  fill(pages, numbered(11));
  std::vector<PageRef> in_flight;
  pages.release_to_step(in_flight);
  EXPECT_EQ(pages.num_pages(), 0);
  EXPECT_EQ(pages.computed(), 0);
  EXPECT_EQ(pool_.num_pending(), 3);
  EXPECT_EQ(tree_.num_evictable(), 0);
  EXPECT_EQ(pool_.ledger().held, 3);
  in_flight.clear();
  EXPECT_EQ(pool_.num_pending(), 0);
  EXPECT_EQ(tree_.num_evictable(), 2);
  EXPECT_EQ(pool_.ledger(), (Ledger{.free = 6, .cached = 2, .held = 0, .leased = 0, .total = 8}));
}

TEST_F(SequencePagesTest, MovedFromIsEmpty) {
  SequencePages from = sequence();
  fill(from, numbered(5));
  const SequencePages to = std::move(from);
  EXPECT_EQ(from.num_pages(), 0);  // NOLINT(bugprone-use-after-move): the state after a move is the subject
  EXPECT_EQ(from.computed(), 0);
  EXPECT_EQ(from.committed(), 0);
  EXPECT_EQ(to.computed(), 5);
  EXPECT_EQ(to.num_pages(), 2);
}

TEST_F(SequencePagesTest, WithoutATreeCachesNothing) {
  SequencePages pages(pool_, nullptr, 4);
  EXPECT_EQ(pages.attach_prefix(numbered(8)), 0);
  fill(pages, numbered(8));
  EXPECT_EQ(pages.committed(), 8);
  EXPECT_EQ(tree_.num_pages(), 0);
  EXPECT_FALSE(pages.grow(33));
  EXPECT_TRUE(pages.grow(32));
  pages.release();
  EXPECT_EQ(pool_.num_free(), 8);
}

TEST_F(SequencePagesTest, RefusesAnotherPageSizeThanItsTree) {
  EXPECT_THROW(SequencePages(pool_, &tree_, 8), InvalidArgument);
  EXPECT_THROW(SequencePages(pool_, nullptr, 0), InvalidArgument);
}

TEST_F(SequencePagesTest, AddsUpWhenPromptsThatDivergeInsideAPageHaveFinished) {
  // What used to go wrong elsewhere: pages shared up to the branch were counted once for each branch.
  {
    SequencePages first = sequence();
    fill(first, {1, 2, 3, 4, 5, 6, 7, 8});
    SequencePages second = sequence();
    EXPECT_EQ(second.attach_prefix(Tokens{1, 2, 3, 4, 5, 6, 9, 9}), 4);
    fill(second, {1, 2, 3, 4, 5, 6, 9, 9});
  }
  EXPECT_EQ(pool_.ledger(), (Ledger{.free = 5, .cached = 3, .held = 0, .leased = 0, .total = 8}));
  EXPECT_EQ(tree_.num_evictable(), 3);
  tree_.clear();
  EXPECT_EQ(pool_.num_free(), 8);
}

TEST_F(SequencePagesTest, LosesNoPageWhenRetractedWithAPartialLastPage) {
  // What used to go wrong elsewhere: a prefix padded up to a page rather than cut down to one.
  for (std::int64_t extra = 0; extra < 4; ++extra) {
    const Tokens tokens = numbered(8 + extra, static_cast<TokenId>(1000 * (extra + 1)));
    SequencePages pages = sequence();
    fill(pages, tokens);
    pages.release();
    EXPECT_EQ(pool_.ledger(), (Ledger{.free = 6, .cached = 2, .held = 0, .leased = 0, .total = 8}));
    EXPECT_EQ(pages.attach_prefix(tokens), 8);
    pages.release();
    tree_.clear();
    EXPECT_EQ(pool_.num_free(), 8);
  }
}

TEST(SequencePagesEnds, FreeTheLookAheadPageOnceWhateverTheLength) {
  // What used to go wrong elsewhere: one path inferred the committed length while another freed the page ahead.
  for (const std::int32_t page : {1, 4}) {
    for (const std::int64_t length : {1, 2, 3, 4, 5, 200}) {
      PagePool pool(256);
      PrefixTree tree(pool, page);
      {
        SequencePages pages(pool, &tree, page);
        Tokens tokens = numbered(3);
        pages.attach_prefix(tokens);
        for (std::int64_t n = 3; n < 3 + length; ++n) {
          ASSERT_TRUE(pages.grow(n + 4));  // room for drafts that are never accepted
          pages.set_computed(n);
          pages.commit(tokens);
          tokens.push_back(static_cast<TokenId>(n));
        }
        std::vector<PageRef> in_flight;
        pages.release_to_step(in_flight);
        pool.check();
      }
      const std::int64_t cached = (2 + length) / page;
      EXPECT_EQ(pool.ledger(), (Ledger{.free = 256 - cached, .cached = cached, .held = 0, .leased = 0, .total = 256}));
      tree.check();
      tree.clear();
      EXPECT_EQ(pool.num_free(), 256);
    }
  }
}

}  // namespace
}  // namespace tandem::kv
