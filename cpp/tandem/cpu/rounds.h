#pragma once

#include <cstdint>

namespace tandem::cpu {

// What follows for a step's rounds and draft slots, as tandem.spec has it in torch operations. Sizes are counts of
// elements; all functions throw InvalidArgument, before anything is written, for a row, seat or place out of range.

struct DraftSlots {
  std::int32_t* position = nullptr;  // null for `extend_slots`: it is the token's own
  std::int32_t* write_index = nullptr;
  std::int32_t* kv_len = nullptr;
};

struct SteppedTokens {
  std::int64_t count = 0;
  const std::int32_t* kv_len = nullptr;
  const std::int32_t* max_length = nullptr;
  const std::int32_t* row = nullptr;
  std::int64_t num_rows = 0;
  const std::int32_t* row_write_from = nullptr;
};

// The slot of the token at index p lies at p+1, where the sequence's limit allows it.
void extend_slots(const SteppedTokens& tokens, const DraftSlots& slots);

struct DraftedRows {
  std::int64_t count = 0;
  const std::int32_t* newest_index = nullptr;  // of the newest known token; 0: the row has none
  const std::int32_t* max_length = nullptr;
  const std::int32_t* draft = nullptr;  // of this step
};

// The slot of draft number `step`, and the draft itself, -1 where it lies beyond the limit, into column step - 1 of
// `drafts` [count, max_drafts].
void single_slots(const DraftedRows& rows, std::int32_t step, std::int64_t max_drafts, const DraftSlots& slots,
                  std::int32_t* drafts);

struct Rounds {
  std::int64_t count = 0;                     // sampling rows
  const std::int32_t* logit_start = nullptr;  // [count + 1]
  std::int64_t num_logits = 0;
  const std::int32_t* logit_token = nullptr;  // [num_logits]
  const std::int32_t* decided = nullptr;      // [num_logits]
  const std::int32_t* row = nullptr;          // [count]
  const std::int32_t* seat = nullptr;         // [count]
  std::int64_t num_rows = 0;
  const std::int32_t* row_num_drafts = nullptr;
  std::int64_t num_seats = 0;
  std::int64_t max_drafts = 0;
  const std::int32_t* drafts = nullptr;  // [num_seats, max_drafts], rows `draft_stride` apart
  std::int64_t draft_stride = 0;
};

struct VerifiedRounds {
  std::int32_t* num_accepted = nullptr;
  std::int32_t* newest = nullptr;
  std::int32_t* place = nullptr;
};

// Accepts each row's drafts up to the first that differs from what was decided in its place.
void verify_rounds(const Rounds& rounds, const VerifiedRounds& verified);

}  // namespace tandem::cpu
