#include <algorithm>
#include <string>

#include "tandem/base/check.h"
#include "tandem/sched/scheduler.h"

namespace tandem::sched {
namespace {

// Plans for which a request that did not fit is not looked up again while no page has come back.
constexpr std::int64_t kRetryPeriod = 8;

}  // namespace

const StepPlan* Scheduler::plan() {
  require_thread();
  if (num_steps_in_flight() == config_.max_steps_in_flight()) {
    throw InvalidArgument("plan: " + std::to_string(num_steps_in_flight()) + " steps are in flight, at most " +
                          std::to_string(config_.max_steps_in_flight()) + " may be with overlap " +
                          (config_.overlap ? "on" : "off") + "; step " + std::to_string(oldest_step_.value()) +
                          " must complete first");
  }
  StepPlan& plan = step(next_step_);
  plan.begin(next_step_);
  prefill_served_ = false;

  const bool prefill_waits = num_context_ > 0 || !waiting_.empty();
  std::int32_t budget = config_.max_tokens_per_step;
  if (prefill_waits && prefill_gap_ >= kPrefillPeriod - 1) {
    budget -= plan_prefill(plan, std::min(config_.tokens_per_page, budget), /*only_oldest=*/true);
  }
  // Until the decode rows have been looked at, the pages that one of them waits for are no new request's.
  if (budget > 0) {
    short_of_pages_ = false;
  }
  budget -= plan_decode(plan, budget);
  plan_prefill(plan, budget, /*only_oldest=*/false);
  if (plan.num_rows() == 0) {
    return nullptr;
  }

  prefill_gap_ = prefill_waits && !prefill_served_ ? prefill_gap_ + 1 : 0;
  if (config_.draft_len > 0 && plan.num_sampling_rows() <= config_.max_speculating_rows) {
    for (std::size_t row = 0; row < plan.sequences_.size(); ++row) {
      Sequence& sequence = *plan.sequences_[row];
      sequence.has_drafts = plan.samples_[row] != 0 && sequence.speculate;
      plan.proposes_[row] = sequence.has_drafts ? 1 : 0;
    }
  }
  ++counters_.num_planned_steps;
  next_step_ = StepId{next_step_.value() + 1};
  return &plan;
}

bool Scheduler::can_decode(const StepPlan& plan, const Sequence& sequence) const {
  // Each sampling row in flight brings at least one token: where those reach the limit, another row would be for
  // nothing.
  return sequence.phase == Phase::Decode && sequence.last_step != plan.step_id() &&
         sequence.num_known() + sequence.num_samples_in_flight < sequence.max_length &&
         (!sequence.synchronous || sequence.num_rows_in_flight == 0);
}

bool Scheduler::can_prefill(const StepPlan& plan, const Sequence& sequence) const {
  return sequence.phase == Phase::Context && sequence.last_step != plan.step_id() &&
         (!sequence.synchronous || sequence.num_rows_in_flight == 0);
}

void Scheduler::mark_planned(const StepPlan& plan, Sequence& sequence, bool samples) {
  sequence.last_step = plan.step_id();
  ++sequence.num_rows_in_flight;
  sequence.num_samples_in_flight += samples ? 1 : 0;
  sequence.has_drafts = false;  // until the step turns out to propose some
  sequence.fresh = false;
}

// Rows in order, or, where the budget cannot hold all, from `next_turn_` on and around the end of the order; the next
// plan goes on with the first that got none.
std::int32_t Scheduler::plan_decode(StepPlan& plan, std::int32_t budget) {
  ready_.clear();
  for (std::size_t i = 0; i < running_.size(); ++i) {
    if (i + kPrefetchRows < running_.size()) {
      running_[i + kPrefetchRows]->prefetch();
    }
    if (can_decode(plan, *running_[i])) {
      ready_.push_back(running_[i]);
    }
  }
  const auto num_ready = static_cast<std::int64_t>(ready_.size());
  const bool speculating = num_ready <= config_.max_speculating_rows;
  const bool take_turns = num_ready * (1 + config_.draft_len) > budget;
  std::int64_t start = 0;
  if (take_turns) {
    const auto first = std::ranges::lower_bound(ready_, next_turn_, {}, [](const Sequence* each) { return each->key; });
    start = first == ready_.end() ? 0 : first - ready_.begin();
  }
  const Sequence* next = nullptr;
  std::int32_t used = 0;
  for (std::int64_t i = 0; i < num_ready; ++i) {
    Sequence& sequence = *ready_[static_cast<std::size_t>(start + i < num_ready ? start + i : start + i - num_ready)];
    if (sequence.phase != Phase::Decode) {
      continue;  // preempted for one before it
    }
    const std::int32_t num_drafts = num_drafts_of(sequence, speculating);
    if (used + 1 + num_drafts > budget) {
      next = next == nullptr ? &sequence : next;
      break;
    }
    switch (make_room(plan, sequence)) {
      case Room::Made:
        add_decode_row(plan, sequence, num_drafts);
        used += 1 + num_drafts;
        break;
      case Room::Later:
        next = next == nullptr ? &sequence : next;
        short_of_pages_ = true;
        break;
      case Room::None:
        short_of_pages_ = true;
        break;
    }
  }
  if (take_turns && next != nullptr) {
    next_turn_ = next->key;
  }
  return used;
}

Scheduler::Room Scheduler::make_room(const StepPlan& plan, Sequence& sequence) {
  const std::int64_t num_tokens = std::min(sequence.planned_len + config_.decode_reach() + 1, sequence.max_length);
  while (!sequence.pages.grow(num_tokens)) {
    const std::int64_t num_missing = sequence.pages.pages_to_grow(num_tokens) - num_available();
    if (num_missing <= pool_.num_pending()) {
      return Room::Later;
    }
    Sequence& last = *running_.back();
    if (&last == &sequence) {
      return Room::None;
    }
    if (last.last_step == plan.step_id()) {
      return Room::Later;
    }
    preempt(last);
  }
  return Room::Made;
}

void Scheduler::preempt(Sequence& sequence) {
  vacate(sequence);
  sequence.phase = Phase::Waiting;
  waiting_.emplace(sequence.key, &sequence);
  ++sequence.num_preemptions;
  ++counters_.num_preemptions;
  short_of_pages_ = true;
}

void Scheduler::add_decode_row(StepPlan& plan, Sequence& sequence, std::int32_t num_drafts) {
  const std::int32_t query_len = 1 + num_drafts;
  plan.add_table_changes(sequence);
  plan.add_row(sequence, RowKind::Decode, std::min(sequence.planned_len, sequence.max_length), query_len,
               static_cast<std::int32_t>(sequence.pages.computed()), num_drafts, /*samples=*/true);
  mark_planned(plan, sequence, /*samples=*/true);
  sequence.planned_len += query_len;
  ++counters_.num_decode_rows;
  counters_.num_decode_tokens += query_len;
}

std::int32_t Scheduler::plan_prefill(StepPlan& plan, std::int32_t budget, bool only_oldest) {
  std::int32_t used = 0;
  if (num_context_ > 0) {
    for (Sequence* each : running_) {
      if (used == budget) {
        return used;
      }
      if (can_prefill(plan, *each)) {
        used += add_context_row(plan, *each, budget - used);
        if (only_oldest) {
          return used;
        }
      }
    }
  }
  while (used < budget) {
    Sequence* const admitted = admit(plan);
    if (admitted == nullptr) {
      break;
    }
    used += add_context_row(plan, *admitted, budget - used);
    if (only_oldest) {
      break;
    }
  }
  return used;
}

std::int32_t Scheduler::add_context_row(StepPlan& plan, Sequence& sequence, std::int32_t budget) {
  const std::int32_t first = sequence.planned_len;
  const std::int32_t query_len = std::min(budget, sequence.prefill_len - first);
  const bool last = first + query_len == sequence.prefill_len;
  plan.add_token_ids(
      std::span<const TokenId>(sequence.tokens)
          .subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(query_len + (last ? 0 : 1))),
      /*last_from_device=*/last);
  plan.add_table_changes(sequence);
  plan.add_row(sequence, RowKind::Context, first, query_len, std::max(first, sequence.hit_len), /*num_drafts=*/0, last);
  mark_planned(plan, sequence, last);
  sequence.planned_len += query_len;
  if (last) {
    sequence.phase = Phase::Decode;
    --num_context_;
  }
  prefill_served_ |= last || query_len >= config_.tokens_per_page;
  ++counters_.num_context_rows;
  counters_.num_context_tokens += query_len;
  return query_len;
}

