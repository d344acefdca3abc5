#include "tandem/cpu/step_tokens.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "tandem/base/check.h"

namespace tandem::cpu::testing {
namespace {

using Ints = std::vector<std::int32_t>;

// One verify row of four tokens on seat 1, and a row of padding.
struct Step {
  Ints length{0, 6, 0};
  Ints seat_tokens{-1, -1, -1, -1, 70, 71, -1, 73, -1, -1, -1, -1};
  Ints row_seat{1, 2}, first{9, 0}, floor{0, 0}, ceiling{9, 0}, write_from{7, 0}, row_length{-7, -7};
  Ints row{0, 0, 0, 0, 1}, end{1, 2, 3, 4, 1}, max_length{9, 9, 9, 9, 0};
  Ints source{4, 5, 6, 7, 0}, from_seat{1, 1, 1, 1, 0}, plan_id{0, 0, 0, 0, 0};
  Ints id = Ints(5, -7), position = Ints(5, -7), write_index = Ints(5, -7), kv_len = Ints(5, -7), blocks = Ints(5, -7);
  std::int32_t overrun = -7;

  void derive() {
    derive_step({length.data(), seat_tokens.data(), 3, 12},
                {2, row_seat.data(), first.data(), floor.data(), ceiling.data(), write_from.data(), row_length.data()},
                {5, row.data(), end.data(), max_length.data(), source.data(), from_seat.data(), plan_id.data(),
                 id.data(), position.data(), write_index.data(), kv_len.data(), blocks.data()},
                4, &overrun);
  }
};

TEST(StepTokens, AVerifyRowFormsALadderAndEndsAtTheLimitOfItsSequence) {
  Step step;
  step.derive();
  EXPECT_EQ(step.row_length, (Ints{6, 0}));
  EXPECT_EQ(step.kv_len, (Ints{7, 8, 9, 0, 0}));
  EXPECT_EQ(step.position, (Ints{6, 7, 8, 0, 0}));
  EXPECT_EQ(step.write_index, (Ints{-1, 7, 8, -1, -1}));
  EXPECT_EQ(step.blocks, (Ints{2, 2, 3, 0, 0}));
  EXPECT_EQ(step.id, (Ints{70, 71, 0, 73, 0}));
  EXPECT_LE(step.overrun, 0);
}

TEST(StepTokens, ALengthBeyondThePlanIsCutAndReported) {
  Step step;
  step.length[1] = 11;
  step.derive();
  EXPECT_EQ(step.row_length[0], 9);
  EXPECT_EQ(step.overrun, 2);
}

TEST(StepTokens, AnIndexOutOfRangeIsRefusedBeforeAnythingIsWritten) {
  for (Ints Step::* const field : {&Step::row_seat, &Step::row, &Step::source}) {
    for (const std::int32_t bad : {-1, 12}) {
      Step step;
      (step.*field)[1] = bad;
      EXPECT_THROW(step.derive(), InvalidArgument);
      EXPECT_EQ(step.row_length, (Ints{-7, -7}));
      EXPECT_EQ(step.kv_len, Ints(5, -7));
      EXPECT_EQ(step.overrun, -7);
    }
  }
}

struct Advance {
  Ints length{4, 6, 0}, tokens{1, 2, 3, 4, 5, 6};
  Ints seat{1, 0}, before{6, 4}, advance{1, 3}, max_length{8, 40};
  Ints row{0}, sampled_seat{1}, newest{90}, drafts{3}, accepted{2};

  void run(bool with_drafts) {
    advance_seats(
        {2, seat.data(), before.data(), advance.data(), max_length.data()},
        {1, row.data(), sampled_seat.data(), newest.data(), drafts.data(), with_drafts ? accepted.data() : nullptr}, 3,
        2, length.data(), tokens.data());
  }
};

TEST(StepTokens, AdvancingAddsAcceptedDraftsUpToTheLimit) {
  Advance plain;
  plain.run(false);
  EXPECT_EQ(plain.length, (Ints{7, 7, 0}));
  EXPECT_EQ(plain.tokens, (Ints{1, 2, 90, 4, 5, 6}));
  Advance drafted;
  drafted.run(true);
  EXPECT_EQ(drafted.length, (Ints{7, 8, 0}));
}

TEST(StepTokens, AdvancingRefusesASeatOrRowOutOfRangeBeforeAnythingIsWritten) {
  for (Ints Advance::* const field : {&Advance::seat, &Advance::row, &Advance::sampled_seat}) {
    Advance step;
    (step.*field)[0] = 3;
    EXPECT_THROW(step.run(true), InvalidArgument);
    EXPECT_EQ(step.length, (Ints{4, 6, 0}));
    EXPECT_EQ(step.tokens, (Ints{1, 2, 3, 4, 5, 6}));
  }
}

}  // namespace
}  // namespace tandem::cpu::testing
