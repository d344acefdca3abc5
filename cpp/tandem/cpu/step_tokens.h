#pragma once

#include <cstdint>

namespace tandem::cpu {

// What a step's plan and the seats say of R rows and T tokens, and what follows for each token. The arrays are those of
// tandem.msa.StepMetadata, which has the same computation in torch operations; sizes are counts of elements.

struct StepRows {
  std::int64_t count = 0;  // padding tokens belong to the last one
  const std::int32_t* seat = nullptr;
  const std::int32_t* first = nullptr;       // the length is at most this ...
  const std::int32_t* floor = nullptr;       // ... and at least this
  const std::int32_t* ceiling = nullptr;     // a length above it is an overrun
  const std::int32_t* write_from = nullptr;  // an index is written iff it is not below
  std::int32_t* length = nullptr;            // out
};

struct StepTokens {
  std::int64_t count = 0;
  const std::int32_t* row = nullptr;
  const std::int32_t* end = nullptr;         // place after the token in its row
  const std::int32_t* max_length = nullptr;  // no index from here on is touched
  const std::int32_t* source = nullptr;      // place of the id in `Seats::tokens`
  const std::int32_t* from_seat = nullptr;   // 1: the id comes from there, 0: it is plan_id
  const std::int32_t* plan_id = nullptr;
  std::int32_t* id = nullptr;  // out, as all below
  std::int32_t* position = nullptr;
  std::int32_t* write_index = nullptr;
  std::int32_t* kv_len = nullptr;
  std::int32_t* num_valid_blocks = nullptr;
};

struct Seats {
  const std::int32_t* length = nullptr;  // [count]
  const std::int32_t* tokens = nullptr;  // [num_tokens], all seats' one after the other
  std::int64_t count = 0;
  std::int64_t num_tokens = 0;
};

// Fills the outputs and `overrun`, the largest excess of a seat's length over its row's ceiling. InvalidArgument,
// before anything is written, for a seat, row or source out of range.
void derive_step(const Seats& seats, const StepRows& rows, const StepTokens& tokens, std::int32_t tokens_per_page,
                 std::int32_t* overrun);

struct SampledRows {
  std::int64_t count = 0;
  const std::int32_t* row = nullptr;
  const std::int32_t* seat = nullptr;
  const std::int32_t* token = nullptr;         // the newest of each
  const std::int32_t* num_drafts = nullptr;    // that each verified
  const std::int32_t* num_accepted = nullptr;  // of them; null: none anywhere
};

struct AdvancedRows {
  std::int64_t count = 0;
  const std::int32_t* seat = nullptr;
  const std::int32_t* length = nullptr;  // before the step
  const std::int32_t* advance = nullptr;
  const std::int32_t* max_length = nullptr;
};

// length[seat] = min(row length + advance + accepted drafts, max_length) for each row, and the newest token of each
// sampled one as the first of its seat's `tokens_per_seat`. InvalidArgument, before anything is written, for a seat or
// row out of range.
void advance_seats(const AdvancedRows& rows, const SampledRows& sampled, std::int64_t num_seats,
                   std::int64_t tokens_per_seat, std::int32_t* length, std::int32_t* tokens);

}  // namespace tandem::cpu
