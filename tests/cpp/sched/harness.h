#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sched/fake_engine.h"
#include "tandem/sched/scheduler.h"

// The engine's loop around a scheduler and a fake device, checking after each event what must always hold: the plan's
// form, every cache entry read, the ledger, who may reuse a slot or a seat, exactly one terminal event, and each
// emitted token against the request run alone, and the counts of rounds against its own.
namespace tandem::sched::testing {

struct PlanCopy {
  StepId step_id;
  std::vector<std::int64_t> seq_id;
  std::vector<std::int32_t> epoch, seat, kind, first_index, query_len, write_from, num_drafts, max_length;
  std::vector<std::uint8_t> samples, proposes, fresh;
  std::vector<std::int32_t> token_offsets;
  std::vector<TokenId> token_ids;
  std::vector<std::int32_t> table_changes;  // flat

  explicit PlanCopy(const StepPlan& plan) : step_id(plan.step_id()) {
    const auto copy = [](const auto& from, auto& to) { to.assign(from.begin(), from.end()); };
    copy(plan.seq_id(), seq_id);
    copy(plan.epoch(), epoch);
    copy(plan.seat(), seat);
    copy(plan.kind(), kind);
    copy(plan.first_index(), first_index);
    copy(plan.query_len(), query_len);
    copy(plan.write_from(), write_from);
    copy(plan.num_drafts(), num_drafts);
    copy(plan.max_length(), max_length);
    copy(plan.samples(), samples);
    copy(plan.proposes(), proposes);
    copy(plan.fresh(), fresh);
    copy(plan.token_offsets(), token_offsets);
    copy(plan.token_ids(), token_ids);
    for (const StepPlan::TableChange& change : plan.table_changes()) {
      table_changes.insert(table_changes.end(), {change.seat, change.page_index, change.slot});
    }
  }
  friend bool operator==(const PlanCopy&, const PlanCopy&) = default;

  [[nodiscard]] std::optional<std::size_t> row_of(SeqId id) const {
    const auto at = std::ranges::find(seq_id, id.value());
    return at == seq_id.end() ? std::nullopt : std::optional(static_cast<std::size_t>(at - seq_id.begin()));
  }
  [[nodiscard]] std::int32_t num_rows() const { return static_cast<std::int32_t>(seq_id.size()); }
  [[nodiscard]] std::int32_t count(RowKind which) const {
    return static_cast<std::int32_t>(std::ranges::count(kind, static_cast<std::int32_t>(which)));
  }
};

struct RequestOptions {
  std::int32_t priority = 0;
  std::string salt = {};
  bool speculate = true;
  bool synchronous = false;
  TokenId stop_token = -1;      // the engine ends the request at this token
  std::int32_t stop_after = 0;  // or after this many generated tokens
};

struct RequestRecord {
  std::vector<TokenId> prompt;
  std::int32_t max_length = 0;
  RequestOptions options;
  std::vector<TokenId> output;
  std::optional<Terminal> terminal;
  Rounds rounds;
};

class Harness {
 public:
  explicit Harness(const SchedulerConfig& config, std::uint64_t seed = 1)
      : scheduler_(config),
        engine_(config, seed),
        page_(config.tokens_per_page),
        max_model_len_(config.max_model_len) {}

  [[nodiscard]] Scheduler& scheduler() { return scheduler_; }
  [[nodiscard]] FakeEngine& engine() { return engine_; }
  [[nodiscard]] const RequestRecord& request(SeqId id) const { return requests_.at(id.value()); }
  [[nodiscard]] const PlanCopy& last_plan() const { return *last_plan_; }
  [[nodiscard]] const StepEvents& last_events() const { return *last_events_; }
  [[nodiscard]] std::size_t num_in_flight() const { return in_flight_.size(); }
  [[nodiscard]] bool can_plan() const {
    return static_cast<std::int32_t>(in_flight_.size()) < scheduler_.config().max_steps_in_flight();
  }

