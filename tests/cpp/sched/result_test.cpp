#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "sched/configs.h"
#include "sched/harness.h"
#include "tandem/base/check.h"

namespace tandem::sched::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Ints = std::vector<std::int32_t>;

std::string refusal(Scheduler& scheduler, StepId step, const Ints& num_tokens, const Ints& num_accepted,
                    const Ints& tokens, const Ints& finish) {
  try {
    scheduler.complete({step, num_tokens, num_accepted, tokens, finish});
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "not refused";
}

// Two sequences at their first round of 1 + 2, step 1 in flight.
class ResultTest : public ::testing::Test {
 protected:
  ResultTest() {
    for (std::uint64_t i = 0; i < 2; ++i) {
      scheduler_.submit({.prompt = make_prompt(6, i), .max_tokens = 20});
    }
    scheduler_.plan();
    scheduler_.complete({StepId{0}, Ints{1, 1}, Ints{0, 0}, Ints{5, 6}, Ints{0, 0}});
    scheduler_.plan();
  }
  ~ResultTest() override { scheduler_.check(); }

  Scheduler scheduler_{with_drafts(2)};
};

TEST_F(ResultTest, IsRefusedOutOfOrder) {
  EXPECT_THAT(refusal(scheduler_, StepId{0}, {1, 1}, {0, 0}, {1, 2}, {0, 0}),
              AllOf(HasSubstr("step 0"), HasSubstr("step 1 is next")));
  EXPECT_THAT(refusal(scheduler_, StepId{2}, {1, 1}, {0, 0}, {1, 2}, {0, 0}), HasSubstr("step 1 is next"));
  EXPECT_THROW(scheduler_.fail(StepId{0}), InvalidArgument);
}

TEST_F(ResultTest, IsRefusedWhenNothingIsInFlight) {
  scheduler_.complete({StepId{1}, Ints{1, 1}, Ints{0, 0}, Ints{1, 2}, Ints{0, 0}});
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {1, 1}, {0, 0}, {1, 2}, {0, 0}), HasSubstr("no step is"));
  EXPECT_THROW(scheduler_.fail(StepId{1}), InvalidArgument);
}

TEST_F(ResultTest, IsRefusedWithAnotherNumberOfRows) {
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {1}, {0}, {1}, {0}),
              AllOf(HasSubstr("2 sampling rows"), HasSubstr("got 1")));
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {1, 1}, {0, 0}, {1, 2}, {0, 0, 0}), HasSubstr("3 finish"));
}

TEST_F(ResultTest, IsRefusedWithCountsThatTheStepCannotHaveProduced) {
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {1, 4}, {0, 3}, {1, 2, 3, 4, 5}, {0, 0}),
              AllOf(HasSubstr("row 1"), HasSubstr("num_tokens is 4"), HasSubstr("0 to 3")));
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {2, 1}, {0, 0}, {1, 2, 3}, {0, 0}),
              AllOf(HasSubstr("row 0"), HasSubstr("num_tokens is 2 and num_accepted 0")));
  // As many tokens as accepted drafts only where a draft ends the request.
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {2, 1}, {2, 0}, {1, 2, 3}, {0, 0}), HasSubstr("num_accepted 2"));
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {0, 1}, {0, 0}, {1}, {0, 0}), HasSubstr("num_tokens is 0"));
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {1, 1}, {0, 0}, {1, 2, 3}, {0, 0}),
              AllOf(HasSubstr("2"), HasSubstr("3 tokens")));
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {1, 1}, {0, 0}, {1}, {0, 0}), HasSubstr("got 1 tokens"));
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {1, 1}, {0, 0}, {1, -1}, {0, 0}), HasSubstr("token 0 is -1"));
  EXPECT_THAT(refusal(scheduler_, StepId{1}, {1, 1}, {0, 0}, {1, 2}, {0, 9}), HasSubstr("finish is 9"));
}

