#include <benchmark/benchmark.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "tandem/sched/scheduler.h"

namespace tandem::sched {
namespace {

constexpr std::int32_t kPage = 128;
constexpr std::int32_t kMaxLength = 16384;
constexpr std::int32_t kPrompt = 500;
// Results made in advance and used in turn, so that their tokens do not all sit in a near cache.
constexpr std::size_t kNumResults = 64;

// `num_rows` sequences in steady decode, one step in flight behind another, each round with a random number of drafts
// accepted. Sequences that near their limit are replaced between two timed steps.
class DecodeLoop {
 public:
  DecodeLoop(std::int32_t num_rows, std::int32_t draft_len, bool overlap)
      : num_rows_(num_rows), draft_len_(draft_len), overlap_(overlap) {
    std::uniform_int_distribution<std::int32_t> accepted(0, draft_len);
    std::uniform_int_distribution<TokenId> token(0, 200000);
    for (Result& result : results_) {
      for (std::int32_t row = 0; row < num_rows; ++row) {
        result.num_accepted.push_back(accepted(random_));
        result.num_tokens.push_back(result.num_accepted.back() + 1);
        for (std::int32_t i = 0; i < result.num_tokens.back(); ++i) {
          result.tokens.push_back(token(random_));
        }
      }
      result.finish.assign(static_cast<std::size_t>(num_rows), 0);
    }
    restart();
  }

  // The timed work: one plan, one complete. False when the sequences near their limit.
  bool step() {
    const StepPlan* const plan = scheduler_->plan();
    benchmark::DoNotOptimize(plan->first_index().data());
    const Result& result = results_[next_++ % kNumResults];
    const StepEvents& events = scheduler_->complete(
        {StepId{next_step_++}, result.num_tokens, result.num_accepted, result.tokens, result.finish});
    benchmark::DoNotOptimize(events.num_tokens.data());
    num_planned_rows_ = plan->num_rows();
    return ++num_steps_ < most_steps();
  }

  void restart() {
    SchedulerConfig config;
    config.tokens_per_page = kPage;
    config.num_slots = num_rows_ * (kMaxLength / kPage) + 64;
    config.max_seats = num_rows_;
    config.max_tokens_per_step = num_rows_ * kPrompt;
    config.max_model_len = kMaxLength;
    config.draft_len = draft_len_;
    config.has_drafter = true;
    config.overlap = overlap_;
    scheduler_ = std::make_unique<Scheduler>(config);
    std::uniform_int_distribution<TokenId> token(0, 200000);
    std::uniform_int_distribution<std::int32_t> length(kPrompt - kPage, kPrompt);
    for (std::int32_t row = 0; row < num_rows_; ++row) {
      std::vector<TokenId> prompt(static_cast<std::size_t>(length(random_)));
      std::ranges::generate(prompt, [&] { return token(random_); });
      scheduler_->submit({.prompt = std::move(prompt), .max_tokens = kMaxLength});
    }
    const std::vector<std::int32_t> ones(static_cast<std::size_t>(num_rows_), 1);
    const std::vector<std::int32_t> zeros(static_cast<std::size_t>(num_rows_), 0);
    scheduler_->plan();
    scheduler_->complete({StepId{0}, ones, zeros, ones, zeros});
    next_step_ = 1;
    num_steps_ = 0;
    if (overlap_) {
      scheduler_->plan();
    }
  }

  // What the results say must be what the scheduler knows, and no row may be missing.
  void verify() {
    for (std::int32_t i = 0; i < 2000; ++i) {
      const std::size_t result = next_ % kNumResults;
      const std::size_t known = scheduler_->known_tokens(SeqId{0}).size();
      if (!step() || num_planned_rows_ != num_rows_) {
        fail("a step lacks rows");
      }
      const std::span<const TokenId> tokens = scheduler_->known_tokens(SeqId{0});
      const auto num_new = static_cast<std::size_t>(results_[result].num_tokens[0]);
      if (tokens.size() != known + num_new ||
          !std::ranges::equal(tokens.last(num_new), std::span(results_[result].tokens).first(num_new))) {
        fail("a sequence lacks tokens");
      }
    }
    scheduler_->check();
    restart();
  }

 private:
  struct Result {
    std::vector<std::int32_t> num_tokens, num_accepted, finish;
    std::vector<TokenId> tokens;
  };

