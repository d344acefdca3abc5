#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "tandem/kv/page_pool.h"
#include "tandem/kv/prefix_tree.h"
#include "tandem/kv/sequence_pages.h"

namespace tandem::kv {
namespace {

// The least time in nanoseconds, over some repetitions, that a sequence of 64 pages takes from attach to eviction.
std::int64_t least_time_of_a_life(std::int32_t num_slots) {
  PagePool pool(num_slots);
  PrefixTree tree(pool, 1);
  std::vector<TokenId> tokens(64);
  std::iota(tokens.begin(), tokens.end(), 0);
  std::int64_t least = std::numeric_limits<std::int64_t>::max();
  for (int repeat = 0; repeat < 50; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    SequencePages pages(pool, &tree, 1);
    pages.attach_prefix(tokens);
    EXPECT_TRUE(pages.grow(64));
    pages.set_computed(64);
    pages.commit(tokens);
    std::vector<PageRef> in_flight;
    pages.release_to_step(in_flight);
    EXPECT_EQ(pool.num_pending(), 64);
    in_flight.clear();
    EXPECT_EQ(tree.num_evictable(), 64);
    EXPECT_EQ(tree.evict(64), 64);
    least = std::min(least, std::int64_t{(std::chrono::steady_clock::now() - start).count()});
  }
  return least;
}

TEST(PoolSize, DoesNotChangeWhatASequenceCosts) {
  // A cost in proportion to the pool would make these differ 1024-fold; cold caches make them differ a little.
  const std::int64_t small = least_time_of_a_life(1 << 10);
  const std::int64_t large = least_time_of_a_life(1 << 20);
  EXPECT_LT(large, 30 * small) << "1,024 slots: " << small << " ns; 1,048,576 slots: " << large << " ns";
}

}  // namespace
}  // namespace tandem::kv