  SeqId submit(std::vector<TokenId> prompt, std::int32_t max_tokens, const RequestOptions& options = {}) {
    RequestSpec spec{prompt, max_tokens, options.priority, options.salt, options.speculate, options.synchronous};
    const SeqId id = scheduler_.submit(std::move(spec));
    engine_.add(id, prompt, options.salt);
    const auto limit = static_cast<std::int32_t>(prompt.size()) + max_tokens;
    requests_[id.value()] = {std::move(prompt), std::min(limit, max_model_len_), options, {}, {}, {}};
    return id;
  }

  // Plans a step and runs it on the device. False if the scheduler has none.
  bool plan() {
    const StepPlan* const plan = scheduler_.plan();
    if (plan == nullptr) {
      require(!in_flight_.empty() || scheduler_.num_unfinished() == 0, "no plan, nothing in flight, and work left");
      check();
      return false;
    }
    PlanCopy copy(*plan);
    check_reuse(*plan);
    for (std::size_t row = 0; row < copy.seq_id.size(); ++row) {
      if (copy.fresh[row] != 0) {
        began_with_hit_[{copy.seq_id[row], copy.epoch[row]}] = copy.write_from[row] > 0;
      }
      require(!requests_.at(copy.seq_id[row]).terminal.has_value(), "an ended request is planned");
      require(std::ranges::count(copy.seq_id, copy.seq_id[row]) == 1, "a sequence has two rows in one step");
      require(
          !requests_.at(copy.seq_id[row]).options.synchronous || !in_flight(SeqId{copy.seq_id[row]}, copy.epoch[row]),
          "a synchronous row is planned over its own step in flight");
    }
    DeviceResult result = engine_.run(*plan);
    last_plan_.emplace(copy);
    in_flight_.push_back({plan, std::move(copy), std::move(result)});
    check();
    return true;
  }

  // Hands the oldest step's result over, cut as the engine cuts.
  const StepEvents& deliver() {
    const InFlight step = take_oldest();
    std::vector<std::int32_t> num_tokens, num_accepted, finish;
    std::vector<TokenId> tokens;
    std::size_t sample = 0;
    std::vector<bool> live;
    for (std::size_t row = 0; row < step.copy.seq_id.size(); ++row) {
      if (step.copy.samples[row] == 0) {
        continue;
      }
      const std::vector<TokenId>& row_tokens = step.result.tokens[sample++];
      RequestRecord& record = requests_.at(step.copy.seq_id[row]);
      const std::size_t cut = stop_cut(record, row_tokens);
      num_tokens.push_back(static_cast<std::int32_t>(cut == 0 ? row_tokens.size() : cut));
      num_accepted.push_back(std::min(num_tokens.back(), static_cast<std::int32_t>(row_tokens.size()) - 1));
      finish.push_back(static_cast<std::int32_t>(cut == 0 ? FinishReason::None : FinishReason::Stop));
      tokens.insert(tokens.end(), row_tokens.begin(), row_tokens.begin() + num_tokens.back());
    }
    const StepEvents& events = scheduler_.complete({step.copy.step_id, num_tokens, num_accepted, tokens, finish});
    require(events.seq_id == step.result.seq_id, "events are not in the order of the plan's sampling rows");
    std::size_t token = 0;
    for (std::size_t i = 0; i < events.seq_id.size(); ++i) {
      take_tokens(step, events, i, std::span<const TokenId>(tokens).subspan(token));
      token += static_cast<std::size_t>(num_tokens[i]);
    }
    take_terminals(events);
    last_events_ = &events;
    check();
    return events;
  }

  const StepEvents& fail() {
    const InFlight step = take_oldest();
    const StepEvents& events = scheduler_.fail(step.copy.step_id);
    require(events.seq_id.empty(), "a failed step has row events");
    take_terminals(events);
    last_events_ = &events;
    check();
    return events;
  }

  bool abort(SeqId id) {
    const std::optional<Terminal> terminal = scheduler_.abort(id);
    require(terminal.has_value() != requests_.at(id.value()).terminal.has_value(), "abort and the record disagree");
    if (terminal) {
      take_terminal(*terminal);
    }
    check();
    return terminal.has_value();
  }

  void reset_prefix_cache() {
    scheduler_.reset_prefix_cache();
    require(scheduler_.ledger().cached == 0, "pages are cached after a reset");
    check();
  }

