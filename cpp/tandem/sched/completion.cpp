#include <algorithm>
#include <string>

#include "tandem/base/check.h"
#include "tandem/sched/scheduler.h"

namespace tandem::sched {
namespace {

bool is_reason(std::int32_t code) { return code >= 0 && code < static_cast<std::int32_t>(kNumFinishReasons); }

bool is_possible(const StepResult& result, std::size_t sample, std::int32_t num_drafts) {
  const std::int32_t tokens = result.num_tokens[sample];
  const std::int32_t accepted = result.num_accepted[sample];
  const std::int32_t finish = result.finish[sample];
  const bool ends = finish != static_cast<std::int32_t>(FinishReason::None);
  return accepted >= 0 && accepted <= num_drafts && is_reason(finish) &&
         (tokens == accepted + 1 || (ends && tokens == accepted));
}

[[noreturn]] void refuse(StepId step_id, std::size_t sample, const std::string& what) {
  throw InvalidArgument("complete: step " + std::to_string(step_id.value()) + ", sampling row " +
                        std::to_string(sample) + ": " + what);
}

}  // namespace

void Scheduler::require_oldest(StepId step_id, const char* call) const {
  if (num_steps_in_flight() == 0) {
    throw InvalidArgument(std::string(call) + ": step " + std::to_string(step_id.value()) +
                          " is not in flight, no step is");
  }
  if (step_id != oldest_step_) {
    throw InvalidArgument(std::string(call) + ": got step " + std::to_string(step_id.value()) + ", step " +
                          std::to_string(oldest_step_.value()) + " is next");
  }
}

// Everything is looked at before anything is changed, so that a refused result leaves the step in flight.
void Scheduler::require_possible(const StepPlan& plan, const StepResult& result) const {
  const auto num_samples = static_cast<std::size_t>(plan.num_sampling_rows());
  if (result.num_tokens.size() != num_samples || result.num_accepted.size() != num_samples ||
      result.finish.size() != num_samples) {
    throw InvalidArgument("complete: step " + std::to_string(plan.step_id().value()) + " has " +
                          std::to_string(num_samples) + " sampling rows, got " +
                          std::to_string(result.num_tokens.size()) + " num_tokens, " +
                          std::to_string(result.num_accepted.size()) + " num_accepted and " +
                          std::to_string(result.finish.size()) + " finish");
  }
  // All rows at once first, without a look at their sequences: the usual case.
  bool possible = std::ranges::none_of(result.tokens, [](TokenId id) { return id < 0; });
  std::int64_t num_tokens = 0;
  for (std::size_t row = 0, sample = 0; row < plan.sequences_.size(); ++row) {
    if (plan.samples_[row] != 0) {
      possible &= is_possible(result, sample, plan.num_drafts_[row]);
      num_tokens += result.num_tokens[sample];
      ++sample;
    }
  }
  if (!possible) {
    explain_impossible(plan, result);
  }
  if (static_cast<std::int64_t>(result.tokens.size()) != num_tokens) {
    throw InvalidArgument("complete: step " + std::to_string(plan.step_id().value()) + ": num_tokens add up to " +
                          std::to_string(num_tokens) + ", got " + std::to_string(result.tokens.size()) + " tokens");
  }
}

// Throws for the first row that is wrong. Rows of dropped epochs may say what they like, as long as their tokens can be
// skipped.
void Scheduler::explain_impossible(const StepPlan& plan, const StepResult& result) const {
  std::size_t token = 0;
  for (std::size_t row = 0, sample = 0; row < plan.sequences_.size(); ++row) {
    if (plan.samples_[row] == 0) {
      continue;
    }
    const std::int32_t num_drafts = plan.num_drafts_[row];
    const std::int32_t tokens = result.num_tokens[sample];
    const std::int32_t accepted = result.num_accepted[sample];
    const std::int32_t finish = result.finish[sample];
    if (tokens < 0 || tokens > 1 + num_drafts) {
      refuse(plan.step_id(), sample,
             "num_tokens is " + std::to_string(tokens) + ", must be 0 to " + std::to_string(1 + num_drafts));
    }
    if (plan.sequences_[row]->epoch == plan.epoch_[row]) {
      if (!is_reason(finish)) {
        refuse(plan.step_id(), sample, "finish is " + std::to_string(finish) + ", which is no reason's code");
      }
      if (!is_possible(result, sample, num_drafts)) {
        refuse(plan.step_id(), sample,
               "num_tokens is " + std::to_string(tokens) + " and num_accepted " + std::to_string(accepted) + " of " +
                   std::to_string(num_drafts) +
                   " drafts; num_tokens must be num_accepted + 1, or num_accepted where the request ends");
      }
      for (std::int32_t i = 0; i < tokens; ++i) {
        if (const std::size_t at = token + static_cast<std::size_t>(i);
            at < result.tokens.size() && result.tokens[at] < 0) {
          refuse(plan.step_id(), sample,
                 "token " + std::to_string(i) + " is " + std::to_string(result.tokens[at]) + ", must be at least 0");
        }
      }
    }
    token += static_cast<std::size_t>(tokens);
    ++sample;
  }
}

void Scheduler::begin_events(StepId step_id, std::size_t num_rows) {
  events_.step_id = step_id;
  events_.seq_id.resize(num_rows);
  events_.valid.resize(num_rows);
  events_.num_tokens.resize(num_rows);
  events_.num_accepted.resize(num_rows);
  events_.num_drafts.resize(num_rows);
  events_.finish.resize(num_rows);
  events_.terminals.clear();
}

const StepEvents& Scheduler::complete(const StepResult& result) {
  require_thread();
  require_oldest(result.step_id, "complete");
  StepPlan& plan = step(result.step_id);
  require_possible(plan, result);
  begin_events(result.step_id, static_cast<std::size_t>(plan.num_sampling_rows()));
  std::size_t sample = 0;
  std::size_t token = 0;
  for (std::size_t row = 0; row < plan.sequences_.size(); ++row) {
    // First the record, some rows later the end of its tokens, which the record points to.
    if (row + kPrefetchRows < plan.sequences_.size()) {
      plan.sequences_[row + kPrefetchRows]->prefetch();
      const Sequence& sooner = *plan.sequences_[row + kPrefetchRows / 2];
      __builtin_prefetch(sooner.tokens.data() + sooner.tokens.size(), /*write=*/1);
    }
    if (plan.samples_[row] == 0) {
      complete_row(plan, row);
      continue;
    }
    const auto num_tokens = static_cast<std::size_t>(result.num_tokens[sample]);
    complete_sampling_row(plan, row, result, sample, result.tokens.subspan(token, num_tokens));
    token += num_tokens;
    ++sample;
  }
  finish_step(plan);
  ++counters_.num_completed_steps;
  return events_;
}

// A chunk before the last one: its entries are there now, and full pages of them may be shared.
void Scheduler::complete_row(const StepPlan& plan, std::size_t row) {
  Sequence& sequence = *plan.sequences_[row];
  if (sequence.epoch != plan.epoch_[row]) {
    ++counters_.num_dropped_rows;
    return;
  }
  --sequence.num_rows_in_flight;
  sequence.pages.set_computed(plan.first_index_[row] + plan.query_len_[row]);
  sequence.pages.commit(sequence.tokens);
}

void Scheduler::complete_sampling_row(const StepPlan& plan, std::size_t row, const StepResult& result,
                                      std::size_t sample, std::span<const TokenId> tokens) {
  Sequence& sequence = *plan.sequences_[row];
  const bool valid = sequence.epoch == plan.epoch_[row];
  events_.seq_id[sample] = plan.seq_id_[row];
  events_.valid[sample] = valid ? 1 : 0;
  if (!valid) {
    ++counters_.num_dropped_rows;
    events_.num_tokens[sample] = 0;
    events_.num_accepted[sample] = 0;
    events_.num_drafts[sample] = 0;
    events_.finish[sample] = 0;
    return;
  }
  --sequence.num_rows_in_flight;
  --sequence.num_samples_in_flight;

  const std::int32_t num_drafts = plan.num_drafts_[row];
  const std::int32_t room = sequence.max_length - sequence.num_known();
  const auto num_tokens = static_cast<std::int32_t>(tokens.size());
  const std::int32_t num_kept = std::min(num_tokens, room);
  const std::int32_t num_accepted = std::min(result.num_accepted[sample], num_kept);
  auto reason = static_cast<FinishReason>(result.finish[sample]);
  const bool gave_up = reason == FinishReason::Error;
  if (!gave_up && (num_tokens > room || (num_tokens == room && reason == FinishReason::None))) {
    reason = FinishReason::Length;
  }
  for (const TokenId token : tokens.first(static_cast<std::size_t>(num_kept))) {
    sequence.tokens.push_back(token);
  }
  // A row that the engine gave up may have written anything: none of it is shared.
  if (!gave_up) {
    const bool is_context = plan.kind_[row] == static_cast<std::int32_t>(RowKind::Context);
    const std::int64_t num_valid =
        is_context ? plan.first_index_[row] + plan.query_len_[row] : sequence.pages.computed() + 1 + num_accepted;
    sequence.pages.set_computed(num_valid);
    sequence.pages.commit(sequence.tokens);
    if (!is_context) {
      sequence.planned_len += num_kept - (1 + num_drafts);
    }
  }

  events_.num_tokens[sample] = num_kept;
  events_.num_accepted[sample] = num_accepted;
  events_.num_drafts[sample] = num_drafts;
  events_.finish[sample] = static_cast<std::int32_t>(reason);
  counters_.num_generated_tokens += num_kept;
  if (num_drafts > 0 && !gave_up) {
    (sequence.hit_len > 0 ? counters_.prefix_hit_rounds : counters_.cold_rounds).count(num_drafts, num_accepted);
    ++sequence.num_rounds;
    sequence.num_drafted_tokens += num_drafts;
    sequence.num_accepted_tokens += num_accepted;
  }
  if (reason != FinishReason::None) {
    events_.terminals.push_back(end(sequence, reason));
  }
}

const StepEvents& Scheduler::fail(StepId step_id) {
  require_thread();
  require_oldest(step_id, "fail");
  StepPlan& plan = step(step_id);
  begin_events(step_id, 0);
  for (std::size_t row = 0; row < plan.sequences_.size(); ++row) {
    Sequence& sequence = *plan.sequences_[row];
    if (sequence.epoch == plan.epoch_[row]) {
      events_.terminals.push_back(end(sequence, FinishReason::Error));
    } else {
      ++counters_.num_dropped_rows;
    }
  }
  finish_step(plan);
  ++counters_.num_failed_steps;
  return events_;
}

void Scheduler::finish_step(StepPlan& plan) {
  Remains& remains = plan.remains_;
  // From the last page to the first: the order that the tree follows most cheaply.
  while (!remains.pages.empty()) {
    remains.pages.pop_back();
    ++num_releases_;
  }
  free_seats_.insert(free_seats_.end(), remains.seats.begin(), remains.seats.end());
  num_releases_ += remains.seats.size();
  remains.seats.clear();
  remains.sequences.clear();
  oldest_step_ = StepId{oldest_step_.value() + 1};
}

}  // namespace tandem::sched
