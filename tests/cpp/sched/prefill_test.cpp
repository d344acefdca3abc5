#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "sched/configs.h"
#include "sched/harness.h"

namespace tandem::sched::testing {
namespace {

using ::testing::ElementsAre;

TEST(Prefill, EachChunkCarriesItsTokensAndTheNextOneAndTheLastLeavesItToTheDevice) {
  SchedulerConfig config = with_drafts(2);
  config.max_tokens_per_step = 5;
  Harness harness(config);
  const std::vector<TokenId> p = make_prompt(12);
  harness.submit(p, 4);
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().token_ids, ElementsAre(p[0], p[1], p[2], p[3], p[4], p[5]));
  EXPECT_THAT(harness.last_plan().samples, ElementsAre(0));
  EXPECT_THAT(harness.last_plan().fresh, ElementsAre(1));
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().token_ids, ElementsAre(p[5], p[6], p[7], p[8], p[9], p[10]));
  EXPECT_THAT(harness.last_plan().fresh, ElementsAre(0));
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().token_ids, ElementsAre(p[10], p[11], -1));
  EXPECT_THAT(harness.last_plan().samples, ElementsAre(1));
  EXPECT_THAT(harness.last_plan().first_index, ElementsAre(10));
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().kind, ElementsAre(static_cast<std::int32_t>(RowKind::Decode)));
  EXPECT_THAT(harness.last_plan().first_index, ElementsAre(12));
  EXPECT_THAT(harness.last_plan().token_offsets, ElementsAre(0, 0));
  EXPECT_THAT(harness.last_plan().max_length, ElementsAre(16));
}

// A middle chunk treated as the last one stays unseen with two chunks: three and more show it.
class ChunkCountTest : public ::testing::TestWithParam<std::tuple<int, int, bool>> {};

TEST_P(ChunkCountTest, AnyNumberOfChunksGivesTheTextAndLeavesNothing) {
  const auto [num_chunks, draft_len, overlap] = GetParam();
  for (const std::int32_t short_by : {0, 1, 2, 7}) {
    SchedulerConfig config = with_drafts(draft_len);
    config.overlap = overlap;
    config.max_tokens_per_step = 8;
    Harness harness(config);
    harness.submit(make_prompt(8 * num_chunks - short_by), 9);
    harness.run();
    EXPECT_EQ(harness.scheduler().stats().num_context_rows, num_chunks);
  }
}

INSTANTIATE_TEST_SUITE_P(Chunks, ChunkCountTest,
                         ::testing::Combine(::testing::Range(1, 6), ::testing::Values(0, 1, 3, 7), ::testing::Bool()));

// The drafter's entry behind a chunk is written with it, so its page must be there, even when it opens one.
TEST(Prefill, AChunkThatEndsWithAPageHasThePageBehindIt) {
  SchedulerConfig config = with_drafts(1);
  config.max_tokens_per_step = 8;
  Harness harness(config);
  harness.submit(make_prompt(17), 1);
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().query_len, ElementsAre(8));
  EXPECT_GE(harness.last_plan().table_changes.size() / 3, 3u);
}

struct SplitSweep {
  std::int32_t draft_len;
  bool has_drafter;
  bool overlap;
};

class HitTest : public ::testing::TestWithParam<SplitSweep> {};

