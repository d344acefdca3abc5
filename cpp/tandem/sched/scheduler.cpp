#include "tandem/sched/scheduler.h"

#include <algorithm>
#include <string>
#include <utility>

#include "tandem/base/check.h"

namespace tandem::sched {

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_((config.validate(), config)),
      pool_(config.num_slots),
      tree_(config.enable_prefix_cache ? std::make_unique<kv::PrefixTree>(pool_, config.tokens_per_page) : nullptr) {
  // Rows that grow list at most all slots in a step; an admission, which may list shared ones, only begins where its
  // whole table still fits.
  const std::int64_t max_pages = pages_of(config.max_model_len);
  const StepPlan::Limits limits{
      .max_rows = config.max_seats,
      .max_token_ids = config.max_tokens_per_step + config.max_seats,
      .max_table_changes = static_cast<std::int32_t>(config.num_slots + max_pages),
  };
  for (std::int32_t i = 0; i < config.max_steps_in_flight() + 1; ++i) {
    ring_.push_back(std::make_unique<StepPlan>(limits));
  }
  const auto max_seats = static_cast<std::size_t>(config.max_seats);
  for (std::int32_t seat = config.max_seats - 1; seat >= 0; --seat) {
    free_seats_.emplace_back(seat);
  }
  running_.reserve(max_seats);
  ready_.reserve(max_seats);
  events_.seq_id.reserve(max_seats);
  events_.valid.reserve(max_seats);
  for (std::vector<std::int32_t>* column :
       {&events_.num_tokens, &events_.num_accepted, &events_.num_drafts, &events_.finish}) {
    column->reserve(max_seats);
  }
  events_.terminals.reserve(max_seats);
}

Scheduler::~Scheduler() = default;

void Scheduler::require_thread() const {
  const std::thread::id caller = std::this_thread::get_id();
  if (thread_ == std::thread::id()) {
    thread_ = caller;
  }
  if (thread_ != caller) {
    throw InvalidArgument(
        "Scheduler: called from another thread than the engine's; one thread makes all calls (bind_thread changes it)");
  }
}

void Scheduler::bind_thread() { thread_ = std::this_thread::get_id(); }

SeqId Scheduler::submit(RequestSpec spec) {
  require_thread();
  if (spec.prompt.empty()) {
    throw InvalidArgument("submit: the prompt has no tokens, needs at least 1");
  }
  if (const auto bad = std::ranges::find_if(spec.prompt, [](TokenId id) { return id < 0; }); bad != spec.prompt.end()) {
    throw InvalidArgument("submit: token " + std::to_string(bad - spec.prompt.begin()) + " of the prompt is " +
                          std::to_string(*bad) + ", must be at least 0");
  }
  if (spec.max_tokens < 1) {
    throw InvalidArgument("submit: max_tokens is " + std::to_string(spec.max_tokens) + ", must be at least 1");
  }
  const auto num_prompt = static_cast<std::int64_t>(spec.prompt.size());
  if (num_prompt >= config_.max_model_len) {
    throw InvalidArgument("submit: the prompt has " + std::to_string(num_prompt) +
                          " tokens, at most max_model_len - 1 = " + std::to_string(config_.max_model_len - 1) +
                          " leave room for one more");
  }
  const std::int64_t limit = std::min<std::int64_t>(num_prompt + spec.max_tokens, config_.max_model_len);
  if (pages_of(limit) > config_.num_slots) {
    throw InvalidArgument("submit: prompt and generated tokens, " + std::to_string(limit) + " together, need " +
                          std::to_string(pages_of(limit)) + " pages, the pool has " +
                          std::to_string(config_.num_slots));
  }
  const SeqId seq_id{next_seq_id_++};
  auto sequence = std::make_unique<Sequence>(std::move(spec), seq_id, static_cast<std::int32_t>(limit), pool_,
                                             tree_.get(), config_.tokens_per_page);
  waiting_.emplace(sequence->key, sequence.get());
  sequences_.emplace(seq_id, std::move(sequence));
  ++counters_.num_submitted;
  return seq_id;
}

std::optional<Terminal> Scheduler::abort(SeqId seq_id) {
  require_thread();
  if (seq_id.value() < 0 || seq_id.value() >= next_seq_id_) {
    throw InvalidArgument("abort: no request has id " + std::to_string(seq_id.value()) + ", ids below " +
                          std::to_string(next_seq_id_) + " have been given out");
  }
  const auto it = sequences_.find(seq_id);
  if (it == sequences_.end()) {
    return std::nullopt;
  }
  return end(*it->second, FinishReason::Abort);
}

void Scheduler::vacate(Sequence& sequence) {
  TANDEM_CHECK(sequence.phase == Phase::Context || sequence.phase == Phase::Decode, "only who has a seat can leave it");
  const auto at = std::ranges::lower_bound(running_, sequence.key, {}, [](const Sequence* each) { return each->key; });
  TANDEM_CHECK(at != running_.end() && *at == &sequence, "a sequence with a seat is not among the running ones");
  running_.erase(at);
  num_context_ -= sequence.phase == Phase::Context ? 1 : 0;
  sequence.pages.enter_all(sequence.tokens);
  if (is_in_flight(sequence.last_step)) {
    Remains& remains = step(sequence.last_step).remains_;
    sequence.pages.release_to_step(remains.pages);
    remains.seats.push_back(sequence.seat);
  } else {
    sequence.pages.release();
    free_seats_.push_back(sequence.seat);
  }
  ++num_releases_;
  ++sequence.epoch;
  sequence.seat = SeatId{};
  sequence.num_rows_in_flight = 0;
  sequence.num_samples_in_flight = 0;
  sequence.has_drafts = false;
}

Terminal Scheduler::end(Sequence& sequence, FinishReason reason) {
  const Terminal terminal{
      .seq_id = sequence.key.seq_id,
      .reason = reason,
      .num_prompt_tokens = sequence.num_prompt_tokens,
      .num_cached_tokens = sequence.num_cached_tokens,
      .num_generated_tokens = sequence.num_known() - sequence.num_prompt_tokens,
      .num_preemptions = sequence.num_preemptions,
      .num_rounds = sequence.num_rounds,
      .num_drafted_tokens = sequence.num_drafted_tokens,
      .num_accepted_tokens = sequence.num_accepted_tokens,
  };
  if (sequence.phase == Phase::Waiting) {
    waiting_.erase(sequence.key);
  } else {
    vacate(sequence);
  }
  sequence.phase = Phase::Ended;
  ++counters_.num_finished[static_cast<std::size_t>(reason)];
  auto record = sequences_.extract(sequence.key.seq_id);
  // Rows of steps in flight, of earlier epochs perhaps, still point to the record.
  if (is_in_flight(sequence.last_step)) {
    step(sequence.last_step).remains_.sequences.push_back(std::move(record.mapped()));
  }
  return terminal;
}

const Sequence& Scheduler::find(SeqId seq_id) const {
  const auto it = sequences_.find(seq_id);
  if (it == sequences_.end()) {
    throw InvalidArgument("no unfinished request has id " + std::to_string(seq_id.value()));
  }
  return *it->second;
}

std::span<const TokenId> Scheduler::known_tokens(SeqId seq_id) const {
  require_thread();
  return find(seq_id).tokens;
}

std::int32_t Scheduler::num_cached(SeqId seq_id) const {
  require_thread();
  return find(seq_id).num_cached_tokens;
}

std::int64_t Scheduler::num_unfinished() const {
  require_thread();
  return static_cast<std::int64_t>(sequences_.size());
}

std::int32_t Scheduler::num_steps_in_flight() const {
  require_thread();
  return static_cast<std::int32_t>(next_step_.value() - oldest_step_.value());
}

Stats Scheduler::stats() const {
  require_thread();
  Stats stats = counters_;
  stats.num_running = static_cast<std::int64_t>(running_.size());
  stats.num_waiting = static_cast<std::int64_t>(waiting_.size());
  stats.num_steps_in_flight = num_steps_in_flight();
  stats.num_pending_pages = pool_.num_pending();
  return stats;
}

kv::Ledger Scheduler::ledger() const {
  require_thread();
  return pool_.ledger();
}

void Scheduler::reset_prefix_cache() {
  require_thread();
  if (tree_ != nullptr) {
    tree_->clear();
    ++num_releases_;
  }
}

void Scheduler::check() const {
  pool_.check();
  if (tree_ != nullptr) {
    tree_->check();
  }
  TANDEM_CHECK(sequences_.size() == waiting_.size() + running_.size(), "a request is in no list, or in two");
  TANDEM_CHECK(std::ranges::is_sorted(running_, {}, [](const Sequence* each) { return each->key; }),
               "the running list is out of order");
  std::vector<bool> seat_used(static_cast<std::size_t>(config_.max_seats), false);
  const auto use_seat = [&](SeatId seat) {
    TANDEM_CHECK(!seat_used.at(seat.index()), "seat " + std::to_string(seat.value()) + " is in use twice");
    seat_used[seat.index()] = true;
  };
  std::ranges::for_each(free_seats_, use_seat);
  std::int64_t num_context = 0;
  for (const Sequence* each : running_) {
    use_seat(each->seat);
    num_context += each->phase == Phase::Context ? 1 : 0;
    TANDEM_CHECK(each->phase == Phase::Context || each->phase == Phase::Decode, "a running sequence has a wrong phase");
    TANDEM_CHECK(each->num_known() < each->max_length, "a running sequence has reached its limit");
    TANDEM_CHECK(each->pages.computed() <= each->num_known(), "more entries are valid than tokens known");
    TANDEM_CHECK(each->num_rows_in_flight >= 0 && each->num_samples_in_flight >= 0, "a count in flight is negative");
  }
  TANDEM_CHECK(num_context == num_context_, "the number of prompts in progress is wrong");
  for (const auto& [key, each] : waiting_) {
    TANDEM_CHECK(each->phase == Phase::Waiting && each->pages.num_pages() == 0 && each->key == key,
                 "a waiting sequence holds pages");
  }
  for (const std::unique_ptr<StepPlan>& plan : ring_) {
    const Remains& remains = plan->remains_;
    TANDEM_CHECK(
        is_in_flight(plan->step_id_) || (remains.pages.empty() && remains.seats.empty() && remains.sequences.empty()),
        "a completed step still holds something");
    std::ranges::for_each(remains.seats, use_seat);
  }
  TANDEM_CHECK(std::ranges::all_of(seat_used, [](bool used) { return used; }), "a seat is lost");
}

}  // namespace tandem::sched
