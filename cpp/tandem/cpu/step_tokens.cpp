#include "tandem/cpu/step_tokens.h"

#include <algorithm>
#include <limits>
#include <string>

#include "tandem/base/check.h"
#include "tandem/cpu/ranges.h"

namespace tandem::cpu {

void derive_step(const Seats& seats, const StepRows& rows, const StepTokens& tokens, std::int32_t tokens_per_page,
                 std::int32_t* overrun) {
  if (tokens_per_page < 1) {
    throw InvalidArgument("tokens_per_page is " + std::to_string(tokens_per_page) + ", must be at least 1");
  }
  require_below("seat", rows.seat, rows.count, seats.count);
  require_below("row", tokens.row, tokens.count, rows.count);
  require_below("source", tokens.source, tokens.count, seats.num_tokens);

  std::int32_t excess = std::numeric_limits<std::int32_t>::min();
  for (std::int64_t r = 0; r < rows.count; ++r) {
    const std::int32_t known = seats.length[rows.seat[r]];
    rows.length[r] = std::min(std::max(known, rows.floor[r]), rows.first[r]);
    excess = std::max(excess, known - rows.ceiling[r]);
  }
  *overrun = excess;

  for (std::int64_t t = 0; t < tokens.count; ++t) {
    const std::int32_t row = tokens.row[t];
    const std::int32_t end = rows.length[row] + tokens.end[t];
    const std::int32_t seen = end <= tokens.max_length[t] ? end : 0;
    tokens.kv_len[t] = seen;
    tokens.position[t] = std::max(seen - 1, 0);
    tokens.write_index[t] = seen > rows.write_from[row] ? seen - 1 : -1;
    tokens.num_valid_blocks[t] = (seen + tokens_per_page - 1) / tokens_per_page;
    tokens.id[t] = tokens.from_seat[t] != 0 ? std::max(seats.tokens[tokens.source[t]], 0) : tokens.plan_id[t];
  }
}

void advance_seats(const AdvancedRows& rows, const SampledRows& sampled, std::int64_t num_seats,
                   std::int64_t tokens_per_seat, std::int32_t* length, std::int32_t* tokens) {
  require_below("seat", rows.seat, rows.count, num_seats);
  require_below("seat", sampled.seat, sampled.count, num_seats);
  require_below("row", sampled.row, sampled.count, rows.count);
  for (std::int64_t r = 0; r < rows.count; ++r) {
    length[rows.seat[r]] = std::min(rows.length[r] + rows.advance[r], rows.max_length[r]);
  }
  for (std::int64_t i = 0; i < sampled.count; ++i) {
    tokens[sampled.seat[i] * tokens_per_seat] = sampled.token[i];
    if (sampled.num_accepted != nullptr) {
      const std::int64_t row = sampled.row[i];
      std::int32_t& mine = length[rows.seat[row]];
      mine = std::min(mine + std::min(sampled.num_accepted[i], sampled.num_drafts[i]), rows.max_length[row]);
    }
  }
}

}  // namespace tandem::cpu