Sequence* Scheduler::admit(const StepPlan& plan) {
  if (waiting_.empty() || free_seats_.empty() || short_of_pages_) {
    return nullptr;
  }
  Sequence& head = *waiting_.begin()->second;
  const bool alone = running_.empty();
  if (!alone && head.key.seq_id == blocked_ && num_releases_ == releases_when_blocked_ && next_step_ < retry_at_) {
    return nullptr;
  }
  const std::int64_t num_tokens = std::min(head.num_known() + config_.look_ahead(), head.max_length);
  if (pages_of(num_tokens) > plan.table_changes_left()) {
    return nullptr;
  }
  const auto fits = [&](std::int64_t num_hit_tokens) {
    return pages_of(num_tokens) - pages_of(num_hit_tokens) + (alone ? 0 : config_.watermark_pages) <= num_available();
  };
  // Pinning the hit may take evictable pages away, so it is looked at from both sides of it.
  std::int64_t num_hit_tokens = head.pages.probe_prefix(head.tokens);
  bool admitted = fits(num_hit_tokens);
  if (admitted) {
    num_hit_tokens = head.pages.attach_prefix(head.tokens);
    admitted = fits(num_hit_tokens);
    if (!admitted) {
      head.pages.release();
    }
  }
  if (!admitted) {
    blocked_ = head.key.seq_id;
    releases_when_blocked_ = num_releases_;
    retry_at_ = StepId{next_step_.value() + kRetryPeriod};
    return nullptr;
  }

  head.tokens.reserve(static_cast<std::size_t>(head.max_length));
  head.pages.reserve(pages_of(head.max_length));
  const bool grown = head.pages.grow(num_tokens);
  TANDEM_CHECK(grown, "a request was admitted without the pages it needs");
  waiting_.erase(waiting_.begin());
  running_.insert(std::ranges::lower_bound(running_, head.key, {}, [](const Sequence* each) { return each->key; }),
                  &head);
  ++num_context_;
  head.phase = Phase::Context;
  head.seat = free_seats_.back();
  free_seats_.pop_back();
  head.prefill_len = head.num_known();
  head.hit_len = static_cast<std::int32_t>(num_hit_tokens);
  // The token before the first one without entries runs again: its hidden state is what the drafter's entry at hit_len
  // and, where everything was hit, the first sampled token come from.
  head.planned_len = std::max(head.hit_len - 1, 0);
  head.num_listed_pages = 0;
  head.fresh = true;
  if (!head.admitted_before) {
    head.admitted_before = true;
    head.num_cached_tokens = head.hit_len;
    counters_.num_prompt_tokens += head.num_prompt_tokens;
    counters_.num_cached_tokens += head.hit_len;
  }
  return &head;
}

}  // namespace tandem::sched
