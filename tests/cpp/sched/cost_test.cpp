#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>
#include <vector>

#include "sched/configs.h"
#include "sched/fake_engine.h"

#ifdef __SANITIZE_ADDRESS__
constexpr bool kCountsAllocations = false;  // the sanitizer has allocation functions of its own
#else
constexpr bool kCountsAllocations = true;
#endif

namespace {
std::atomic<std::int64_t> num_allocations{0};
}  // namespace

#ifndef __SANITIZE_ADDRESS__
// Counted for the whole binary: this is the only place that reads the count.
void* operator new(std::size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* const memory = std::malloc(size); memory != nullptr) {
    return memory;
  }
  throw std::bad_alloc();
}
// Not inlined, or the compiler sees `free` meet a `new` that it did not inline, and takes them for a mismatched pair.
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace tandem::sched::testing {
namespace {

// 64 rows that decode for ever, each round with all drafts accepted, one step in flight behind another.
class DecodeLoop {
 public:
  explicit DecodeLoop(std::int32_t num_slots) : scheduler_(config(num_slots)) {
    for (std::uint64_t i = 0; i < kRows; ++i) {
      scheduler_.submit({.prompt = make_prompt(20, i), .max_tokens = 100000});
    }
    while (scheduler_.stats().num_accepted_tokens() < 10 * kRows) {
      step();
    }
    num_tokens_.assign(kRows, 1 + kDrafts);
    num_accepted_.assign(kRows, kDrafts);
    finish_.assign(kRows, 0);
    tokens_.assign(static_cast<std::size_t>(kRows * (1 + kDrafts)), 3);
  }

  // The steady state: plan, complete, nothing else.
  void plan_and_complete() {
    const StepPlan* const plan = scheduler_.plan();
    ASSERT_EQ(plan->num_rows(), kRows);
    scheduler_.complete({StepId{plan->step_id().value() - 1}, num_tokens_, num_accepted_, tokens_, finish_});
  }
  [[nodiscard]] Scheduler& scheduler() { return scheduler_; }

 private:
  static constexpr std::int32_t kRows = 64;
  static constexpr std::int32_t kDrafts = 3;

  struct Step {
    StepId id;
    std::vector<std::int32_t> num_tokens;
  };

  static SchedulerConfig config(std::int32_t num_slots) {
    SchedulerConfig config = overlapped(with_drafts(kDrafts));
    config.tokens_per_page = 16;
    config.num_slots = num_slots;
    config.max_seats = kRows;
    config.max_tokens_per_step = 8 * kRows;
    config.max_model_len = 100000;
    return config;
  }
  void step() {
    const StepPlan* const plan = scheduler_.plan();
    plans_.push_back({plan->step_id(), {}});
    Step& step = plans_.back();
    for (std::size_t row = 0; row < plan->samples().size(); ++row) {
      if (plan->samples()[row] != 0) {
        step.num_tokens.push_back(1 + plan->num_drafts()[row]);
      }
    }
    if (scheduler_.num_steps_in_flight() == 2) {
      complete();
    }
  }

  void complete() {
    const Step step = plans_.front();
    plans_.erase(plans_.begin());
    std::vector<std::int32_t> accepted, finish(step.num_tokens.size(), 0);
    std::int32_t total = 0;
    for (const std::int32_t count : step.num_tokens) {
      accepted.push_back(count - 1);
      total += count;
    }
    const std::vector<TokenId> tokens(static_cast<std::size_t>(total), 3);
    scheduler_.complete({step.id, step.num_tokens, accepted, tokens, finish});
  }

  Scheduler scheduler_;
  std::vector<Step> plans_;
  std::vector<std::int32_t> num_tokens_, num_accepted_, finish_;
  std::vector<TokenId> tokens_;
};

TEST(Cost, DecodingAllocatesNothingEvenWhenPagesFillAndAreTaken) {
  if (!kCountsAllocations) {
    GTEST_SKIP() << "allocations are not counted under AddressSanitizer";
  }
  DecodeLoop loop(100000);
  const std::int64_t held_before = loop.scheduler().ledger().held;
  const std::int64_t before = num_allocations.load();
  for (std::int32_t i = 0; i < 200; ++i) {
    loop.plan_and_complete();
  }
  EXPECT_EQ(num_allocations.load() - before, 0);
  EXPECT_GT(loop.scheduler().ledger().held, held_before + 3000);
}

double median_step_us(DecodeLoop& loop) {
  std::vector<double> times;
  for (std::int32_t i = 0; i < 60; ++i) {
    const auto start = std::chrono::steady_clock::now();
    loop.plan_and_complete();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  std::ranges::nth_element(times, times.begin() + 30);
  return times[30];
}

// A pool 64 times as large: anything that looks at every slot would take many times as long. The least of several
// medians, taken in turns, since other programs share the machine.
TEST(Cost, AStepDoesNotDependOnTheSizeOfThePool) {
  DecodeLoop small(1 << 14);
  DecodeLoop large(1 << 20);
  double least_small = 1e9;
  double least_large = 1e9;
  for (std::int32_t i = 0; i < 5; ++i) {
    least_small = std::min(least_small, median_step_us(small));
    least_large = std::min(least_large, median_step_us(large));
  }
  EXPECT_LT(least_large, 4 * least_small) << least_small << " us against " << least_large << " us";
}

}  // namespace
}  // namespace tandem::sched::testing