  // One turn of the loop with as much overlap as configured: plan, then take the oldest result if no more can be
  // planned.
  bool step() {
    const bool planned = can_plan() && plan();
    if (!in_flight_.empty() && (!planned || !can_plan())) {
      deliver();
      return true;
    }
    return planned;
  }

  void run(std::int32_t most_steps = 100000) {
    while (step()) {
      require(--most_steps > 0, "the work does not end");
    }
    check_idle();
  }

  // With nothing in flight: every page free or cached, and every request's end as when it runs alone.
  void check_idle() {
    require(in_flight_.empty() && scheduler_.num_unfinished() == 0, "not idle");
    const kv::Ledger ledger = scheduler_.ledger();
    require(ledger.held == 0 && ledger.leased == 0 && ledger.free + ledger.cached == ledger.total, "pages leaked");
    for (auto& [id, record] : requests_) {
      require(record.terminal.has_value(), "request " + std::to_string(id) + " has no terminal event");
      check_end(id, record);
    }
  }

  void check() {
    scheduler_.check();
    const kv::Ledger ledger = scheduler_.ledger();
    require(ledger.free + ledger.cached + ledger.held + ledger.leased == ledger.total, "the ledger does not add up");
    const Stats stats = scheduler_.stats();
    require(stats.cold_rounds == cold_rounds_ && stats.prefix_hit_rounds == hit_rounds_, "rounds are counted wrongly");
    std::set<std::int32_t> used;
    for (const InFlight& step : in_flight_) {
      used.insert(step.result.slots.begin(), step.result.slots.end());
    }
    require(ledger.held >= static_cast<std::int64_t>(used.size()), "a step in flight names pages that nobody holds");
    for (const auto& [id, record] : requests_) {
      if (!record.terminal) {
        const std::span<const TokenId> known = scheduler_.known_tokens(SeqId{id});
        require(known.size() == record.prompt.size() + record.output.size() &&
                    std::ranges::equal(known.subspan(record.prompt.size()), record.output),
                "known tokens are not the prompt and what was emitted");
      }
    }
  }

 private:
  struct InFlight {
    const StepPlan* plan;
    PlanCopy copy;
    DeviceResult result;
  };

  [[nodiscard]] bool in_flight(SeqId id, std::int32_t epoch) const {
    return std::ranges::any_of(in_flight_, [&](const InFlight& step) {
      const auto row = step.copy.row_of(id);
      return row && step.copy.epoch[*row] == epoch;
    });
  }

  InFlight take_oldest() {
    require(!in_flight_.empty(), "nothing is in flight");
    InFlight step = std::move(in_flight_.front());
    in_flight_.pop_front();
    require(PlanCopy(*step.plan) == step.copy, "a plan changed before its step completed");
    return step;
  }

  // Pages and seats that a step in flight names are given to nobody else.
  void check_reuse(const StepPlan& plan) const {
    for (const InFlight& step : in_flight_) {
      for (std::size_t row = 0; row < plan.seq_id().size(); ++row) {
        require(plan.fresh()[row] == 0 || !step.result.seats.contains(plan.seat()[row]),
                "a seat is reused before the last step naming it has completed");
      }
      for (const StepPlan::TableChange& change : plan.table_changes()) {
        const auto row = static_cast<std::size_t>(std::ranges::find(plan.seat(), change.seat) - plan.seat().begin());
        const bool hit = plan.fresh()[row] != 0 && (change.page_index + 1) * page_ <= plan.write_from()[row];
        require(hit || !step.result.slots.contains(change.slot),
                "a slot is reused before the last step naming it has completed");
      }
    }
  }

  // Tokens to keep of a round, up to and including the one that ends the request; 0: it goes on.
  static std::size_t stop_cut(const RequestRecord& record, const std::vector<TokenId>& tokens) {
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const bool by_count = record.options.stop_after > 0 &&
                            record.output.size() + i + 1 >= static_cast<std::size_t>(record.options.stop_after);
      if (tokens[i] == record.options.stop_token || by_count) {
        return i + 1;
      }
    }
    return 0;
  }