TEST_F(ResultTest, ARefusedOneChangesNothingAndTheRightOneIsTakenAfterIt) {
  refusal(scheduler_, StepId{1}, {3, 4}, {2, 3}, {1, 2, 3, 4, 5, 6, 7}, {1, 0});
  EXPECT_EQ(scheduler_.known_tokens(SeqId{0}).size(), 7u);
  EXPECT_EQ(scheduler_.num_steps_in_flight(), 1);
  const StepEvents& events = scheduler_.complete({StepId{1}, Ints{3, 1}, Ints{2, 0}, Ints{1, 2, 3, 4}, Ints{0, 0}});
  EXPECT_THAT(events.num_tokens, ElementsAre(3, 1));
  EXPECT_EQ(scheduler_.known_tokens(SeqId{0}).size(), 10u);
}

TEST_F(ResultTest, AnEndInsideARoundKeepsTheDraftsUpToIt) {
  const StepEvents& events = scheduler_.complete({StepId{1}, Ints{1, 2}, Ints{1, 2}, Ints{7, 8, 9}, Ints{1, 1}});
  EXPECT_THAT(events.num_tokens, ElementsAre(1, 2));
  EXPECT_THAT(events.num_accepted, ElementsAre(1, 2));
  EXPECT_THAT(events.num_drafts, ElementsAre(2, 2));
  ASSERT_EQ(events.terminals.size(), 2u);
  EXPECT_EQ(events.terminals[1].num_generated_tokens, 3);
  EXPECT_EQ(scheduler_.stats().num_accepted_tokens(), 3);
  EXPECT_EQ(scheduler_.num_unfinished(), 0);
}

TEST_F(ResultTest, ARowThatTheEngineGivesUpEndsAloneAndWithoutATokenIfNeedBe) {
  const StepEvents& events = scheduler_.complete({StepId{1}, Ints{0, 1}, Ints{0, 0}, Ints{9}, Ints{4, 0}});
  EXPECT_THAT(events.finish, ElementsAre(4, 0));
  ASSERT_EQ(events.terminals.size(), 1u);
  EXPECT_EQ(events.terminals[0].seq_id, SeqId{0});
  EXPECT_EQ(events.terminals[0].reason, FinishReason::Error);
  EXPECT_EQ(scheduler_.num_unfinished(), 1);
  // Its drafts were verified against nothing, so only the other row's count.
  EXPECT_EQ(events.terminals[0].num_rounds, 0);
  EXPECT_EQ(scheduler_.stats().num_rounds(), 1);
  EXPECT_EQ(scheduler_.stats().num_drafted_tokens(), 2);
}

TEST_F(ResultTest, PlanIsRefusedBeyondTheStepsThatMayBeInFlight) {
  EXPECT_THROW(scheduler_.plan(), InvalidArgument);
  EXPECT_EQ(scheduler_.num_steps_in_flight(), 1);
}

TEST(Epochs, AResultAfterAnAbortIsIgnoredWhole) {
  Harness harness(overlapped(with_drafts(3)));
  harness.engine().set_num_right_drafts(3);
  const SeqId aborted = harness.submit(make_prompt(9), 40);
  const SeqId other = harness.submit(make_prompt(9, 1), 40);
  for (std::int32_t i = 0; i < 6; ++i) {
    harness.step();
  }
  const std::int64_t generated = harness.scheduler().stats().num_generated_tokens;
  const std::int64_t accepted = harness.scheduler().stats().num_accepted_tokens();
  const std::int64_t cached = harness.scheduler().ledger().cached;
  ASSERT_TRUE(harness.num_in_flight() > 0);
  ASSERT_TRUE(harness.abort(aborted));
  EXPECT_FALSE(harness.abort(aborted));
  harness.deliver();
  EXPECT_THAT(harness.last_events().valid, ElementsAre(0, 1));
  EXPECT_THAT(harness.last_events().terminals, IsEmpty());
  EXPECT_EQ(harness.scheduler().stats().num_generated_tokens, generated + 4);
  EXPECT_EQ(harness.scheduler().stats().num_accepted_tokens(), accepted + 3);
  EXPECT_EQ(harness.scheduler().stats().num_rounds() * 3, harness.scheduler().stats().num_drafted_tokens());
  EXPECT_GE(harness.scheduler().ledger().cached, cached);
  harness.run();
  EXPECT_EQ(harness.request(other).output.size(), 40u);
}

