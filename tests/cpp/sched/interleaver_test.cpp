#include "sched/interleaver.h"

#include <gtest/gtest.h>

namespace tandem::sched::testing {
namespace {

// `sched_soak` runs the same for as many seeds as wanted.
TEST(Interleaver, AnyOrderOfEventsKeepsTextsLedgerAndEnds) {
  constexpr std::uint64_t kFirstSeed = 1;
  constexpr std::uint64_t kNumSeeds = 300;
  std::cout << "seeds " << kFirstSeed << " to " << kFirstSeed + kNumSeeds - 1 << '\n';
  const InterleaverTotals totals = run_interleavers(kFirstSeed, kNumSeeds, 300);
  // It proves something only if the rare paths were walked.
  EXPECT_GT(totals.num_requests, 5000);
  EXPECT_GT(totals.num_preemptions, 100);
  EXPECT_GT(totals.num_dropped_rows, 500);
  EXPECT_GT(totals.num_cached_tokens, 5000);
  EXPECT_GT(totals.num_accepted_tokens, 5000);
  EXPECT_GT(totals.num_prefix_hit_rounds, 500);
  EXPECT_GT(totals.num_failed_steps, 100);
}

}  // namespace
}  // namespace tandem::sched::testing