// Every hit length, chunk size and page size of one 24-token prompt.
TEST_P(HitTest, AHitOfAnyLengthStartsOneTokenBeforeItAndWritesOnlyBehindIt) {
  constexpr std::int32_t kPrompt = 24;
  for (const std::int32_t page : {1, 2, 4, 8}) {
    for (std::int32_t primed = 1; primed <= kPrompt; ++primed) {
      for (const std::int32_t chunk : {1, 3, 8, 64}) {
        SchedulerConfig config = roomy();
        config.tokens_per_page = page;
        config.draft_len = GetParam().draft_len;
        config.has_drafter = GetParam().has_drafter;
        config.overlap = GetParam().overlap;
        config.max_tokens_per_step = std::max(chunk, 1 + config.draft_len);
        Harness harness(config);
        std::vector<TokenId> prompt = make_prompt(kPrompt);
        harness.submit({prompt.begin(), prompt.begin() + primed}, 1);
        harness.run();
        const SeqId id = harness.submit(prompt, 6);
        ASSERT_TRUE(harness.plan());
        const std::int32_t hit = primed / page * page;
        const PlanCopy plan = harness.last_plan();
        ASSERT_THAT(plan.first_index, ElementsAre(std::max(hit - 1, 0)));
        ASSERT_THAT(plan.write_from, ElementsAre(hit));
        ASSERT_EQ(harness.scheduler().num_cached(id), hit);
        if (hit == kPrompt) {
          ASSERT_THAT(plan.query_len, ElementsAre(1));
          ASSERT_THAT(plan.token_ids, ElementsAre(prompt.back(), -1));
        }
        harness.run();
        ASSERT_EQ(harness.request(id).terminal->num_cached_tokens, hit);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Drafters, HitTest,
                         ::testing::Values(SplitSweep{0, false, false}, SplitSweep{0, true, true},
                                           SplitSweep{1, true, true}, SplitSweep{3, true, false},
                                           SplitSweep{7, true, true}));

// Pages that are not filled yet must not be found by a request of the same step.
TEST(Prefill, RequestsOfOneStepWithOnePrefixShareNothingUntilItIsWritten) {
  SchedulerConfig config = with_drafts(3);
  Harness harness(config);
  std::vector<SeqId> ids;
  for (std::int32_t i = 0; i < 8; ++i) {
    std::vector<TokenId> prompt = make_prompt(16);
    prompt.push_back(i);
    ids.push_back(harness.submit(prompt, 5));
  }
  ASSERT_TRUE(harness.plan());
  EXPECT_EQ(harness.last_plan().num_rows(), 8);
  EXPECT_THAT(harness.last_plan().first_index, ::testing::Each(0));
  EXPECT_THAT(harness.last_plan().write_from, ::testing::Each(0));
  harness.deliver();
  const SeqId late = harness.submit(make_prompt(16), 2);
  ASSERT_TRUE(harness.plan() || harness.num_in_flight() > 0);
  harness.run();
  EXPECT_EQ(harness.request(late).terminal->num_cached_tokens, 16);
  for (const SeqId id : ids) {
    EXPECT_EQ(harness.request(id).terminal->num_cached_tokens, 0);
  }
}

TEST(Prefill, AChunkIsSharedOnceItsStepHasCompletedAndNotBefore) {
  SchedulerConfig config = overlapped();
  config.max_tokens_per_step = 20;
  Harness harness(config);
  harness.submit(make_prompt(30), 1);
  const SeqId early = harness.submit(make_prompt(31), 1);
  ASSERT_TRUE(harness.plan());  // [0, 20) of the first
  ASSERT_TRUE(harness.plan());  // [20, 30) of the first; the second begins
  EXPECT_TRUE(harness.last_plan().row_of(early).has_value());
  EXPECT_EQ(harness.scheduler().num_cached(early), 0);
  harness.deliver();
  const SeqId late = harness.submit(make_prompt(31), 1, {.priority = -1});
  EXPECT_TRUE(harness.abort(early));
  ASSERT_TRUE(harness.plan());
  EXPECT_EQ(harness.scheduler().num_cached(late), 20);
  harness.run();
}

// Counted at admission and found at execution must be one number, or a step exceeds its budget.
TEST(Prefill, AHitCountedAtAdmissionCannotBeEvictedBeforeItsRowsRun) {
  SchedulerConfig config = roomy();
  config.num_slots = 8;
  config.max_tokens_per_step = 4;
  config.watermark_pages = 0;
  Harness harness(config);
  harness.submit(make_prompt(8), 1);
  harness.run();
  const SeqId hit = harness.submit(make_prompt(14), 3);
  ASSERT_TRUE(harness.plan());
  EXPECT_EQ(harness.scheduler().num_cached(hit), 8);
  harness.submit(make_prompt(12, 9), 4);  // wants every page that can be had
  harness.run();
  EXPECT_EQ(harness.request(hit).output.size(), 3u);
}

TEST(Prefill, PromptsUnderOtherSaltsAreNotFound) {
  Harness harness(roomy());
  harness.submit(make_prompt(16), 1, {.salt = "x"});
  harness.run();
  const SeqId same = harness.submit(make_prompt(16), 1, {.salt = "x"});
  const SeqId other = harness.submit(make_prompt(16), 1, {.salt = "y"});
  harness.run();
  EXPECT_EQ(harness.request(same).terminal->num_cached_tokens, 16);
  EXPECT_EQ(harness.request(other).terminal->num_cached_tokens, 0);
}

TEST(Prefill, WithoutAPrefixCacheNothingIsFoundAndNothingIsKept) {
  SchedulerConfig config = roomy();
  config.enable_prefix_cache = false;
  Harness harness(config);
  harness.submit(make_prompt(16), 1);
  harness.run();
  EXPECT_EQ(harness.scheduler().ledger().free, config.num_slots);
  const SeqId again = harness.submit(make_prompt(16), 1);
  harness.run();
  EXPECT_EQ(harness.request(again).terminal->num_cached_tokens, 0);
}

}  // namespace
}  // namespace tandem::sched::testing
