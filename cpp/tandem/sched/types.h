#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/base/strong_id.h"
#include "tandem/kv/page_hashes.h"

namespace tandem::sched {

using kv::TokenId;

// Why a request ended. The engine reports what it sees in the tokens (Stop), the scheduler decides Length, Abort comes
// from `abort`, Error from `fail` or from a row that the engine gave up.
enum class FinishReason : std::int32_t { None = 0, Stop = 1, Length = 2, Abort = 3, Error = 4 };
inline constexpr std::size_t kNumFinishReasons = 5;
inline constexpr std::int32_t kMaxDraftLen = 7;

[[nodiscard]] std::string_view to_string(FinishReason reason);

// A row either fills the cache with known tokens (Context) or continues behind them (Decode).
enum class RowKind : std::int32_t { Context = 0, Decode = 1 };

// Fixed for the life of a scheduler. `validate` throws InvalidArgument naming the field, its value and what is allowed.
struct SchedulerConfig {
  std::int32_t num_slots = 0;            // pages of the pool
  std::int32_t tokens_per_page = 128;    //
  std::int32_t max_seats = 0;            // sequences running at once; also the most rows of a step
  std::int32_t max_tokens_per_step = 0;  // budget: the sum of query_len over the rows of a step
  std::int32_t max_model_len = 0;        // no sequence grows beyond this many tokens
  std::int32_t draft_len = 0;            // K: drafts proposed per round; 0..7
  bool has_drafter = false;              // the cache has draft layers, even where draft_len is 0
  bool overlap = true;                   // one step may be in flight while the next is planned
  bool enable_prefix_cache = true;
  // Pages that admission leaves free while anything runs, so that what runs can grow before it must preempt.
  std::int32_t watermark_pages = 1;
  // With more decode rows ready than this, none of them verifies drafts in that step.
  std::int32_t max_speculating_rows = INT32_MAX;

  void validate() const;

  // Steps planned and not yet completed, at most.
  [[nodiscard]] std::int32_t max_steps_in_flight() const { return overlap ? 2 : 1; }
  // A decode row planned at n touches no index above n + decode_reach(): the target writes n..n+K, the draft-extend
  // pass n+1..n+K+1, and K-1 single steps behind the last accepted token reach n+2K.
  [[nodiscard]] std::int32_t decode_reach() const;
  // Tokens beyond the known ones that admission makes room for: those that the first decode row touches and, with
  // overlap, those by which one more row planned before its result moves on.
  [[nodiscard]] std::int32_t look_ahead() const;
  // The longest sequence that could run alone: submit refuses more.
  [[nodiscard]] std::int64_t max_sequence_tokens() const;
};

struct RequestSpec {
  std::vector<TokenId> prompt;   // at least one token, all >= 0
  std::int32_t max_tokens = 16;  // tokens to generate at most, >= 1; cut where max_model_len is reached first
  std::int32_t priority = 0;     // lower goes first; ties by arrival
  std::string salt = {};         // prefixes are shared only under equal salts
  bool speculate = true;         // false: its drafts are not proposed, its draft entries are still written
  bool synchronous = false;      // never planned while it has a step in flight (its masks need the host)
};

// What one step produced, per sampling row (StepPlan::samples) in plan order. Only read during `complete`.
//
// `num_tokens[i]` of `tokens`, laid end to end, are row i's new tokens after the engine's cut: the accepted drafts and
// the target's own next token, or, where an accepted draft ends the request, the drafts up to and including it.
// `num_accepted[i]` counts the accepted drafts among them. So num_tokens = num_accepted + 1, or, with a finish reason,
// num_tokens = num_accepted; a context row has 1 and 0; an Error row may have 0 and 0. Rows whose sequence ended or was
// preempted meanwhile are still listed (their counts are skipped, nothing else is looked at).
struct StepResult {
  StepId step_id;
  std::span<const std::int32_t> num_tokens;
  std::span<const std::int32_t> num_accepted;
  std::span<const TokenId> tokens;
  std::span<const std::int32_t> finish;  // FinishReason; None to go on
};

// The one and only terminal event of a request.
struct Terminal {
  SeqId seq_id;
  FinishReason reason = FinishReason::None;
  std::int32_t num_prompt_tokens = 0;
  std::int32_t num_cached_tokens = 0;  // of the prompt, found in the prefix cache when it was first admitted
  std::int32_t num_generated_tokens = 0;
  std::int32_t num_preemptions = 0;
  std::int32_t num_rounds = 0;  // as in Rounds, on whatever route
  std::int32_t num_drafted_tokens = 0;
  std::int32_t num_accepted_tokens = 0;
  friend bool operator==(const Terminal&, const Terminal&) = default;
};

// What `complete` made of a result. The arrays have one element per sampling row, in plan order, and are valid until
// the next `complete` or `fail`.
struct StepEvents {
  StepId step_id;
  std::vector<std::int64_t> seq_id;
  std::vector<std::uint8_t> valid;         // 0: of a dropped epoch, ignored whole; the rest of its row is 0
  std::vector<std::int32_t> num_tokens;    // kept: the result's count, cut at the length limit
  std::vector<std::int32_t> num_accepted;  // drafts among the kept tokens
  std::vector<std::int32_t> num_drafts;    // drafts that the row verified; 0 for a context row
  std::vector<std::int32_t> finish;        // FinishReason; not None exactly where `terminals` has the sequence
  std::vector<Terminal> terminals;
};

// What became of drafts. A round is a decode row that verified drafts and whose result counted: not one of an epoch
// that had ended, nor one that the engine gave up. All drafts that it verified count as drafted. Accepted are those
// kept: where a request ends within a round, the ones up to and including the token that ends it.
class Rounds {
 public:
  using ByPlace = std::array<std::int64_t, kMaxDraftLen>;  // by place in the round, the first draft at 0

