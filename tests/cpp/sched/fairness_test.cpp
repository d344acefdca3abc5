#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "sched/configs.h"
#include "sched/harness.h"

namespace tandem::sched::testing {
namespace {

using ::testing::ElementsAre;

TEST(Order, IsPriorityThenArrival) {
  SchedulerConfig config = roomy();
  config.max_seats = 1;
  Harness harness(config);
  const SeqId later = harness.submit(make_prompt(4), 1, {.priority = 5});
  const SeqId first = harness.submit(make_prompt(4, 1), 1);
  const SeqId second = harness.submit(make_prompt(4, 2), 1);
  const SeqId urgent = harness.submit(make_prompt(4, 3), 1, {.priority = -2});
  std::vector<std::int64_t> order;
  while (harness.plan()) {
    order.push_back(harness.last_plan().seq_id.at(0));
    harness.deliver();
  }
  EXPECT_THAT(order, ElementsAre(urgent.value(), first.value(), second.value(), later.value()));
}

TEST(Order, ASmallRequestDoesNotOvertakeTheFirstOneThatDoesNotFit) {
  SchedulerConfig config = roomy();
  config.num_slots = 10;
  config.watermark_pages = 0;
  Harness harness(config);
  harness.submit(make_prompt(20), 8);
  harness.step();
  const SeqId large = harness.submit(make_prompt(30, 1), 4);
  const SeqId small = harness.submit(make_prompt(2, 2), 2);
  while (harness.scheduler().num_unfinished() > 0) {
    ASSERT_TRUE(harness.plan());
    const PlanCopy& plan = harness.last_plan();
    ASSERT_TRUE(!plan.row_of(small).has_value() || plan.row_of(large).has_value() ||
                harness.request(large).output.size() > 0);
    harness.deliver();
  }
}

TEST(Order, TheWatermarkKeepsPagesFreeForWhatRuns) {
  SchedulerConfig config = roomy();
  config.num_slots = 10;
  config.watermark_pages = 3;
  Harness harness(config);
  harness.submit(make_prompt(15), 8);  // 4 pages
  harness.step();
  const SeqId next = harness.submit(make_prompt(15, 1), 8);  // 4 more would leave 2
  ASSERT_TRUE(harness.plan());
  EXPECT_FALSE(harness.last_plan().row_of(next).has_value());
  harness.deliver();
  harness.run();
}

TEST(Budget, DecodeRowsTakeTurnsWhenItCannotHoldAll) {
  for (const std::int32_t draft_len : {0, 3}) {
    SchedulerConfig config = with_drafts(draft_len);
    config.max_tokens_per_step = 3 * (1 + draft_len);
    config.max_seats = 7;
    Harness harness(config);
    std::vector<SeqId> ids;
    for (std::uint64_t i = 0; i < 7; ++i) {
      ids.push_back(harness.submit(make_prompt(1, i), 200));
    }
    std::map<std::int64_t, std::int32_t> last_served;
    for (std::int32_t step = 0; step < 90; ++step) {
      ASSERT_TRUE(harness.plan());
      ASSERT_LE(harness.last_plan().num_rows(), 7);
      for (const std::int64_t id : harness.last_plan().seq_id) {
        if (step > 45) {  // all seven prompts have run by then
          ASSERT_LE(step - last_served[id], 3);
        }
        last_served[id] = step;
      }
      harness.deliver();
    }
    EXPECT_EQ(last_served.size(), 7u);
    for (const auto& [id, step] : last_served) {
      EXPECT_GE(step, 87);
    }
  }
}

// A request that misses every other turn keeps its drafts on the device; no placeholder is ever verified.
TEST(Budget, ASkippedRowVerifiesTheDraftsItHad) {
  SchedulerConfig config = overlapped(with_drafts(3));
  config.max_tokens_per_step = 5;
  Harness harness(config);
  harness.engine().set_num_right_drafts(2);
  harness.submit(make_prompt(3), 30);
  harness.submit(make_prompt(3, 1), 30);
  harness.run();
  EXPECT_EQ(harness.scheduler().stats().num_drafted_tokens(), 3 * harness.scheduler().stats().num_rounds());
  EXPECT_GT(harness.scheduler().stats().num_rounds(), 15);
}

// The slice of the budget for prompts comes before the decode rows, and a preempted request's pages come back a step
// late: were they its own again, it would be preempted and admitted for ever.
TEST(Budget, PagesThatADecodeRowWaitsForAreNotGivenBackToWhatItPreempted) {
  SchedulerConfig config = overlapped(roomy());
  config.tokens_per_page = 2;
  config.max_tokens_per_step = 1;
  config.max_model_len = 28;
  config.num_slots = 14;
  config.watermark_pages = 0;
  for (std::int32_t length = 12; length < 26; ++length) {
    Harness harness(config);
    harness.submit(make_prompt(1), 20);
    harness.step();
    harness.submit(make_prompt(length, 1), 2, {.synchronous = true});
    harness.run();
  }
}

TEST(Budget, APageOfItGoesToTheOldestPromptAtLeastEveryEightSteps) {
  SchedulerConfig config = roomy();
  config.max_seats = 6;
  config.max_tokens_per_step = 4;
  config.num_slots = 1024;
  config.max_model_len = 1024;
  Harness harness(config);
  for (std::uint64_t i = 0; i < 4; ++i) {
    harness.submit(make_prompt(1, i), 900);
  }
  for (std::int32_t i = 0; i < 4; ++i) {
    harness.step();
  }
  const SeqId prompt = harness.submit(make_prompt(41, 9), 3);
  const SeqId behind = harness.submit(make_prompt(41, 10), 3);
  std::int32_t gap = 0;
  std::int32_t num_chunks = 0;
  while (harness.request(prompt).output.empty()) {
    ASSERT_TRUE(harness.plan());
    const PlanCopy& plan = harness.last_plan();
    ASSERT_FALSE(plan.row_of(behind).has_value());
    const auto row = plan.row_of(prompt);
    gap = row ? 0 : gap + 1;
    ASSERT_LT(gap, Scheduler::kPrefillPeriod);
    if (row && plan.samples[*row] == 0) {
      ASSERT_EQ(plan.query_len[*row], config.tokens_per_page);
    }
    num_chunks += row ? 1 : 0;
    harness.deliver();
  }
  EXPECT_EQ(num_chunks, 11);
}

// What does not fit for want of pages or seats takes no budget from the rows that run.
TEST(Budget, APromptThatCannotBeginCostsTheOthersNothing) {
  SchedulerConfig config = roomy();
  config.max_seats = 4;
  config.max_tokens_per_step = 4;
  Harness harness(config);
  for (std::uint64_t i = 0; i < 4; ++i) {
    harness.submit(make_prompt(1, i), 100);
  }
  harness.step();
  harness.submit(make_prompt(20, 9), 3);
  for (std::int32_t i = 0; i < 40; ++i) {
    ASSERT_TRUE(harness.plan());
    ASSERT_EQ(harness.last_plan().num_rows(), 4);
    harness.deliver();
  }
  harness.run();
}

TEST(Budget, AMixedStepNeverExceedsIt) {
  SchedulerConfig config = overlapped(with_drafts(2));
  config.max_tokens_per_step = 11;
  Harness harness(config);
  for (std::uint64_t i = 0; i < 12; ++i) {
    harness.submit(make_prompt(static_cast<std::int32_t>(3 + 5 * i), i), 12);
  }
  harness.run();  // the fake engine checks each plan
}

// Requests that cannot begin yet are not counted as running: the seats that are free stay free.
TEST(Seats, WaitingRequestsDoNotUseUpTheCap) {
  SchedulerConfig config = roomy();
  config.max_seats = 4;
  config.num_slots = 12;
  config.watermark_pages = 0;
  Harness harness(config);
  for (std::uint64_t i = 0; i < 4; ++i) {
    harness.submit(make_prompt(30, i), 10);  // one at a time
  }
  const SeqId urgent = harness.submit(make_prompt(2, 9), 2, {.priority = -1});
  ASSERT_TRUE(harness.plan());
  EXPECT_TRUE(harness.last_plan().row_of(urgent).has_value());
  harness.run();
}

TEST(Seats, AreAllFreeAfterAThousandRequestsThatEndOnTheirFirstStep) {
  SchedulerConfig config = overlapped(with_drafts(3));
  Harness harness(config);
  const SeqId steady = harness.submit(make_prompt(5), 200);
  for (std::uint64_t i = 0; i < 1000; ++i) {
    harness.submit(make_prompt(static_cast<std::int32_t>(1 + i % 9), i), 1);
  }
  harness.run();
  EXPECT_EQ(harness.request(steady).output.size(), 200u);
  std::set<std::int32_t> seats;
  for (std::uint64_t i = 0; i < 8; ++i) {
    harness.submit(make_prompt(3, i), 4);
  }
  ASSERT_TRUE(harness.plan());
  EXPECT_EQ(harness.last_plan().num_rows(), config.max_seats);
  harness.run();
}

}  // namespace
}  // namespace tandem::sched::testing
