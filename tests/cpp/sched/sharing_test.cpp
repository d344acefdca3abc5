#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include "sched/configs.h"
#include "sched/harness.h"

namespace tandem::sched::testing {
namespace {

std::vector<TokenId> joined(std::vector<TokenId> tokens, const std::vector<TokenId>& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

// Prompt tokens that a request with exactly these tokens would find.
std::int32_t hit_of(Harness& harness, std::vector<TokenId> tokens) {
  const SeqId id = harness.submit(std::move(tokens), 1);
  harness.run();
  return harness.request(id).terminal->num_cached_tokens;
}

class NextTurnTest : public ::testing::TestWithParam<std::tuple<int, int, bool>> {};

// Tokens accepted beyond the stop were never returned: they are no part of what is cached, and what was returned is.
TEST_P(NextTurnTest, HitsWhatWasReturnedAndNothingThatWasNot) {
  const auto [draft_len, stop_after, overlap] = GetParam();
  for (std::int32_t prompt_len = 5; prompt_len <= 8; ++prompt_len) {
    SchedulerConfig config = with_drafts(draft_len);
    config.overlap = overlap;
    Harness harness(config);
    harness.engine().set_num_right_drafts(draft_len);
    const SeqId id = harness.submit(make_prompt(prompt_len), 40, {.stop_after = stop_after});
    harness.run();
    const std::vector<TokenId> seen = joined(harness.request(id).prompt, harness.request(id).output);
    ASSERT_EQ(harness.request(id).output.size(), static_cast<std::size_t>(stop_after));

    // The text as it would have gone on. Whatever a step wrote of it must not be found.
    std::vector<TokenId> unseen = seen;
    for (std::int32_t i = 0; i < 12; ++i) {
      unseen.push_back(harness.engine().text(id.value()).token(static_cast<std::int64_t>(unseen.size())));
    }
    ASSERT_LE(hit_of(harness, unseen), static_cast<std::int32_t>(seen.size()));

    Harness again(config);
    again.engine().set_num_right_drafts(draft_len);
    again.submit(make_prompt(prompt_len), 40, {.stop_after = stop_after});
    again.run();
    // All but the last token, which no step has consumed unless it was an accepted draft.
    ASSERT_GE(hit_of(again, seen), (static_cast<std::int32_t>(seen.size()) - 1) / 4 * 4);
  }
}

INSTANTIATE_TEST_SUITE_P(Rounds, NextTurnTest,
                         ::testing::Combine(::testing::Values(0, 1, 4, 7), ::testing::Range(1, 10), ::testing::Bool()));

// The page that the last accepted draft fills is complete, and the next turn finds it.
TEST(Sharing, AStopOnAnAcceptedDraftThatFillsAPageCachesThatPage) {
  Harness harness(with_drafts(4));
  harness.engine().set_num_right_drafts(4);
  const SeqId id = harness.submit(make_prompt(5), 40, {.stop_after = 3});  // the prefill's token and two drafts
  harness.run();
  EXPECT_EQ(hit_of(harness, joined(harness.request(id).prompt, harness.request(id).output)), 8);
}

// Two prompts that diverge inside a page share none of it, and both sets of pages are accounted for when idle.
TEST(Sharing, PromptsThatDivergeInsideAPageAddUpWhenIdle) {
  Harness harness(roomy());
  std::vector<TokenId> other = make_prompt(14);
  other[10] = (other[10] + 1) % Text::kVocabulary;
  harness.submit(make_prompt(14), 3);
  const SeqId second = harness.submit(other, 3);
  harness.run();
  EXPECT_EQ(harness.request(second).terminal->num_cached_tokens, 0);
  // Of four pages each, the first two are equal: the first request's copies stay, the second's go with it.
  EXPECT_EQ(harness.scheduler().ledger().cached, 6);
  EXPECT_EQ(hit_of(harness, other), 12);
}

TEST(Sharing, LengthsAroundAPageEdgeKeepTheirTextInACrowdedPool) {
  for (const std::int32_t page : {2, 4, 8}) {
    for (const bool overlap : {false, true}) {
      SchedulerConfig config = with_drafts(3);
      config.tokens_per_page = page;
      config.overlap = overlap;
      config.max_model_len = 8 * page;
      config.num_slots = 19;  // of 20 that four such requests want
      config.watermark_pages = 0;
      Harness harness(config);
      for (std::int32_t i = 0; i < 24; ++i) {
        std::vector<TokenId> prompt = make_prompt(4 * page - 1 + i % 3);
        if (i % 4 == 3) {
          prompt.back() = i;
        }
        harness.submit(std::move(prompt), page);
      }
      harness.run();
      EXPECT_GT(harness.scheduler().stats().num_cached_tokens, 0);
    }
  }
}

TEST(Sharing, AResetForgetsEverythingAlsoWhatRunsNow) {
  Harness harness(overlapped(with_drafts(2)));
  const SeqId running = harness.submit(make_prompt(16), 30);
  for (std::int32_t i = 0; i < 6; ++i) {
    harness.step();
  }
  EXPECT_FALSE(harness.request(running).output.empty());
  harness.reset_prefix_cache();
  harness.run();
  EXPECT_EQ(harness.request(running).output.size(), 30u);
  EXPECT_EQ(hit_of(harness, make_prompt(16)), 0);
}

TEST(Sharing, AnEvictedPageIsNotFoundAgain) {
  SchedulerConfig config = roomy();
  config.num_slots = 6;
  config.max_model_len = 24;
  Harness harness(config);
  harness.submit(make_prompt(16), 1);
  harness.run();
  harness.submit(make_prompt(20, 1), 4);  // needs the whole pool
  harness.run();
  EXPECT_EQ(hit_of(harness, make_prompt(16)), 0);
}

// The same request again and again over a full pool, with others between: found or not, its text stays.
TEST(Sharing, APopularPromptKeepsItsTextThroughFiftyRoundsOfEviction) {
  SchedulerConfig config = overlapped(with_drafts(3));
  config.num_slots = 14;
  config.max_model_len = 40;
  config.watermark_pages = 0;
  Harness harness(config);
  for (std::uint64_t round = 0; round < 50; ++round) {
    harness.submit(make_prompt(18), 6);
    harness.submit(make_prompt(static_cast<std::int32_t>(9 + round % 7), 100 + round), 9);
    harness.run();
  }
  EXPECT_GT(harness.scheduler().stats().num_cached_tokens, 0);
}

}  // namespace
}  // namespace tandem::sched::testing
