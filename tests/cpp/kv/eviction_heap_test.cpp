#include "tandem/kv/eviction_heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tandem::kv {
namespace {

constexpr std::uint64_t kSeed = 20240607;

TEST(EvictionHeap, AgreesWithASortedSetOverRandomChanges) {
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  std::mt19937_64 rng(kSeed);
  constexpr std::int32_t kSlots = 64;
  EvictionHeap heap(kSlots);
  std::set<std::pair<std::uint64_t, std::int32_t>> model;
  std::vector<std::uint64_t> key_of(kSlots);
  for (int step = 0; step < 20000; ++step) {
    const auto slot = static_cast<std::int32_t>(rng() % kSlots);
    if (heap.contains(slot)) {
      heap.remove(slot);
      model.erase({key_of[static_cast<std::size_t>(slot)], slot});
    } else if (rng() % 100 != 0) {
      // Keys are times, each used once.
      const std::uint64_t key = (rng() % 1000) * 100000 + static_cast<std::uint64_t>(step);
      key_of[static_cast<std::size_t>(slot)] = key;
      heap.push(slot, key);
      model.emplace(key, slot);
    } else {
      heap.clear();
      model.clear();
    }
    ASSERT_EQ(heap.size(), model.size());
    if (!model.empty()) {
      ASSERT_EQ(heap.oldest(), model.begin()->second);
    }
    ASSERT_TRUE(heap.is_consistent());
  }
}

TEST(EvictionHeapDeathTest, RefusesASlotTwiceAndASlotThatIsNotThere) {
  EvictionHeap heap(2);
  heap.push(1, 5);
  EXPECT_DEATH(heap.push(1, 6), "enters the eviction order twice");
  EXPECT_DEATH(heap.remove(0), "without being in it");
}

}  // namespace
}  // namespace tandem::kv
