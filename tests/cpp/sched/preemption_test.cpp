#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "sched/configs.h"
#include "sched/harness.h"

namespace tandem::sched::testing {
namespace {

using ::testing::ElementsAre;

SchedulerConfig tight(std::int32_t num_slots) {
  SchedulerConfig config = roomy();
  config.num_slots = num_slots;
  config.watermark_pages = 0;
  return config;
}

std::int32_t preemptions(Harness& harness, SeqId id) { return harness.request(id).terminal->num_preemptions; }

TEST(Preemption, TakesTheLastInTheOrderAndNeverOneAheadOfTheRequester) {
  Harness harness(tight(13));
  const SeqId first = harness.submit(make_prompt(7), 14);
  const SeqId second = harness.submit(make_prompt(7, 1), 14);
  const SeqId urgent = harness.submit(make_prompt(7, 2), 14, {.priority = -1});
  harness.run();
  EXPECT_EQ(preemptions(harness, urgent), 0);
  EXPECT_EQ(preemptions(harness, first), 0);
  EXPECT_GE(preemptions(harness, second), 1);
}

TEST(Preemption, ARequesterThatIsTheLastWaitsAndKeepsItsPages) {
  Harness harness(tight(5));
  const SeqId first = harness.submit(make_prompt(10), 2);     // 3 pages, never a fourth
  const SeqId second = harness.submit(make_prompt(7, 1), 8);  // 2 pages, then more
  ASSERT_TRUE(harness.plan());
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  const PlanCopy plan = harness.last_plan();
  EXPECT_TRUE(plan.row_of(first).has_value());
  EXPECT_TRUE(plan.row_of(second).has_value());
  harness.deliver();
  harness.run();
  EXPECT_EQ(harness.scheduler().stats().num_preemptions, 0);
}

TEST(Preemption, KeepsItsPlaceInTheOrder) {
  Harness harness(tight(7));
  const SeqId first = harness.submit(make_prompt(7), 16);
  const SeqId second = harness.submit(make_prompt(7, 1), 16);
  while (harness.scheduler().stats().num_preemptions == 0) {
    ASSERT_TRUE(harness.step());
  }
  const SeqId later = harness.submit(make_prompt(3, 2), 2);
  while (!harness.request(first).terminal) {
    ASSERT_TRUE(harness.step());
    // The one that lost its pages is first in line, though the later one would fit.
    ASSERT_FALSE(harness.num_in_flight() > 0 && harness.last_plan().row_of(later).has_value() &&
                 !harness.last_plan().row_of(second).has_value());
  }
  harness.run();
  EXPECT_EQ(preemptions(harness, second), 1);
}

TEST(Preemption, ComesBackAsAHitOfItsFullPagesAndItsRoundsCountAsThoseOfHitsFromThen) {
  Harness harness(with_drafts(1, tight(8)));
  const SeqId first = harness.submit(make_prompt(9), 4);
  const SeqId second = harness.submit(make_prompt(9, 1), 14);
  const SeqId urgent = harness.submit(make_prompt(4, 2), 12, {.priority = -1});
  std::int32_t resumed_at = -1;
  while (harness.scheduler().num_unfinished() > 0) {
    ASSERT_TRUE(harness.step());
    const PlanCopy& plan = harness.last_plan();
    if (const auto row = plan.row_of(second); row && plan.epoch[*row] > 0 && plan.fresh[*row] != 0) {
      resumed_at = plan.write_from[*row];
      EXPECT_EQ(harness.scheduler().stats().prefix_hit_rounds, Rounds{});
    }
  }
  harness.check_idle();
  EXPECT_EQ(preemptions(harness, urgent) + preemptions(harness, first), 0);
  EXPECT_GE(preemptions(harness, second), 1);
  EXPECT_GE(resumed_at, 4);
  EXPECT_EQ(harness.request(second).terminal->num_cached_tokens, 0);  // of its prompt, when it first came
  EXPECT_GT(harness.scheduler().stats().prefix_hit_rounds.num_rounds(), 0);
  EXPECT_GT(harness.scheduler().stats().cold_rounds.num_rounds(), 0);
}

// The pages that steps in flight alone still hold come back with them: nobody is preempted for those.
TEST(Preemption, WaitsForPagesThatStepsInFlightWillGiveBack) {
  SchedulerConfig config = overlapped(tight(6));
  config.enable_prefix_cache = false;
  Harness harness(config);
  const SeqId first = harness.submit(make_prompt(6), 10);  // 2 pages, then up to 4
  const SeqId second = harness.submit(make_prompt(6, 1), 10);
  const SeqId third = harness.submit(make_prompt(6, 2), 10);
  ASSERT_TRUE(harness.plan());
  ASSERT_TRUE(harness.plan());
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  harness.deliver();
  EXPECT_EQ(harness.scheduler().ledger().free, 0);
  harness.abort(third);  // its two pages are pending behind the step in flight
  EXPECT_EQ(harness.scheduler().stats().num_pending_pages, 2);
  ASSERT_FALSE(harness.plan());  // both others need a page now
  EXPECT_EQ(harness.scheduler().stats().num_preemptions, 0);
  harness.deliver();
  ASSERT_TRUE(harness.plan());
  EXPECT_THAT(harness.last_plan().seq_id, ElementsAre(first.value(), second.value()));
  EXPECT_EQ(harness.scheduler().stats().num_preemptions, 0);
  harness.run();
}

class ResumeTest : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};

// At each step of a request's life: its whole history is known, its prefix is cached or gone, its last page partial or
// not.
TEST_P(ResumeTest, ARequestPreemptedAtAnyStepContinuesItsText) {
  const auto [draft_len, overlap, evicted] = GetParam();
  std::int64_t num_preemptions = 0;
  for (std::int32_t prompt = 8; prompt <= 11; ++prompt) {
    for (std::int32_t at = 1; at <= 10; ++at) {
      SchedulerConfig config = with_drafts(draft_len, tight(12));
      config.overlap = overlap;
      config.max_tokens_per_step = 8;
      config.max_model_len = 32;
      Harness harness(config);
      const SeqId victim = harness.submit(make_prompt(prompt), 12);
      for (std::int32_t i = 0; i < at; ++i) {
        harness.step();
      }
      // More urgent and growing to nearly the whole pool.
      harness.submit(make_prompt(12, 1), 20, {.priority = -1});
      harness.submit(make_prompt(5, 2), 12, {.priority = -1});
      for (std::int32_t i = 0; i < 200 && harness.scheduler().stats().num_preemptions == 0; ++i) {
        harness.step();
      }
      if (evicted) {
        harness.reset_prefix_cache();
      }
      harness.run();
      num_preemptions += preemptions(harness, victim);
    }
  }
  EXPECT_GT(num_preemptions, 5);
}

INSTANTIATE_TEST_SUITE_P(Drafts, ResumeTest,
                         ::testing::Combine(::testing::Values(0, 1, 3), ::testing::Bool(), ::testing::Bool()));

// Admission looks at the whole prompt, not at the next chunk: two that do not fit together do not evict each other.
TEST(Preemption, TwoLongPromptsThatDoNotFitTogetherBothFinish) {
  SchedulerConfig config = tight(12);
  config.enable_prefix_cache = false;
  config.max_tokens_per_step = 4;
  Harness harness(config);
  harness.submit(make_prompt(37), 3);
  harness.submit(make_prompt(37, 1), 3);
  harness.run();
  EXPECT_LE(harness.scheduler().stats().num_preemptions, 1);
}

// A preempted request goes to its place in the queue, not to the front of a list being walked.
TEST(Preemption, ManyRequestsInAPoolForTwoAllFinishInOneBoundedPlanEach) {
  SchedulerConfig config = tight(8);
  config.max_model_len = 16;
  config.max_seats = 30;
  Harness harness(config);
  for (std::int32_t i = 0; i < 30; ++i) {
    harness.submit(make_prompt(6, static_cast<std::uint64_t>(i)), 9);
  }
  std::int64_t before = 0;
  while (harness.scheduler().num_unfinished() > 0) {
    ASSERT_TRUE(harness.step());
    const std::int64_t now = harness.scheduler().stats().num_preemptions;
    ASSERT_LE(now - before, 30);
    before = now;
  }
  harness.check_idle();
}

// A victim that was never planned yet, or only in part, leaves nothing behind either.
TEST(Preemption, APromptInProgressCanBePreempted) {
  SchedulerConfig config = tight(10);
  config.max_tokens_per_step = 5;
  Harness harness(config);
  const SeqId running = harness.submit(make_prompt(3), 30);
  harness.step();
  const SeqId prompt = harness.submit(make_prompt(30, 1), 2);
  bool preempted_in_context = false;
  while (harness.scheduler().num_unfinished() > 0) {
    ASSERT_TRUE(harness.step());
    preempted_in_context |= harness.scheduler().stats().num_preemptions > 0 && harness.request(prompt).output.empty();
  }
  harness.check_idle();
  EXPECT_EQ(preemptions(harness, running), 0);
  EXPECT_EQ(preempted_in_context, preemptions(harness, prompt) > 0);
}

}  // namespace
}  // namespace tandem::sched::testing
