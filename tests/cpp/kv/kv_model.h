#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tandem/kv/page_pool.h"

namespace tandem::kv {

// The dumber truth: who holds what as plain lists, the tree as a map from whole prefixes to slots, every question
// answered by looking at everything. Slots are told to it where the pool is free to choose.
class KvModel {
 public:
  using Slot = std::int32_t;
  // Salt and all tokens up to the end of a page: what a page's content depends on.
  using Prefix = std::pair<std::string, std::vector<std::int32_t>>;

  KvModel(std::int32_t num_slots, std::int32_t page) : num_slots_(num_slots), page_(static_cast<std::size_t>(page)) {}

  void add(Slot slot, Holder holder) { handles_.emplace(slot, holder); }
  void drop(Slot slot, Holder holder) {
    handles_.erase(handles_.find({slot, holder}));
    if (!pinned(slot) && cached(slot)) {
      tree_.at(*cached(slot)).last_used = ++clock_;
    }
  }
  void retag(Slot slot, Holder from, Holder to) {
    handles_.erase(handles_.find({slot, from}));
    handles_.emplace(slot, to);
  }

  // Pages of the longest cached prefix.
  [[nodiscard]] std::vector<Slot> match(const std::string& salt, const std::vector<std::int32_t>& tokens) const {
    std::vector<Slot> slots;
    for (std::size_t end = page_; end <= tokens.size(); end += page_) {
      const auto it = tree_.find(prefix(salt, tokens, end));
      if (it == tree_.end()) {
        break;
      }
      slots.push_back(it->second.slot);
    }
    return slots;
  }

  // Offers the full pages of the first `num_tokens` tokens: up to the first that is there from elsewhere, or all.
  void commit(const std::string& salt, const std::vector<std::int32_t>& tokens, std::int64_t num_tokens,
              const std::vector<Slot>& slots, bool below_copies) {
    for (std::size_t i = 0; (i + 1) * page_ <= static_cast<std::size_t>(num_tokens); ++i) {
      Prefix key = prefix(salt, tokens, (i + 1) * page_);
      if (!tree_.contains(key)) {
        tree_.emplace(std::move(key), Page{slots[i], ++clock_});
        handles_.emplace(slots[i], Holder::Tree);
      } else if (tree_.at(key).slot != slots[i] && !below_copies) {
        return;
      }
    }
  }

  // Pages without a pin on them or below.
  [[nodiscard]] std::int64_t num_evictable() const {
    return std::ranges::count_if(tree_, [&](const auto& entry) { return !pinned_at_or_below(entry.first); });
  }

  // Removes the least recently used unpinned leaf, `n` times at most. Returns the slots freed.
  std::vector<Slot> evict(std::int64_t n) {
    std::vector<Slot> freed;
    for (; n > 0; --n) {
      auto oldest = tree_.end();
      for (auto it = tree_.begin(); it != tree_.end(); ++it) {
        if (!has_child(it->first) && !pinned(it->second.slot) &&
            (oldest == tree_.end() || it->second.last_used < oldest->second.last_used)) {
          oldest = it;
        }
      }
      if (oldest == tree_.end()) {
        break;
      }
      freed.push_back(oldest->second.slot);
      handles_.erase(handles_.find({oldest->second.slot, Holder::Tree}));
      tree_.erase(oldest);
    }
    return freed;
  }

  void clear() {
    for (const auto& [key, page] : tree_) {
      handles_.erase(handles_.find({page.slot, Holder::Tree}));
    }
    tree_.clear();
  }

  [[nodiscard]] PageState state(Slot slot) const {
    if (has(slot, Holder::Sequence) || has(slot, Holder::Step)) {
      return PageState::Held;
    }
    return has(slot, Holder::Lease) ? PageState::Leased : has(slot, Holder::Tree) ? PageState::Cached : PageState::Free;
  }
  [[nodiscard]] std::int32_t num_pending() const {
    std::int32_t n = 0;
    for (Slot slot = 0; slot < num_slots_; ++slot) {
      n += has(slot, Holder::Step) && !has(slot, Holder::Sequence) && !has(slot, Holder::Lease) ? 1 : 0;
    }
    return n;
  }
  [[nodiscard]] std::int64_t num_free() const {
    std::int64_t n = 0;
    for (Slot slot = 0; slot < num_slots_; ++slot) {
      n += state(slot) == PageState::Free ? 1 : 0;
    }
    return n;
  }
  [[nodiscard]] std::int64_t num_cached_pages() const { return static_cast<std::int64_t>(tree_.size()); }

 private:
  struct Page {
    Slot slot;
    std::uint64_t last_used;
  };

  [[nodiscard]] static Prefix prefix(const std::string& salt, const std::vector<std::int32_t>& tokens,
                                     std::size_t end) {
    return {salt, {tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(end)}};
  }
  [[nodiscard]] bool has(Slot slot, Holder holder) const { return handles_.contains({slot, holder}); }
  [[nodiscard]] bool pinned(Slot slot) const {
    return has(slot, Holder::Sequence) || has(slot, Holder::Step) || has(slot, Holder::Lease);
  }
  [[nodiscard]] std::optional<Prefix> cached(Slot slot) const {
    for (const auto& [key, page] : tree_) {
      if (page.slot == slot) {
        return key;
      }
    }
    return std::nullopt;
  }
  [[nodiscard]] static bool extends(const Prefix& longer, const Prefix& shorter) {
    return longer.first == shorter.first && longer.second.size() >= shorter.second.size() &&
           std::equal(shorter.second.begin(), shorter.second.end(), longer.second.begin());
  }
  [[nodiscard]] bool has_child(const Prefix& key) const {
    return std::ranges::any_of(tree_,
                               [&](const auto& entry) { return entry.first != key && extends(entry.first, key); });
  }
  [[nodiscard]] bool pinned_at_or_below(const Prefix& key) const {
    return std::ranges::any_of(
        tree_, [&](const auto& entry) { return extends(entry.first, key) && pinned(entry.second.slot); });
  }

  std::int32_t num_slots_;
  std::size_t page_;
  std::multiset<std::pair<Slot, Holder>> handles_;
  std::map<Prefix, Page> tree_;
  std::uint64_t clock_ = 0;
};

}  // namespace tandem::kv