  void take_tokens(const InFlight& step, const StepEvents& events, std::size_t i, std::span<const TokenId> tokens) {
    RequestRecord& record = requests_.at(events.seq_id[i]);
    if (events.valid[i] == 0) {
      require(events.num_tokens[i] == 0 && events.finish[i] == 0, "a dropped row has effects");
      return;
    }
    require(!record.terminal.has_value(), "a token after the terminal event");
    const std::optional<std::size_t> row = step.copy.row_of(SeqId{events.seq_id[i]});
    require(row.has_value(), "an event for a sequence without a row");
    if (const std::int32_t num_drafts = step.copy.num_drafts[*row]; num_drafts > 0) {
      const auto accepted = static_cast<std::int32_t>(step.result.tokens[i].size()) - 1;
      const std::int32_t kept = std::min(accepted, events.num_tokens[i]);
      const bool hit = began_with_hit_.at({step.copy.seq_id[*row], step.copy.epoch[*row]});
      (hit ? hit_rounds_ : cold_rounds_).count(num_drafts, kept);
      record.rounds.count(num_drafts, kept);
    }
    for (const TokenId token : tokens.first(static_cast<std::size_t>(events.num_tokens[i]))) {
      const auto index = static_cast<std::int64_t>(record.prompt.size() + record.output.size());
      require(index < record.max_length, "a token beyond the limit");
      require(token == engine_.text(events.seq_id[i]).token(index), "a token differs from the request run alone");
      record.output.push_back(token);
    }
    const bool ends = std::ranges::any_of(
        events.terminals, [&](const Terminal& terminal) { return terminal.seq_id.value() == events.seq_id[i]; });
    require(ends == (events.finish[i] != 0), "a finish reason and the terminal events disagree");
  }

  void take_terminals(const StepEvents& events) {
    for (const Terminal& terminal : events.terminals) {
      take_terminal(terminal);
    }
  }

  void take_terminal(const Terminal& terminal) {
    RequestRecord& record = requests_.at(terminal.seq_id.value());
    require(!record.terminal.has_value(), "a second terminal event");
    require(terminal.reason != FinishReason::None, "a terminal event without a reason");
    require(terminal.num_prompt_tokens == static_cast<std::int32_t>(record.prompt.size()) &&
                terminal.num_generated_tokens == static_cast<std::int32_t>(record.output.size()),
            "a terminal event counts wrongly");
    const auto sum = [](const auto& counts) { return std::reduce(counts.begin(), counts.end()); };
    require(terminal.num_rounds == record.rounds.num_rounds() &&
                terminal.num_drafted_tokens == sum(record.rounds.num_drafted()) &&
                terminal.num_accepted_tokens == sum(record.rounds.num_accepted()),
            "a terminal event counts rounds wrongly");
    record.terminal = terminal;
  }

  // What the request does when it runs alone: its text up to the stop token or the limit.
  void check_end(std::int64_t id, const RequestRecord& record) {
    const FinishReason reason = record.terminal->reason;
    if (reason == FinishReason::Abort || reason == FinishReason::Error) {
      return;
    }
    Text& text = engine_.text(id);
    std::vector<TokenId> expected;
    FinishReason expected_reason = FinishReason::Length;
    for (auto i = static_cast<std::int64_t>(record.prompt.size()); i < record.max_length; ++i) {
      expected.push_back(text.token(i));
      if (expected.back() == record.options.stop_token ||
          static_cast<std::int32_t>(expected.size()) == record.options.stop_after) {
        expected_reason = FinishReason::Stop;
        break;
      }
    }
    require(record.output == expected && reason == expected_reason,
            "request " + std::to_string(id) + " ended otherwise than alone");
  }

  Scheduler scheduler_;
  FakeEngine engine_;
  std::int64_t page_;
  std::int32_t max_model_len_;
  std::map<std::int64_t, RequestRecord> requests_;
  std::deque<InFlight> in_flight_;
  std::optional<PlanCopy> last_plan_;
  const StepEvents* last_events_ = nullptr;
  std::map<std::pair<std::int64_t, std::int32_t>, bool> began_with_hit_;  // by request and epoch
  Rounds cold_rounds_;
  Rounds hit_rounds_;
};

}  // namespace tandem::sched::testing