  void count(std::int32_t num_drafts, std::int32_t num_accepted) {
    ++num_rounds_;
    ++with_drafts_[static_cast<std::size_t>(num_drafts)];
    ++with_accepted_[static_cast<std::size_t>(num_accepted)];
  }

  [[nodiscard]] std::int64_t num_rounds() const { return num_rounds_; }
  [[nodiscard]] ByPlace num_drafted() const { return above(with_drafts_); }
  [[nodiscard]] ByPlace num_accepted() const { return above(with_accepted_); }
  friend bool operator==(const Rounds&, const Rounds&) = default;

 private:
  using BySize = std::array<std::int64_t, kMaxDraftLen + 1>;

  // A round of n has a draft at each place below n.
  static ByPlace above(const BySize& rounds) {
    ByPlace found{};
    std::int64_t longer = 0;
    for (std::size_t place = kMaxDraftLen; place > 0; --place) {
      longer += rounds[place];
      found[place - 1] = longer;
    }
    return found;
  }

  std::int64_t num_rounds_ = 0;
  BySize with_drafts_{};    // rounds by how many drafts they verified
  BySize with_accepted_{};  // rounds by how many they kept
};

// Counters are cumulative, the others are of now.
struct Stats {
  std::int64_t num_running = 0;
  std::int64_t num_waiting = 0;
  std::int64_t num_steps_in_flight = 0;
  std::int64_t num_pending_pages = 0;  // held by steps in flight alone

  std::int64_t num_submitted = 0;
  std::int64_t num_finished[kNumFinishReasons] = {};  // by FinishReason
  std::int64_t num_preemptions = 0;
  std::int64_t num_planned_steps = 0;
  std::int64_t num_completed_steps = 0;
  std::int64_t num_failed_steps = 0;
  std::int64_t num_context_rows = 0;  // planned
  std::int64_t num_decode_rows = 0;   // planned
  std::int64_t num_context_tokens = 0;
  std::int64_t num_decode_tokens = 0;  // verified drafts included
  std::int64_t num_dropped_rows = 0;   // completed for an epoch that had ended
  std::int64_t num_prompt_tokens = 0;  // of admitted requests, counted once
  std::int64_t num_cached_tokens = 0;  // of those, found in the prefix cache
  std::int64_t num_generated_tokens = 0;
  // Rounds by what their sequences began with at their present admission: nothing cached, or pages of the prefix tree.
  // A preempted sequence that finds its own pages again is a prefix hit: its drafts depend on what the tree gave back.
  Rounds cold_rounds;
  Rounds prefix_hit_rounds;

  [[nodiscard]] std::int64_t num_rounds() const { return cold_rounds.num_rounds() + prefix_hit_rounds.num_rounds(); }
  [[nodiscard]] std::int64_t num_drafted_tokens() const {
    return sum(cold_rounds.num_drafted()) + sum(prefix_hit_rounds.num_drafted());
  }
  [[nodiscard]] std::int64_t num_accepted_tokens() const {
    return sum(cold_rounds.num_accepted()) + sum(prefix_hit_rounds.num_accepted());
  }

 private:
  static std::int64_t sum(const std::array<std::int64_t, kMaxDraftLen>& counts) {
    return std::reduce(counts.begin(), counts.end());
  }
};

}  // namespace tandem::sched
