#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <thread>
#include <unordered_map>
#include <vector>

#include "tandem/kv/page_pool.h"
#include "tandem/kv/prefix_tree.h"
#include "tandem/sched/sequence.h"
#include "tandem/sched/step_plan.h"
#include "tandem/sched/types.h"

namespace tandem::sched {

// Decides what runs in each step. Plan out, events in: it knows tokens, budgets and pages, calls nobody and never
// blocks. One loop drives it:
//
//   submit(...)                        at any time between calls
//   plan = plan()                      nothing: no row can run now; complete a step in flight, or there is no work
//   ... the engine launches the step; with overlap it plans the next one before this one's result is there ...
//   events = complete(result)          or fail(step_id) if the step raised; in step order
//
// *Order* is (priority, first arrival), kept across preemption. The first waiting request is admitted, and none before
// it, when a seat is free and the pages of its known tokens and look_ahead(), less those found in the prefix cache
// (pinned first), and watermark_pages fit into the free and evictable ones; with nothing running the watermark is
// waived. All these pages are taken at once, so a prompt that has begun is never short of them.
//
// *Budget.* Decode rows come first, then the prompts that have begun, in order, then admissions. When the budget cannot
// hold all decode rows they take turns. While a prompt waits for budget, the oldest gets a page of tokens at least
// every kPrefillPeriod steps.
//
// *Preemption.* A decode row that needs a page when none is free or evictable waits if steps in flight will give enough
// back; otherwise the last running sequence in the order is preempted, never one ahead of the row's own, never one that
// is in this plan already. It goes back to waiting with all its tokens; its full pages stay in the prefix cache.
//
// *Lifetimes.* A plan is valid until its own complete or fail. Pages and seats that a step in flight names come back
// when the last such step completes, whatever happened to their sequences. Everything a completed step wrote below the
// last valid token and on full pages enters the prefix cache then, not before.
//
// *Ends.* Each accepted request gets exactly one Terminal: in the events of complete or fail, or from abort.
//
// *Errors.* InvalidArgument for a caller's mistake, and then nothing has changed. Every call comes from one thread: the
// first that calls, or the one that called `bind_thread`.
class Scheduler {
 public:
  static constexpr std::int32_t kPrefillPeriod = 8;

  explicit Scheduler(const SchedulerConfig& config);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Accepts a request and returns its id: 0, 1, 2, ... in order of arrival. Throws InvalidArgument for an empty prompt,
  // a negative token id, max_tokens < 1, and for what could never run alone: a prompt that leaves no room below
  // max_model_len, or more pages than the pool has.
  SeqId submit(RequestSpec spec);

  // Ends a request now and returns its Terminal, or nothing if it has ended already. Throws for an id never given out.
  std::optional<Terminal> abort(SeqId seq_id);

  // The next step, or nullptr if no row can run. Never nullptr while a request is unfinished, no step is in flight and
  // no page is leased. Throws if max_steps_in_flight are in flight.
  const StepPlan* plan();

  // Takes the result of the oldest step in flight. Throws if it is another step's, or for counts that the step cannot
  // have produced.
  const StepEvents& complete(const StepResult& result);

  // The oldest step in flight raised: its sequences end with Error, unless their epoch has ended. Throws if it is
  // another step.
  const StepEvents& fail(StepId step_id);

  // Known tokens of an unfinished request: prompt, then generated. Valid until the next call. Throws if unknown.
  [[nodiscard]] std::span<const TokenId> known_tokens(SeqId seq_id) const;
  // Prompt tokens found in the prefix cache when the request was first admitted. Throws if unknown.
  [[nodiscard]] std::int32_t num_cached(SeqId seq_id) const;

  // Requests accepted and not ended.
  [[nodiscard]] std::int64_t num_unfinished() const;
  [[nodiscard]] std::int32_t num_steps_in_flight() const;
  // Whether `step_id` was planned and has neither completed nor failed: whether its plan is valid. From any thread that
  // excludes the engine's.
  [[nodiscard]] bool is_in_flight(StepId step_id) const { return step_id >= oldest_step_ && step_id < next_step_; }
  [[nodiscard]] Stats stats() const;
  // State of every page. O(num_slots): for tests and metrics.
  [[nodiscard]] kv::Ledger ledger() const;
  [[nodiscard]] const SchedulerConfig& config() const { return config_; }

