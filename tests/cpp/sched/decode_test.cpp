#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "sched/configs.h"
#include "sched/harness.h"

namespace tandem::sched::testing {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

TEST(Decode, ReachesAsFarAsTargetExtendAndSingleStepsDo) {
  SchedulerConfig config = roomy();
  EXPECT_EQ(config.decode_reach(), 0);
  EXPECT_EQ(config.look_ahead(), 1);
  config.overlap = true;
  EXPECT_EQ(config.look_ahead(), 2);
  const std::vector<std::int32_t> reaches{1, 2, 4, 6, 8, 10, 12, 14};
  for (std::int32_t k = 0; k <= 7; ++k) {
    EXPECT_EQ(with_drafts(k).decode_reach(), reaches[static_cast<std::size_t>(k)]);
    EXPECT_EQ(with_drafts(k).look_ahead(), 1 + reaches[static_cast<std::size_t>(k)]);
    EXPECT_EQ(with_drafts(k, overlapped()).look_ahead(), 2 + reaches[static_cast<std::size_t>(k)] + k);
  }
}

class LookAheadTest : public ::testing::TestWithParam<std::tuple<int, bool>> {};

// The fake engine writes every index that a device may touch and reads all below, so pages one short would show.
TEST_P(LookAheadTest, EveryRoundAtEveryPageOffsetFindsItsPages) {
  const auto [draft_len, overlap] = GetParam();
  for (const std::int32_t page : {1, 2, 4, 8}) {
    for (std::int32_t prompt = 1; prompt <= 9; ++prompt) {
      for (const std::int32_t right : {0, draft_len / 2, draft_len}) {
        SchedulerConfig config = with_drafts(draft_len);
        config.tokens_per_page = page;
        config.overlap = overlap;
        Harness harness(config);
        harness.engine().set_num_right_drafts(right);
        harness.submit(make_prompt(prompt), 40);
        harness.run();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Drafts, LookAheadTest, ::testing::Combine(::testing::Range(0, 8), ::testing::Bool()));

TEST(Decode, PlansFromAnUpperBoundWhileAStepIsInFlightAndFromTheTruthOtherwise) {
  Harness harness(overlapped(with_drafts(3)));
  harness.engine().set_num_right_drafts(1);
  harness.submit(make_prompt(10), 40);
  ASSERT_TRUE(harness.plan());
  ASSERT_TRUE(harness.plan());  // behind the prompt's step: its length is known
  EXPECT_THAT(harness.last_plan().first_index, ElementsAre(10));
  harness.deliver();
  ASSERT_TRUE(harness.plan());  // behind a round of 1 + 3
  EXPECT_THAT(harness.last_plan().first_index, ElementsAre(14));
  EXPECT_THAT(harness.last_plan().write_from, ElementsAre(10));
  harness.deliver();  // one draft accepted: 12
  harness.deliver();  // and again: 14
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().first_index, ElementsAre(14));
  EXPECT_THAT(harness.last_plan().write_from, ElementsAre(14));
}

class LengthTest : public ::testing::TestWithParam<std::tuple<int, int, bool, int>> {};

TEST_P(LengthTest, EndsAtTheLimitAndFreesEachPageOnce) {
  const auto [max_tokens, page, overlap, draft_len] = GetParam();
  SchedulerConfig config = with_drafts(draft_len);
  config.tokens_per_page = page;
  config.overlap = overlap;
  config.num_slots = 512;
  Harness harness(config);
  const SeqId id = harness.submit(make_prompt(6), max_tokens);
  harness.run();
  EXPECT_EQ(harness.request(id).output.size(), static_cast<std::size_t>(max_tokens));
  EXPECT_EQ(harness.request(id).terminal->reason, FinishReason::Length);
  harness.reset_prefix_cache();
  EXPECT_EQ(harness.scheduler().ledger().free, config.num_slots);
}

INSTANTIATE_TEST_SUITE_P(Lengths, LengthTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5, 200), ::testing::Values(1, 4),
                                            ::testing::Bool(), ::testing::Values(0, 3)));

TEST(Decode, CutsARoundAtTheLimitAndCountsItsDraftsAsDrafted) {
  Harness harness(with_drafts(3));
  harness.engine().set_num_right_drafts(3);
  const SeqId id = harness.submit(make_prompt(6), 3);
  harness.step();
  ASSERT_TRUE(harness.plan());
  harness.deliver();  // four tokens come, two fit
  EXPECT_THAT(harness.last_events().num_tokens, ElementsAre(2));
  EXPECT_THAT(harness.last_events().num_accepted, ElementsAre(2));
  EXPECT_THAT(harness.last_events().num_drafts, ElementsAre(3));
  EXPECT_EQ(harness.request(id).terminal->reason, FinishReason::Length);
  const Stats stats = harness.scheduler().stats();
  EXPECT_THAT(stats.cold_rounds.num_drafted(), ElementsAre(1, 1, 1, 0, 0, 0, 0));
  EXPECT_THAT(stats.cold_rounds.num_accepted(), ElementsAre(1, 1, 0, 0, 0, 0, 0));
  EXPECT_EQ(stats.num_rounds(), 1);
  EXPECT_EQ(stats.num_drafted_tokens(), 3);
  EXPECT_EQ(stats.num_accepted_tokens(), 2);
}

TEST(Decode, AStopAtTheVeryLimitIsAStopAndOneBeyondItIsALength) {
  Harness harness(with_drafts(3));
  harness.engine().set_num_right_drafts(3);
  const SeqId at = harness.submit(make_prompt(6), 4, {.stop_after = 4});
  const SeqId beyond = harness.submit(make_prompt(6, 1), 4, {.stop_after = 5});
  harness.run();
  EXPECT_EQ(harness.request(at).terminal->reason, FinishReason::Stop);
  EXPECT_EQ(harness.request(beyond).terminal->reason, FinishReason::Length);
}

// With the tokens in flight the limit is reached for certain: another row would run for nothing.
TEST(Decode, PlansNoRowBehindACertainEnd) {
  Harness harness(overlapped());
  harness.submit(make_prompt(6), 2);
  ASSERT_TRUE(harness.plan());
  ASSERT_TRUE(harness.plan());
  harness.deliver();
  EXPECT_FALSE(harness.plan());
  harness.run();
  EXPECT_EQ(harness.scheduler().stats().num_dropped_rows, 0);
}

TEST(Decode, ARequestWithSpeculationOffHasNoDraftsAmongRowsThatHave) {
  Harness harness(with_drafts(3));
  const SeqId on = harness.submit(make_prompt(6), 20);
  const SeqId off = harness.submit(make_prompt(6, 1), 20, {.speculate = false});
  harness.step();
  ASSERT_TRUE(harness.plan());
  const PlanCopy plan = harness.last_plan();
  EXPECT_EQ(plan.num_drafts[plan.row_of(on).value()], 3);
  EXPECT_EQ(plan.num_drafts[plan.row_of(off).value()], 0);
  EXPECT_EQ(plan.query_len[plan.row_of(off).value()], 1);
  EXPECT_EQ(plan.proposes[plan.row_of(on).value()], 1);
  EXPECT_EQ(plan.proposes[plan.row_of(off).value()], 0);
  harness.run();
}

// Drafts exist only where the step before proposed some, so a placeholder is never verified.
TEST(Decode, StopsDraftingWhileManyRowsRunAndResumesOneStepAfterTheyAreFew) {
  SchedulerConfig config = with_drafts(2);
  config.max_speculating_rows = 2;
  Harness harness(config);
  harness.submit(make_prompt(5), 40);
  harness.submit(make_prompt(5, 1), 40);
  harness.step();
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().num_drafts, Each(2));
  EXPECT_THAT(harness.last_plan().proposes, Each(1));
  harness.deliver();
  const SeqId third = harness.submit(make_prompt(5, 2), 40);
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().proposes, Each(0));
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  EXPECT_EQ(harness.last_plan().num_rows(), 3);
  EXPECT_THAT(harness.last_plan().num_drafts, Each(0));
  harness.deliver();
  harness.abort(third);
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().num_drafts, Each(0));
  EXPECT_THAT(harness.last_plan().proposes, Each(1));
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().num_drafts, Each(2));
  harness.run();
}

TEST(Decode, ASynchronousRowWaitsForItsOwnResultWhileOthersRunAhead) {
  Harness harness(overlapped(with_drafts(3)));
  const SeqId free = harness.submit(make_prompt(6), 30);
  const SeqId synchronous = harness.submit(make_prompt(6, 1), 10, {.synchronous = true});
  ASSERT_TRUE(harness.plan());
  ASSERT_TRUE(harness.plan());
  EXPECT_TRUE(harness.last_plan().row_of(free).has_value());
  EXPECT_FALSE(harness.last_plan().row_of(synchronous).has_value());
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  const auto row = harness.last_plan().row_of(synchronous);
  ASSERT_TRUE(row.has_value());
  EXPECT_EQ(harness.last_plan().first_index[*row], 6);
  harness.run();
}

}  // namespace
}  // namespace tandem::sched::testing
