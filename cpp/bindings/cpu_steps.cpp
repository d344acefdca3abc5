#include <nanobind/stl/optional.h>

#include <optional>

#include "cpu_args.h"
#include "tandem/cpu/rounds.h"
#include "tandem/cpu/step_tokens.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::cpu {
namespace {

void bind_step_tokens(nb::module_& m) {
  m.def(
      "derive_step",
      [](const TensorArg& length, const TensorArg& seat_tokens, const TensorArg& row_seat, const TensorArg& row_first,
         const TensorArg& row_floor, const TensorArg& row_ceiling, const TensorArg& row_write_from,
         const TensorArg& token_row, const TensorArg& token_end, const TensorArg& token_max_length,
         const TensorArg& token_source, const TensorArg& token_from_seat, const TensorArg& token_plan_id,
         std::int32_t tokens_per_page, const TensorArg& row_length, const TensorArg& token_ids,
         const TensorArg& position, const TensorArg& write_index, const TensorArg& kv_len,
         const TensorArg& num_valid_blocks, const TensorArg& overrun) {
        const std::int64_t num_rows = row_seat.require("row_seat", 1).size(0);
        const std::int64_t num_tokens = token_row.require("token_row", 1).size(0);
        const auto of_rows = [&](const char* name, const TensorArg& arg) {
          arg.require(name, 1).require_size(name, 0, num_rows);
          return arg.ints(name);
        };
        const auto of_tokens = [&](const char* name, const TensorArg& arg) {
          arg.require(name, 1).require_size(name, 0, num_tokens);
          return arg.ints(name);
        };
        length.require("length", 1);
        seat_tokens.require("seat_tokens", 2);
        overrun.require("overrun", 0);
        const Seats seats{length.ints("length"), seat_tokens.ints("seat_tokens"), length.size(0),
                          seat_tokens.size(0) * seat_tokens.size(1)};
        const StepRows rows{.count = num_rows,
                            .seat = row_seat.ints("row_seat"),
                            .first = of_rows("row_first", row_first),
                            .floor = of_rows("row_floor", row_floor),
                            .ceiling = of_rows("row_ceiling", row_ceiling),
                            .write_from = of_rows("row_write_from", row_write_from),
                            .length = of_rows("row_length", row_length)};
        const StepTokens tokens{.count = num_tokens,
                                .row = token_row.ints("token_row"),
                                .end = of_tokens("token_end", token_end),
                                .max_length = of_tokens("token_max_length", token_max_length),
                                .source = of_tokens("token_source", token_source),
                                .from_seat = of_tokens("token_from_seat", token_from_seat),
                                .plan_id = of_tokens("token_plan_id", token_plan_id),
                                .id = of_tokens("token_ids", token_ids),
                                .position = of_tokens("position", position),
                                .write_index = of_tokens("write_index", write_index),
                                .kv_len = of_tokens("kv_len", kv_len),
                                .num_valid_blocks = of_tokens("num_valid_blocks", num_valid_blocks)};
        std::int32_t* excess = overrun.ints("overrun");
        run_kernel(num_tokens, [=] { derive_step(seats, rows, tokens, tokens_per_page, excess); });
      },
      "length"_a, "seat_tokens"_a, "row_seat"_a, "row_first"_a, "row_floor"_a, "row_ceiling"_a, "row_write_from"_a,
      "token_row"_a, "token_end"_a, "token_max_length"_a, "token_source"_a, "token_from_seat"_a, "token_plan_id"_a,
      "tokens_per_page"_a, "row_length"_a, "token_ids"_a, "position"_a, "write_index"_a, "kv_len"_a,
      "num_valid_blocks"_a, "overrun"_a,
      "What a step's tokens follow from its plan and the seats: `tandem.msa.StepMetadata.rederive` in one call.\n\n"
      "All int32: `length` `[S]`, `seat_tokens` `[S, 1+K]`, `overrun` `[]`, the others `[R]` or `[T]`; outputs from "
      "`row_length` on. Raises InvalidArgument before anything is written for a seat, row or source out of range.");
}

void bind_advance(nb::module_& m) {
  m.def(
      "advance_seats",
      [](const TensorArg& length, const TensorArg& seat_tokens, const TensorArg& row_seat, const TensorArg& row_length,
         const TensorArg& row_advance, const TensorArg& row_max_length, const TensorArg& sample_row,
         const TensorArg& sample_seat, const TensorArg& sample_drafts, const TensorArg& tokens,
         const std::optional<TensorArg>& num_accepted) {
        const auto of_size = [](const char* name, const TensorArg& arg, std::int64_t count) {
          arg.require(name, 1).require_size(name, 0, count);
          return arg.ints(name);
        };
        length.require("length", 1);
        seat_tokens.require("seat_tokens", 2).require_size("seat_tokens", 0, length.size(0));
        const std::int64_t num_rows = row_seat.require("row_seat", 1).size(0);
        const std::int64_t num_samples = sample_row.require("sample_row", 1).size(0);
        const AdvancedRows rows{.count = num_rows,
                                .seat = row_seat.ints("row_seat"),
                                .length = of_size("row_length", row_length, num_rows),
                                .advance = of_size("row_advance", row_advance, num_rows),
                                .max_length = of_size("row_max_length", row_max_length, num_rows)};
        const SampledRows sampled{
            .count = num_samples,
            .row = sample_row.ints("sample_row"),
            .seat = of_size("sample_seat", sample_seat, num_samples),
            .token = of_size("tokens", tokens, num_samples),
            .num_drafts = of_size("sample_drafts", sample_drafts, num_samples),
            .num_accepted = num_accepted ? of_size("num_accepted", *num_accepted, num_samples) : nullptr};
        const std::int64_t num_seats = length.size(0), tokens_per_seat = seat_tokens.size(1);
        std::int32_t *lengths = length.ints("length"), *known = seat_tokens.ints("seat_tokens");
        run_kernel(num_rows, [=] { advance_seats(rows, sampled, num_seats, tokens_per_seat, lengths, known); });
      },
      "length"_a, "seat_tokens"_a, "row_seat"_a, "row_length"_a, "row_advance"_a, "row_max_length"_a, "sample_row"_a,
      "sample_seat"_a, "sample_drafts"_a, "tokens"_a, "num_accepted"_a = nb::none(),
      "What verifying a step does to the seats: `tandem.msa.advance` in one call.\n\n"
      "All int32: `length` `[S]` and `seat_tokens` `[S, 1+K]` change in place; the others are `[R]`, from `sample_row` "
      "on `[N]`. Raises InvalidArgument before anything is written for a seat or row out of range.");
}

std::int32_t* ints_of(const char* name, const TensorArg& arg, std::int64_t count) {
  arg.require(name, 1).require_size(name, 0, count);
  return arg.ints(name);
}

void bind_draft_slots(nb::module_& m) {
  m.def(
      "extend_slots",
      [](const TensorArg& token_kv_len, const TensorArg& token_max_length, const TensorArg& token_row,
         const TensorArg& row_write_from, const TensorArg& write_index, const TensorArg& kv_len) {
        const std::int64_t num_tokens = token_kv_len.require("token_kv_len", 1).size(0);
        const SteppedTokens tokens{.count = num_tokens,
                                   .kv_len = token_kv_len.ints("token_kv_len"),
                                   .max_length = ints_of("token_max_length", token_max_length, num_tokens),
                                   .row = ints_of("token_row", token_row, num_tokens),
                                   .num_rows = row_write_from.require("row_write_from", 1).size(0),
                                   .row_write_from = row_write_from.ints("row_write_from")};
        const DraftSlots slots{.write_index = ints_of("write_index", write_index, num_tokens),
                               .kv_len = ints_of("kv_len", kv_len, num_tokens)};
        run_kernel(num_tokens, [=] { extend_slots(tokens, slots); });
      },
      "token_kv_len"_a, "token_max_length"_a, "token_row"_a, "row_write_from"_a, "write_index"_a, "kv_len"_a,
      "The draft slots of a step's tokens: `tandem.spec.slots.extend_slots` in one call.\n\n"
      "All int32 `[T]`, `row_write_from` `[R]`; outputs are `write_index` and `kv_len`. Raises InvalidArgument before "
      "anything is written for a row out of range.");
  m.def(
      "single_slots",
      [](const TensorArg& newest_index, const TensorArg& max_length, const TensorArg& draft, std::int32_t step,
         const TensorArg& position, const TensorArg& write_index, const TensorArg& kv_len, const TensorArg& drafts) {
        const std::int64_t num_rows = newest_index.require("newest_index", 1).size(0);
        const DraftedRows rows{.count = num_rows,
                               .newest_index = newest_index.ints("newest_index"),
                               .max_length = ints_of("max_length", max_length, num_rows),
                               .draft = ints_of("draft", draft, num_rows)};
        const DraftSlots slots{.position = ints_of("position", position, num_rows),
                               .write_index = ints_of("write_index", write_index, num_rows),
                               .kv_len = ints_of("kv_len", kv_len, num_rows)};
        drafts.require("drafts", 2).require_size("drafts", 0, num_rows);
        const std::int64_t max_drafts = drafts.size(1);
        std::int32_t* const out = drafts.ints("drafts");
        run_kernel(num_rows, [=] { single_slots(rows, step, max_drafts, slots, out); });
      },
      "newest_index"_a, "max_length"_a, "draft"_a, "step"_a, "position"_a, "write_index"_a, "kv_len"_a, "drafts"_a,
      "The slots of one single step: `tandem.spec.slots.single_slots` in one call.\n\n"
      "All int32 `[N]`; outputs are `position`, `write_index`, `kv_len` and column `step` - 1 of `drafts` `[N, K]`, "
      "which gets the draft, -1 where it lies beyond the limit. Raises InvalidArgument for a step outside 1 to K.");
}

void bind_verify(nb::module_& m) {
  m.def(
      "verify_rounds",
      [](const TensorArg& logit_start, const TensorArg& logit_token, const TensorArg& decided,
         const TensorArg& sample_row, const TensorArg& sample_seat, const TensorArg& row_num_drafts,
         const TensorArg& drafts, const TensorArg& num_accepted, const TensorArg& newest, const TensorArg& place) {
        const std::int64_t num_samples = sample_row.require("sample_row", 1).size(0);
        const std::int64_t num_logits = logit_token.require("logit_token", 1).size(0);
        drafts.require("drafts", 2, 1);
        const Rounds rounds{.count = num_samples,
                            .logit_start = ints_of("logit_start", logit_start, num_samples + 1),
                            .num_logits = num_logits,
                            .logit_token = logit_token.ints("logit_token"),
                            .decided = ints_of("decided", decided, num_logits),
                            .row = sample_row.ints("sample_row"),
                            .seat = ints_of("sample_seat", sample_seat, num_samples),
                            .num_rows = row_num_drafts.require("row_num_drafts", 1).size(0),
                            .row_num_drafts = row_num_drafts.ints("row_num_drafts"),
                            .num_seats = drafts.size(0),
                            .max_drafts = drafts.size(1),
                            .drafts = drafts.ints("drafts"),
                            .draft_stride = drafts.stride(0)};
        const VerifiedRounds verified{.num_accepted = ints_of("num_accepted", num_accepted, num_samples),
                                      .newest = ints_of("newest", newest, num_samples),
                                      .place = ints_of("place", place, num_samples)};
        run_kernel(num_logits, [=] { verify_rounds(rounds, verified); });
      },
      "logit_start"_a, "logit_token"_a, "decided"_a, "sample_row"_a, "sample_seat"_a, "row_num_drafts"_a, "drafts"_a,
      "num_accepted"_a, "newest"_a, "place"_a,
      "Which drafts a step accepts: `tandem.spec.verify` in one call.\n\n"
      "All int32: `logit_start` `[N+1]`, `logit_token` and `decided` `[L]`, `row_num_drafts` `[R]`, `drafts` `[S, K]`, "
      "the others `[N]`; the last three are outputs. Raises InvalidArgument before anything is written for a row, seat "
      "or position out of range.");
}

}  // namespace

void bind_steps(nb::module_& m) {
  bind_step_tokens(m);
  bind_advance(m);
  bind_draft_slots(m);
  bind_verify(m);
}

}  // namespace tandem::cpu
