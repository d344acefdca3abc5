#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "sched/configs.h"
#include "sched/harness.h"
#include "tandem/base/check.h"

namespace tandem::sched::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <typename F>
std::string refusal(F&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "not refused";
}

RequestSpec spec(std::int32_t prompt_len, std::int32_t max_tokens) {
  return {.prompt = make_prompt(prompt_len), .max_tokens = max_tokens};
}

struct BadField {
  const char* name;
  void (*spoil)(SchedulerConfig&);
  const char* value;
};

class ConfigTest : public ::testing::TestWithParam<BadField> {};

TEST_P(ConfigTest, RefusesAFieldOutOfRangeByNameAndValue) {
  SchedulerConfig config = roomy();
  GetParam().spoil(config);
  EXPECT_THAT(refusal([&] { Scheduler scheduler(config); }),
              AllOf(HasSubstr(GetParam().name), HasSubstr(GetParam().value)));
}

INSTANTIATE_TEST_SUITE_P(
    Fields, ConfigTest,
    ::testing::Values(BadField{"num_slots", [](SchedulerConfig& c) { c.num_slots = 0; }, "0"},
                      BadField{"tokens_per_page", [](SchedulerConfig& c) { c.tokens_per_page = -4; }, "-4"},
                      BadField{"max_seats", [](SchedulerConfig& c) { c.max_seats = 0; }, "0"},
                      BadField{"max_model_len", [](SchedulerConfig& c) { c.max_model_len = 1; }, "1"},
                      BadField{"max_tokens_per_step", [](SchedulerConfig& c) { c.max_tokens_per_step = 0; }, "0"},
                      BadField{"draft_len", [](SchedulerConfig& c) { c.draft_len = 3; }, "has_drafter"},
                      BadField{"draft_len", [](SchedulerConfig& c) { c = with_drafts(8); }, "8"},
                      BadField{"max_tokens_per_step",
                               [](SchedulerConfig& c) {
                                 c = with_drafts(3);
                                 c.max_tokens_per_step = 3;
                               },
                               "at least 4"},
                      BadField{"watermark_pages", [](SchedulerConfig& c) { c.watermark_pages = -1; }, "-1"},
                      BadField{"max_speculating_rows", [](SchedulerConfig& c) { c.max_speculating_rows = -2; }, "-2"}));

TEST(Submit, RefusesAnEmptyPromptANegativeTokenAndNoTokensToGenerate) {
  Scheduler scheduler(roomy());
  EXPECT_THAT(refusal([&] { scheduler.submit(spec(0, 1)); }), HasSubstr("no tokens"));
  EXPECT_THAT(refusal([&] { scheduler.submit({.prompt = {1, 2, -3}}); }), AllOf(HasSubstr("token 2"), HasSubstr("-3")));
  EXPECT_THAT(refusal([&] { scheduler.submit(spec(4, 0)); }), HasSubstr("max_tokens is 0"));
  EXPECT_EQ(scheduler.num_unfinished(), 0);
  EXPECT_EQ(scheduler.plan(), nullptr);
}

TEST(Submit, RefusesAPromptThatLeavesNoRoomAndNamesBothNumbers) {
  Scheduler scheduler(roomy());
  EXPECT_THAT(refusal([&] { scheduler.submit(spec(256, 1)); }), AllOf(HasSubstr("256 tokens"), HasSubstr("255")));
  EXPECT_EQ(scheduler.submit(spec(255, 100)), SeqId{0});
}

// Once the only running request would exhaust the pool, there is nobody to take pages from.
TEST(Submit, RefusesWhatThePoolCouldNotHoldAloneAndServesTheNextRequest) {
  SchedulerConfig config = roomy();
  config.num_slots = 5;
  Harness harness(config);
  EXPECT_THAT(refusal([&] { harness.submit(make_prompt(12), 20); }),
              AllOf(HasSubstr("32 together"), HasSubstr("need 8 pages"), HasSubstr("pool has 5")));
  EXPECT_EQ(config.max_sequence_tokens(), 20);
  const SeqId id = harness.submit(make_prompt(12), 8);
  harness.run();
  EXPECT_EQ(harness.request(id).output.size(), 8u);
}

class WholePoolTest : public ::testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(WholePoolTest, ARequestOfExactlyThePoolRunsToItsEndWhateverIsCached) {
  const auto [draft_len, overlap, cached] = GetParam();
  SchedulerConfig config = with_drafts(draft_len);
  config.overlap = overlap;
  config.num_slots = 6;
  config.watermark_pages = 3;
  Harness harness(config);
  if (cached) {
    harness.submit(make_prompt(20, 7), 4);
    harness.run();
  }
  const SeqId id = harness.submit(make_prompt(13), 11);
  harness.run();
  EXPECT_EQ(harness.request(id).output.size(), 11u);
}

INSTANTIATE_TEST_SUITE_P(Drafts, WholePoolTest,
                         ::testing::Combine(::testing::Range(0, 8), ::testing::Bool(), ::testing::Bool()));

TEST(Submit, CutsMaxTokensAtMaxModelLen) {
  SchedulerConfig config = roomy();
  config.max_model_len = 10;
  Harness harness(config);
  const SeqId id = harness.submit(make_prompt(7), 100);
  harness.run();
  EXPECT_EQ(harness.request(id).output.size(), 3u);
  EXPECT_EQ(harness.request(id).terminal->reason, FinishReason::Length);
}

TEST(Abort, TellsAnEndedRequestFromOneThatNeverWas) {
  Harness harness(roomy());
  const SeqId id = harness.submit(make_prompt(5), 3);
  harness.run();
  EXPECT_EQ(harness.scheduler().abort(id), std::nullopt);
  EXPECT_THAT(refusal([&] { harness.scheduler().abort(SeqId{7}); }), AllOf(HasSubstr("id 7"), HasSubstr("below 1")));
  EXPECT_THAT(refusal([&] { (void)harness.scheduler().known_tokens(id); }), HasSubstr("id 0"));
  EXPECT_THAT(refusal([&] { (void)harness.scheduler().num_cached(id); }), HasSubstr("id 0"));
}

TEST(Threads, OnlyTheEngineThreadMayCall) {
  Scheduler scheduler(roomy());
  std::string from_first, from_second, after_binding;
  std::thread([&] { from_first = refusal([&] { scheduler.submit(spec(4, 1)); }); }).join();
  from_second = refusal([&] { scheduler.plan(); });
  scheduler.bind_thread();
  after_binding = refusal([&] { scheduler.plan(); });
  EXPECT_EQ(from_first, "not refused");
  EXPECT_THAT(from_second, HasSubstr("another thread"));
  EXPECT_EQ(after_binding, "not refused");
}

}  // namespace
}  // namespace tandem::sched::testing
