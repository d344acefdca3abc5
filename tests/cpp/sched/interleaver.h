#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "sched/harness.h"

// A random order of arrivals, plans, results, aborts, failures and resets over a random configuration, all from one
// seed; the harness checks after each event.
namespace tandem::sched::testing {

struct InterleaverTotals {
  std::int64_t num_events = 0;
  std::int64_t num_requests = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t num_dropped_rows = 0;
  std::int64_t num_cached_tokens = 0;
  std::int64_t num_accepted_tokens = 0;
  std::int64_t num_prefix_hit_rounds = 0;
  std::int64_t num_failed_steps = 0;
};

class Interleaver {
 public:
  explicit Interleaver(std::uint64_t seed) : random_(seed), config_(draw_config()), harness_(config_, seed) {}

  [[nodiscard]] const SchedulerConfig& config() const { return config_; }

  void run(std::int32_t num_events, InterleaverTotals& totals) {
    for (std::int32_t i = 0; i < num_events; ++i) {
      event();
    }
    harness_.run();
    harness_.reset_prefix_cache();
    require(harness_.scheduler().ledger().free == config_.num_slots, "pages are left after a reset");
    const Stats stats = harness_.scheduler().stats();
    std::int64_t num_finished = 0;
    for (const std::int64_t count : stats.num_finished) {
      num_finished += count;
    }
    require(num_finished == stats.num_submitted, "requests and ends do not add up");
    require(stats.num_planned_steps == stats.num_completed_steps + stats.num_failed_steps, "steps do not add up");
    totals.num_events += num_events;
    totals.num_requests += stats.num_submitted;
    totals.num_preemptions += stats.num_preemptions;
    totals.num_dropped_rows += stats.num_dropped_rows;
    totals.num_cached_tokens += stats.num_cached_tokens;
    totals.num_accepted_tokens += stats.num_accepted_tokens();
    totals.num_prefix_hit_rounds += stats.prefix_hit_rounds.num_rounds();
    totals.num_failed_steps += stats.num_failed_steps;
  }

 private:
  std::int32_t draw(std::int32_t low, std::int32_t high) {
    return std::uniform_int_distribution<std::int32_t>(low, high)(random_);
  }
  bool chance(std::int32_t percent) { return draw(1, 100) <= percent; }

  SchedulerConfig draw_config() {
    SchedulerConfig config;
    config.tokens_per_page = 1 << draw(0, 3);
    config.max_seats = draw(1, 6);
    config.max_model_len = draw(12, 70);
    config.draft_len = draw(0, 7);
    config.has_drafter = config.draft_len > 0 || chance(50);
    config.overlap = chance(70);
    config.enable_prefix_cache = chance(80);
    config.watermark_pages = draw(0, 2);
    config.max_tokens_per_step = 1 + config.draft_len + draw(0, 24);
    config.max_speculating_rows = chance(70) ? INT32_MAX : draw(0, 3);
    // From what one sequence needs to nearly what all seats could want.
    const std::int32_t alone = (config.max_model_len + config.tokens_per_page - 1) / config.tokens_per_page;
    config.num_slots = std::max(alone, alone * config.max_seats * draw(30, 95) / 100);
    return config;
  }

  void submit() {
    // Few families and lengths around page edges, so that prefixes are shared and end everywhere.
    const std::int32_t longest = config_.max_model_len - 1;
    std::int32_t length = draw(1, longest);
    if (chance(40)) {
      length = std::clamp(config_.tokens_per_page * draw(1, 4) + draw(-1, 1), 1, longest);
    }
    std::vector<TokenId> prompt = make_prompt(length, static_cast<std::uint64_t>(draw(0, 2)));
    if (chance(30)) {
      prompt[static_cast<std::size_t>(draw(0, length - 1))] = draw(0, Text::kVocabulary - 1);
    }
    if (chance(20) && !ids_.empty()) {  // the next turn of an earlier conversation
      const RequestRecord& earlier = harness_.request(ids_[static_cast<std::size_t>(draw(0, num_ids() - 1))]);
      prompt = earlier.prompt;
      prompt.insert(prompt.end(), earlier.output.begin(), earlier.output.end());
      prompt.resize(std::min<std::size_t>(prompt.size(), static_cast<std::size_t>(longest)));
    }
    RequestOptions options;
    options.priority = chance(80) ? 0 : draw(-1, 1);
    options.salt = chance(85) ? "" : "b";
    options.speculate = chance(85);
    options.synchronous = chance(10);
    options.stop_token = chance(50) ? draw(0, Text::kVocabulary - 1) : -1;
    ids_.push_back(harness_.submit(std::move(prompt), draw(1, 30), options));
  }

  void event() {
    const std::int32_t which = draw(1, 100);
    if (which <= 12) {
      if (harness_.scheduler().num_unfinished() < 12) {
        submit();
      }
    } else if (which <= 55) {
      if (harness_.can_plan()) {
        harness_.plan();
      }
    } else if (which <= 95) {
      if (harness_.num_in_flight() > 0) {
        harness_.deliver();
      }
    } else if (which <= 97) {
      if (!ids_.empty()) {  // of a live or an ended one
        harness_.abort(ids_[static_cast<std::size_t>(std::max(draw(0, num_ids() - 1), draw(0, num_ids() - 1)))]);
      }
    } else if (which <= 99) {
      if (harness_.num_in_flight() > 0 && chance(40)) {
        harness_.fail();
      }
    } else {
      harness_.reset_prefix_cache();
    }
  }

  [[nodiscard]] std::int32_t num_ids() const { return static_cast<std::int32_t>(ids_.size()); }

  std::mt19937_64 random_;
  SchedulerConfig config_;
  Harness harness_;
  std::vector<SeqId> ids_;
};

// Runs `count` seeds from `first`; what breaks names its seed.
inline InterleaverTotals run_interleavers(std::uint64_t first, std::uint64_t count, std::int32_t num_events) {
  InterleaverTotals totals;
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    try {
      Interleaver(seed).run(num_events, totals);
    } catch (const std::exception& error) {
      throw Violation("seed " + std::to_string(seed) + ": " + error.what());
    }
  }
  return totals;
}

}  // namespace tandem::sched::testing
