#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tandem/kv/sequence_pages.h"
#include "tandem/sched/types.h"

namespace tandem::sched {

// Where a request stands. All changes happen inside submit, plan, complete, fail and abort:
//
//   submit ------> Waiting --admit (plan)--> Context --last chunk planned (plan)--> Decode
//                     ^                         |                                     |
//                     +------ preempt (plan) ---+-------------------------------------+
//   Waiting, Context, Decode --end of text, length, abort, failed step--> Ended (one Terminal, record gone)
//
// Leaving Context or Decode by anything but the last chunk drops the seat and the pages and raises the epoch, so that
// results of steps in flight no longer count. What those steps still use goes to the last of them (Remains).
enum class Phase : std::uint8_t { Waiting, Context, Decode, Ended };

// What the scheduler's order is by: lower priority value first, then first arrival. Kept across preemption.
struct OrderKey {
  std::int32_t priority = 0;
  SeqId seq_id;
  friend constexpr auto operator<=>(const OrderKey&, const OrderKey&) = default;
};

// One request. Lengths, in tokens:
//   known        = tokens.size(): the prompt and what results have brought;
//   valid        = pages.computed(): entries of these tokens that completed steps have written (n of the last result);
//   planned_len  = valid and the most that the steps in flight can add: an upper bound of the device's length.
struct alignas(64) Sequence {
  Sequence(RequestSpec spec, SeqId seq_id, std::int32_t limit, kv::PagePool& pool, kv::PrefixTree* tree,
           std::int32_t tokens_per_page)
      : key{spec.priority, seq_id},
        max_length(limit),
        speculate(spec.speculate),
        synchronous(spec.synchronous),
        tokens(std::move(spec.prompt)),
        pages(pool, tree, tokens_per_page, std::move(spec.salt)),
        num_prompt_tokens(static_cast<std::int32_t>(tokens.size())) {}

  [[nodiscard]] std::int32_t num_known() const { return static_cast<std::int32_t>(tokens.size()); }

  // Asks for the memory that a step will look at, before it does.
  void prefetch() const {
    const auto* const line = reinterpret_cast<const char*>(this);
    __builtin_prefetch(line);
    __builtin_prefetch(line + 64);
    __builtin_prefetch(line + 128);
  }

  // What every step looks at comes first and lies together.
  OrderKey key;
  StepId last_step;  // the last step with a row of this sequence, of any epoch
  std::int32_t epoch = 0;
  SeatId seat;
  std::int32_t max_length;  // prompt and generated tokens at most
  std::int32_t planned_len = 0;
  std::int32_t num_rows_in_flight = 0;  // of this epoch
  std::int32_t num_samples_in_flight = 0;
  std::int32_t num_listed_pages = 0;  // pages that the seat's table has
  std::int32_t hit_len = 0;           // tokens found in the prefix cache at this admission
  std::int32_t num_rounds = 0;
  std::int32_t num_drafted_tokens = 0;
  std::int32_t num_accepted_tokens = 0;
  Phase phase = Phase::Waiting;
  bool has_drafts = false;  // its last row was asked to propose some
  bool fresh = false;       // no row planned on this seat yet
  bool speculate;
  bool synchronous;
  std::vector<TokenId> tokens;
  kv::SequencePages pages;

  std::int32_t prefill_len = 0;  // known tokens at admission: where Context ends
  std::int32_t num_prompt_tokens;
  std::int32_t num_cached_tokens = 0;  // at the first admission
  std::int32_t num_preemptions = 0;
  bool admitted_before = false;
};

// How many rows ahead a loop over sequences prefetches.
inline constexpr std::size_t kPrefetchRows = 8;

// What a step in flight still uses of sequences that no longer do. Freed when it completes.
struct Remains {
  std::vector<kv::PageRef> pages;
  std::vector<SeatId> seats;
  std::vector<std::unique_ptr<Sequence>> sequences;  // ended; rows of the step point to them
};

}  // namespace tandem::sched
