#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tandem::kv {

// Slots ordered by when they were last used: a binary heap that can also remove from the middle. O(log n) for each
// change, no allocation after construction.
class EvictionHeap {
 public:
  explicit EvictionHeap(std::size_t num_slots);

  void push(std::int32_t slot, std::uint64_t last_used);
  void remove(std::int32_t slot);
  // The slot used longest ago. Not for an empty heap.
  [[nodiscard]] std::int32_t oldest() const { return entries_.front().slot; }

  [[nodiscard]] bool contains(std::int32_t slot) const { return place_[static_cast<std::size_t>(slot)] >= 0; }
  [[nodiscard]] std::size_t size() const { return entries_.size(); }
  [[nodiscard]] bool empty() const { return entries_.empty(); }
  void clear();
  // True if places and order are consistent. O(n).
  [[nodiscard]] bool is_consistent() const;

 private:
  struct Entry {
    std::uint64_t last_used;
    std::int32_t slot;
  };
  void put(std::size_t at, Entry entry);
  void sift_up(std::size_t at, Entry entry);
  void sift_down(std::size_t at, Entry entry);

  std::vector<Entry> entries_;
  std::vector<std::int32_t> place_;  // by slot: where it is in `entries_`, or -1
};

}  // namespace tandem::kv