  [[noreturn]] static void fail(const char* what) {
    std::cerr << "sched_bench: " << what << '\n';
    std::exit(EXIT_FAILURE);
  }
  [[nodiscard]] std::int32_t most_steps() const { return (kMaxLength - kPrompt) / (1 + draft_len_) - 8; }

  std::int32_t num_rows_;
  std::int32_t draft_len_;
  bool overlap_;
  std::mt19937 random_{7};
  std::vector<Result> results_ = std::vector<Result>(kNumResults);
  std::unique_ptr<Scheduler> scheduler_;
  std::size_t next_ = 0;
  std::int64_t next_step_ = 0;
  std::int32_t num_steps_ = 0;
  std::int32_t num_planned_rows_ = 0;
};

// Processor time of this thread: what a step costs, whoever else wants the processor meanwhile.
double thread_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double percentile(std::vector<double>& times, double share) {
  const auto at = times.begin() + static_cast<std::ptrdiff_t>(share * static_cast<double>(times.size() - 1));
  std::nth_element(times.begin(), at, times.end());
  return *at;
}

// Arguments: rows, draft length, overlap, MiB written between two steps (as an engine's own work would, so that the
// scheduler's memory is no longer in the near caches; not timed).
void BM_PlanAndComplete(benchmark::State& state) {
  DecodeLoop loop(static_cast<std::int32_t>(state.range(0)), static_cast<std::int32_t>(state.range(1)),
                  state.range(2) != 0);
  if (state.range(1) > 0) {
    loop.verify();
  }
  std::vector<std::uint8_t> between(static_cast<std::size_t>(state.range(3)) << 20);
  std::vector<double> times;
  std::vector<double> wall_times;
  times.reserve(static_cast<std::size_t>(state.max_iterations));
  wall_times.reserve(static_cast<std::size_t>(state.max_iterations));
  for (auto _ : state) {
    if (!between.empty()) {
      std::ranges::fill(between, static_cast<std::uint8_t>(times.size()));
      benchmark::DoNotOptimize(between.data());
    }
    const auto wall_start = std::chrono::steady_clock::now();
    const double start = thread_seconds();
    const bool more = loop.step();
    const double time = thread_seconds() - start;
    const std::chrono::duration<double, std::micro> wall_time = std::chrono::steady_clock::now() - wall_start;
    state.SetIterationTime(time);
    times.push_back(time * 1e6);
    wall_times.push_back(wall_time.count());
    if (!more) {
      loop.restart();
    }
  }
  state.counters["p50_us"] = percentile(times, 0.5);
  state.counters["p99_us"] = percentile(times, 0.99);
  state.counters["wall_p50_us"] = percentile(wall_times, 0.5);
  state.counters["wall_p99_us"] = percentile(wall_times, 0.99);
}
BENCHMARK(BM_PlanAndComplete)
    ->ArgNames({"rows", "drafts", "overlap", "mib_between"})
    ->Args({256, 3, 1, 0})
    ->Args({256, 3, 1, 8})
    ->Args({256, 3, 0, 0})
    ->Args({256, 0, 1, 0})
    ->Args({32, 3, 1, 0})
    ->Args({1024, 3, 1, 0})
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);

// A request of 8,192 tokens from submit to its end after one token, its prompt cached in full.
void BM_RequestThatIsCached(benchmark::State& state) {
  SchedulerConfig config;
  config.num_slots = 1024;
  config.max_seats = 8;
  config.max_tokens_per_step = 8192;
  config.max_model_len = 16384;
  config.draft_len = 3;
  config.has_drafter = true;
  config.overlap = false;
  Scheduler scheduler(config);
  std::vector<TokenId> prompt(8192);
  for (std::size_t i = 0; i < prompt.size(); ++i) {
    prompt[i] = static_cast<TokenId>(i * 7919 % 200000);
  }
  const std::vector<std::int32_t> one{1};
  const std::vector<std::int32_t> zero{0};
  std::int64_t step = 0;
  for (auto _ : state) {
    scheduler.submit({.prompt = prompt, .max_tokens = 1});
    scheduler.plan();
    const StepEvents& events = scheduler.complete({StepId{step++}, one, zero, one, zero});
    benchmark::DoNotOptimize(events.terminals.data());
  }
  // All but the first request of each run find their whole prompt.
  const Stats stats = scheduler.stats();
  if (stats.num_cached_tokens != 8192 * (stats.num_submitted - 1)) {
    state.SkipWithError("a prompt was not found in the cache");
  }
}
BENCHMARK(BM_RequestThatIsCached)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tandem::sched

BENCHMARK_MAIN();