TEST(Epochs, TheRowPlannedBehindAnEndIsIgnoredAndHoldsSeatAndPagesUntilItCompletes) {
  SchedulerConfig config = overlapped(with_drafts(2));
  config.max_seats = 1;
  config.enable_prefix_cache = false;
  Harness harness(config);
  harness.submit(make_prompt(6), 40, {.stop_after = 1});
  const SeqId next = harness.submit(make_prompt(6, 1), 3);
  ASSERT_TRUE(harness.plan());
  ASSERT_TRUE(harness.plan());
  harness.deliver();
  EXPECT_EQ(harness.scheduler().stats().num_running, 0);
  EXPECT_GT(harness.scheduler().ledger().held, 0);
  EXPECT_EQ(harness.scheduler().stats().num_pending_pages, harness.scheduler().ledger().held);
  EXPECT_FALSE(harness.plan());  // the only seat is still named by a step
  harness.deliver();
  EXPECT_THAT(harness.last_events().valid, ElementsAre(0));
  EXPECT_EQ(harness.scheduler().ledger().held, 0);
  ASSERT_TRUE(harness.plan());
  EXPECT_TRUE(harness.last_plan().row_of(next).has_value());
  harness.run();
}

TEST(Epochs, APreemptedRequestTakesNoTokenFromItsFormerLife) {
  SchedulerConfig config = overlapped(with_drafts(1));
  config.num_slots = 6;
  config.watermark_pages = 0;
  Harness harness(config);
  const SeqId first = harness.submit(make_prompt(7), 16);
  const SeqId second = harness.submit(make_prompt(5, 1), 7);  // never needs a page more
  while (harness.scheduler().stats().num_preemptions == 0) {
    if (harness.can_plan()) {
      harness.plan();
    } else {
      harness.deliver();
    }
  }
  const std::size_t emitted = harness.request(second).output.size();
  while (harness.num_in_flight() > 0) {
    harness.deliver();
  }
  EXPECT_EQ(harness.request(second).output.size(), emitted);
  EXPECT_GE(harness.scheduler().stats().num_dropped_rows, 1);
  harness.run();
  EXPECT_EQ(harness.request(first).terminal->num_preemptions, 0);
}

TEST(Failures, AStepThatRaisedEndsItsRowsWithErrorAndTheLoopGoesOn) {
  for (const bool overlap : {false, true}) {
    SchedulerConfig config = with_drafts(2);
    config.overlap = overlap;
    config.max_tokens_per_step = 8;
    Harness harness(config);
    const SeqId decoding = harness.submit(make_prompt(4), 30);
    harness.step();
    const SeqId in_prompt = harness.submit(make_prompt(30, 1), 5);
    while (!(harness.num_in_flight() > 0 && harness.last_plan().row_of(in_prompt) &&
             harness.last_plan().row_of(decoding))) {
      if (harness.can_plan()) {
        ASSERT_TRUE(harness.plan());
      } else {
        harness.deliver();
      }
    }
    const SeqId waiting = harness.submit(make_prompt(5, 2), 5);
    while (harness.num_in_flight() > 1) {
      harness.deliver();
    }
    harness.fail();
    EXPECT_EQ(harness.request(decoding).terminal->reason, FinishReason::Error);
    EXPECT_EQ(harness.request(in_prompt).terminal->reason, FinishReason::Error);
    EXPECT_EQ(harness.scheduler().ledger().held, 0);
    harness.run();
    EXPECT_EQ(harness.request(waiting).output.size(), 5u);
    EXPECT_EQ(harness.scheduler().stats().num_failed_steps, 1);
  }
}

TEST(Failures, AFailedStepEndsNothingTwiceWhenItsRowsRunInTheNextStepToo) {
  Harness harness(overlapped(with_drafts(2)));
  const SeqId id = harness.submit(make_prompt(6), 30);
  ASSERT_TRUE(harness.plan());
  ASSERT_TRUE(harness.plan());
  harness.fail();
  EXPECT_EQ(harness.request(id).terminal->reason, FinishReason::Error);
  harness.fail();
  EXPECT_THAT(harness.last_events().terminals, IsEmpty());
  harness.check_idle();
}

TEST(Failures, NothingOfAFailedStepIsCached) {
  Harness harness(roomy());
  harness.submit(make_prompt(16), 5);
  ASSERT_TRUE(harness.plan());
  harness.fail();
  EXPECT_EQ(harness.scheduler().ledger().free, 256);
}

}  // namespace
}  // namespace tandem::sched::testing
