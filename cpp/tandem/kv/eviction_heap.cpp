#include "tandem/kv/eviction_heap.h"

#include "tandem/base/check.h"

namespace tandem::kv {

EvictionHeap::EvictionHeap(std::size_t num_slots) : place_(num_slots, -1) { entries_.reserve(num_slots); }

void EvictionHeap::push(std::int32_t slot, std::uint64_t last_used) {
  TANDEM_CHECK(!contains(slot), "a slot enters the eviction order twice");
  entries_.emplace_back();
  sift_up(entries_.size() - 1, Entry{last_used, slot});
}

void EvictionHeap::remove(std::int32_t slot) {
  TANDEM_CHECK(contains(slot), "a slot leaves the eviction order without being in it");
  const auto at = static_cast<std::size_t>(place_[static_cast<std::size_t>(slot)]);
  place_[static_cast<std::size_t>(slot)] = -1;
  const Entry last = entries_.back();
  entries_.pop_back();
  if (at == entries_.size()) {
    return;
  }
  if (at > 0 && last.last_used < entries_[(at - 1) / 2].last_used) {
    sift_up(at, last);
  } else {
    sift_down(at, last);
  }
}

void EvictionHeap::clear() {
  for (const Entry& entry : entries_) {
    place_[static_cast<std::size_t>(entry.slot)] = -1;
  }
  entries_.clear();
}

bool EvictionHeap::is_consistent() const {
  std::size_t num_placed = 0;
  for (const std::int32_t place : place_) {
    num_placed += place >= 0 ? 1 : 0;
  }
  if (num_placed != entries_.size()) {
    return false;
  }
  for (std::size_t at = 0; at < entries_.size(); ++at) {
    if (place_[static_cast<std::size_t>(entries_[at].slot)] != static_cast<std::int32_t>(at) ||
        entries_[at].last_used < entries_[at == 0 ? 0 : (at - 1) / 2].last_used) {
      return false;
    }
  }
  return true;
}

void EvictionHeap::put(std::size_t at, Entry entry) {
  entries_[at] = entry;
  place_[static_cast<std::size_t>(entry.slot)] = static_cast<std::int32_t>(at);
}

void EvictionHeap::sift_up(std::size_t at, Entry entry) {
  while (at > 0) {
    const std::size_t parent = (at - 1) / 2;
    if (entries_[parent].last_used <= entry.last_used) {
      break;
    }
    put(at, entries_[parent]);
    at = parent;
  }
  put(at, entry);
}

void EvictionHeap::sift_down(std::size_t at, Entry entry) {
  while (true) {
    std::size_t child = 2 * at + 1;
    if (child >= entries_.size()) {
      break;
    }
    if (child + 1 < entries_.size() && entries_[child + 1].last_used < entries_[child].last_used) {
      ++child;
    }
    if (entry.last_used <= entries_[child].last_used) {
      break;
    }
    put(at, entries_[child]);
    at = child;
  }
  put(at, entry);
}

}  // namespace tandem::kv