  // Forgets every cached prefix. What sequences running now have computed is never matched afterwards.
  void reset_prefix_cache();

  // Makes the calling thread the only one that may call from now on.
  void bind_thread();

  // Aborts unless the lists, counters, seats and pages agree with each other. O(num_slots + requests): for tests.
  void check() const;

 private:
  void require_thread() const;
  [[nodiscard]] const Sequence& find(SeqId seq_id) const;

  [[nodiscard]] StepPlan& step(StepId step_id) {
    return *ring_[static_cast<std::size_t>(step_id.value()) % ring_.size()];
  }
  [[nodiscard]] std::int64_t pages_of(std::int64_t num_tokens) const {
    return (num_tokens + config_.tokens_per_page - 1) / config_.tokens_per_page;
  }
  [[nodiscard]] std::int64_t num_available() const {
    return pool_.num_free() + (tree_ == nullptr ? 0 : tree_->num_evictable());
  }

  // Planning.
  std::int32_t plan_decode(StepPlan& plan, std::int32_t budget);
  std::int32_t plan_prefill(StepPlan& plan, std::int32_t budget, bool only_oldest);
  std::int32_t add_context_row(StepPlan& plan, Sequence& sequence, std::int32_t budget);
  void add_decode_row(StepPlan& plan, Sequence& sequence, std::int32_t num_drafts);
  void mark_planned(const StepPlan& plan, Sequence& sequence, bool samples);
  [[nodiscard]] std::int32_t num_drafts_of(const Sequence& sequence, bool speculating) const {
    return speculating && sequence.has_drafts ? config_.draft_len : 0;
  }
  [[nodiscard]] bool can_decode(const StepPlan& plan, const Sequence& sequence) const;
  [[nodiscard]] bool can_prefill(const StepPlan& plan, const Sequence& sequence) const;
  // Pages for the row: made; later, when steps complete or as the first of the next plan; none, before others end.
  enum class Room : std::uint8_t { Made, Later, None };
  Room make_room(const StepPlan& plan, Sequence& sequence);
  void preempt(Sequence& sequence);
  Sequence* admit(const StepPlan& plan);

  // Completion.
  void require_oldest(StepId step_id, const char* call) const;
  void require_possible(const StepPlan& plan, const StepResult& result) const;
  void explain_impossible(const StepPlan& plan, const StepResult& result) const;
  void begin_events(StepId step_id, std::size_t num_rows);
  void complete_row(const StepPlan& plan, std::size_t row);
  void complete_sampling_row(const StepPlan& plan, std::size_t row, const StepResult& result, std::size_t sample,
                             std::span<const TokenId> tokens);
  void finish_step(StepPlan& plan);

  // Takes the seat and the pages from a running sequence; its next life has another epoch.
  void vacate(Sequence& sequence);
  Terminal end(Sequence& sequence, FinishReason reason);

  SchedulerConfig config_;
  mutable std::thread::id thread_;

  kv::PagePool pool_;
  std::unique_ptr<kv::PrefixTree> tree_;  // none without a prefix cache
  std::vector<std::unique_ptr<StepPlan>> ring_;
  StepId oldest_step_{0};
  StepId next_step_{0};

  std::unordered_map<SeqId, std::unique_ptr<Sequence>> sequences_;  // unfinished
  std::map<OrderKey, Sequence*> waiting_;
  std::vector<Sequence*> running_;  // in order
  std::vector<SeatId> free_seats_;
  std::int64_t next_seq_id_ = 0;
  std::int64_t num_context_ = 0;  // running ones in Phase::Context

  // Of the plan being made.
  std::vector<Sequence*> ready_;  // decode rows, in order
  bool short_of_pages_ = false;   // a decode row had to wait or to preempt: nobody is admitted after it
  bool prefill_served_ = false;   // a prompt got a page of tokens or its last chunk
  // From plan to plan.
  OrderKey next_turn_;            // where the decode rows that take turns go on
  std::int32_t prefill_gap_ = 0;  // steps in a row in which a prompt waited and none was served
  // The first waiting request did not fit: it is tried again when pages came back or some steps have passed, because
  // looking a long prompt up in the prefix cache costs.
  SeqId blocked_;
  StepId retry_at_;
  std::uint64_t num_releases_ = 0;
  std::uint64_t releases_when_blocked_ = 0;

  StepEvents events_;
  Stats counters_;
};

}  // namespace tandem::sched
