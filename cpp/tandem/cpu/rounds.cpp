#include "tandem/cpu/rounds.h"

#include <algorithm>

#include "tandem/base/check.h"
#include "tandem/cpu/ranges.h"

namespace tandem::cpu {

void extend_slots(const SteppedTokens& tokens, const DraftSlots& slots) {
  require_below("row", tokens.row, tokens.count, tokens.num_rows);
  for (std::int64_t t = 0; t < tokens.count; ++t) {
    const std::int32_t seen = tokens.kv_len[t];
    const bool inside = seen > 0 && seen < tokens.max_length[t];
    slots.kv_len[t] = inside ? seen + 1 : 0;
    slots.write_index[t] = inside && seen >= tokens.row_write_from[tokens.row[t]] ? seen : -1;
  }
}

void single_slots(const DraftedRows& rows, std::int32_t step, std::int64_t max_drafts, const DraftSlots& slots,
                  std::int32_t* drafts) {
  if (step < 1 || step > max_drafts) {
    throw InvalidArgument("step is " + std::to_string(step) + ", allowed are 1 to " + std::to_string(max_drafts));
  }
  for (std::int64_t n = 0; n < rows.count; ++n) {
    const std::int32_t index = rows.newest_index[n] + step;
    const bool inside = rows.newest_index[n] > 0 && index < rows.max_length[n];
    slots.position[n] = inside ? index - 1 : 0;
    slots.write_index[n] = inside ? index : -1;
    slots.kv_len[n] = inside ? index + 1 : 0;
    drafts[n * max_drafts + step - 1] = inside ? rows.draft[n] : -1;
  }
}

void verify_rounds(const Rounds& rounds, const VerifiedRounds& verified) {
  require_below("row", rounds.row, rounds.count, rounds.num_rows);
  require_below("seat", rounds.seat, rounds.count, rounds.num_seats);
  for (std::int64_t n = 0; n < rounds.count; ++n) {
    const std::int64_t positions = rounds.logit_start[n + 1] - rounds.logit_start[n];
    if (rounds.logit_start[n] < 0 || positions < 1 || rounds.logit_start[n + 1] > rounds.num_logits ||
        rounds.row_num_drafts[rounds.row[n]] > std::min(positions - 1, rounds.max_drafts)) {
      throw InvalidArgument("logit_start: sampling row " + std::to_string(n) + " has positions " +
                            std::to_string(rounds.logit_start[n]) + " to " + std::to_string(rounds.logit_start[n + 1]) +
                            " of " + std::to_string(rounds.num_logits) + " and " +
                            std::to_string(rounds.row_num_drafts[rounds.row[n]]) + " drafts");
    }
  }
  for (std::int64_t n = 0; n < rounds.count; ++n) {
    const std::int32_t first = rounds.logit_start[n];
    const std::int32_t num_drafts = rounds.row_num_drafts[rounds.row[n]];
    const std::int32_t* const drafts = rounds.drafts + rounds.seat[n] * rounds.draft_stride;
    std::int32_t accepted = 0;
    while (accepted < num_drafts && rounds.decided[first + accepted] == drafts[accepted]) {
      ++accepted;
    }
    verified.num_accepted[n] = accepted;
    verified.newest[n] = rounds.decided[first + accepted];
    verified.place[n] = rounds.logit_token[first + accepted];
  }
}

}  // namespace tandem::cpu
