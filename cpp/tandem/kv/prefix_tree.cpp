#include "tandem/kv/prefix_tree.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "tandem/base/check.h"

namespace tandem::kv {
namespace {

// Parents of first pages are namespaces, as negative numbers beside the slots.
std::int32_t parent_of_namespace(std::int32_t id) { return -1 - id; }
std::size_t namespace_of_parent(std::int32_t parent) { return static_cast<std::size_t>(-1 - parent); }

}  // namespace

PrefixTree::PrefixTree(PagePool& pool, std::int32_t tokens_per_page)
    : pool_(pool),
      tokens_per_page_(tokens_per_page),
      nodes_(static_cast<std::size_t>(pool.num_slots())),
      evictable_leaves_(static_cast<std::size_t>(pool.num_slots())) {
  if (tokens_per_page < 1) {
    throw InvalidArgument("PrefixTree: tokens_per_page is " + std::to_string(tokens_per_page) + ", must be at least 1");
  }
  tokens_ = std::make_unique_for_overwrite<TokenId[]>(nodes_.size() * static_cast<std::size_t>(tokens_per_page));
  index_.assign(std::bit_ceil(2 * nodes_.size()), kNone);
  index_mask_ = index_.size() - 1;
  pool.set_pin_listener(this);
}

PrefixTree::~PrefixTree() {
  pool_.set_pin_listener(nullptr);
  nodes_.clear();
}

std::span<const TokenId> PrefixTree::tokens_of(std::int32_t slot) const {
  const auto size = static_cast<std::size_t>(tokens_per_page_);
  return {tokens_.get() + static_cast<std::size_t>(slot) * size, size};
}

std::vector<PageRef> PrefixTree::match(std::span<const TokenId> tokens, std::string_view salt, Holder holder) {
  PageHashes hashes(tokens_per_page_, std::string(salt));
  std::vector<PageRef> pages;
  (void)match(tokens, hashes, holder, pages);
  return pages;
}

TreeCursor PrefixTree::match(std::span<const TokenId> tokens, PageHashes& hashes, Holder holder,
                             std::vector<PageRef>& pages) {
  TreeCursor at;
  // From the root down, so that each pin finds its parent pinned and stops there.
  walk(tokens, hashes, [&](std::int32_t slot) {
    pages.push_back(node(slot).page.share(holder));
    at = TreeCursor{SlotId{slot}, node(slot).generation, at.num_pages + 1};
  });
  return at;
}

std::int64_t PrefixTree::probe(std::span<const TokenId> tokens, PageHashes& hashes) const {
  std::int64_t num_tokens = 0;
  walk(tokens, hashes, [&](std::int32_t) { num_tokens += tokens_per_page_; });
  return num_tokens;
}

template <typename Visit>
void PrefixTree::walk(std::span<const TokenId> tokens, PageHashes& hashes, Visit visit) const {
  TANDEM_CHECK(hashes.tokens_per_page() == tokens_per_page_, "page hashes of another page size");
  const std::span<const std::uint64_t> chain = hashes.extend(tokens);
  const std::int32_t id = find_namespace(hashes.salt());
  if (id == kNone) {
    return;
  }
  const auto page_size = static_cast<std::size_t>(tokens_per_page_);
  std::int32_t parent = parent_of_namespace(id);
  for (std::size_t depth = 0; depth < chain.size(); ++depth) {
    if (depth + 2 < chain.size()) {
      __builtin_prefetch(&index_[chain[depth + 2] & index_mask_]);
    }
    if (depth + 1 < chain.size()) {
      prefetch_candidate(chain[depth + 1]);
    }
    parent = find(parent, chain[depth], tokens.subspan(depth * page_size, page_size));
    if (parent == kNone) {
      return;
    }
    visit(parent);
  }
}

// The next page's node and tokens, most likely, while this page's tokens are compared: the walk is bound by misses.
void PrefixTree::prefetch_candidate(std::uint64_t hash) const {
  const std::int32_t slot = index_[hash & index_mask_];
  if (slot == kNone) {
    return;
  }
  __builtin_prefetch(&node(slot));
  constexpr std::size_t kLine = 64 / sizeof(TokenId);
  const std::span<const TokenId> tokens = tokens_of(slot);
  for (std::size_t at = 0; at < tokens.size(); at += kLine) {
    __builtin_prefetch(tokens.data() + at);
  }
}

std::int64_t PrefixTree::insert(std::span<const TokenId> tokens, std::span<const PageRef> pages,
                                std::string_view salt) {
  PageHashes hashes(tokens_per_page_, std::string(salt));
  const std::span<const std::uint64_t> chain = hashes.extend(tokens);
  if (pages.size() < chain.size()) {
    throw InvalidArgument("PrefixTree.insert: " + std::to_string(pages.size()) + " pages for the " +
                          std::to_string(chain.size()) + " full pages of " + std::to_string(tokens.size()) + " tokens");
  }
  const auto page_size = static_cast<std::size_t>(tokens_per_page_);
  TreeCursor at;
  std::int64_t num_entered = 0;
  for (std::size_t i = 0; i < chain.size(); ++i) {
    const Insertion insertion = insert(at, tokens.subspan(i * page_size, page_size), chain[i], salt, pages[i]);
    at = insertion.at;
    num_entered += insertion.entered ? 1 : 0;
  }
  return num_entered;
}

PrefixTree::Insertion PrefixTree::insert(const TreeCursor& at, std::span<const TokenId> page_tokens, std::uint64_t hash,
                                         std::string_view salt, const PageRef& page) {
  TANDEM_CHECK(is_valid(at), "a page enters the tree below a page that has left it");
  const bool first = at.num_pages == 0;
  const std::int32_t space = first ? find_namespace(salt) : kNone;
  const bool new_space = first && space == kNone;
  std::int32_t parent = first ? parent_of_namespace(space) : at.slot.value();
  std::int32_t slot = new_space ? kNone : find(parent, hash, page_tokens);
  const bool entered = slot == kNone;
  if (entered) {
    slot = page.slot().value();
    if (page.pool() != &pool_) {
      throw InvalidArgument("PrefixTree.insert: the handle of slot " + std::to_string(slot) + " is of another pool");
    }
    if (node(slot).page) {
      throw InvalidArgument("PrefixTree.insert: slot " + std::to_string(slot) +
                            " is in the tree already, with another prefix");
    }
    if (new_space) {
      parent = parent_of_namespace(add_namespace(salt));
    }
    add_leaf(slot, parent, page_tokens, hash, page);
  }
  return {TreeCursor{SlotId{slot}, node(slot).generation, at.num_pages + 1}, entered};
}

void PrefixTree::add_leaf(std::int32_t slot, std::int32_t parent, std::span<const TokenId> page_tokens,
                          std::uint64_t hash, const PageRef& page) {
  Node& leaf = node(slot);
  leaf.page = page.share(Holder::Tree);
  leaf.hash = hash;
  leaf.last_used = ++clock_;
  leaf.parent = parent;
  leaf.num_children = 0;
  leaf.num_pinned = 0;
  std::copy(page_tokens.begin(), page_tokens.end(),
            tokens_.get() + static_cast<std::size_t>(slot) * static_cast<std::size_t>(tokens_per_page_));
  index_add(slot);
  if (parent < 0) {
    ++namespaces_[namespace_of_parent(parent)].num_first_pages;
  } else {
    Node& above = node(parent);
    if (above.num_children++ == 0 && evictable_leaves_.contains(parent)) {
      evictable_leaves_.remove(parent);
    }
  }
  ++num_pages_;
  ++num_evictable_;
  // `page` is a handle beside the tree's, so the new node is pinned.
  pin_up(slot);
}

std::int64_t PrefixTree::evict(std::int64_t num_pages) {
  std::int64_t num_evicted = 0;
  for (; num_evicted < num_pages && !evictable_leaves_.empty(); ++num_evicted) {
    remove_leaf(evictable_leaves_.oldest());
  }
  return num_evicted;
}

void PrefixTree::remove_leaf(std::int32_t slot) {
  evictable_leaves_.remove(slot);
  index_remove(slot);
  Node& leaf = node(slot);
  if (leaf.parent < 0) {
    release_namespace(leaf.parent);
  } else {
    Node& above = node(leaf.parent);
    if (--above.num_children == 0 && above.num_pinned == 0) {
      evictable_leaves_.push(leaf.parent, above.last_used);
    }
  }
  ++leaf.generation;
  --num_pages_;
  --num_evictable_;
  leaf.page.reset();
}

void PrefixTree::clear() {
  ++epoch_;
  evictable_leaves_.clear();
  std::fill(index_.begin(), index_.end(), kNone);
  namespaces_.clear();
  free_namespaces_.clear();
  namespace_ids_.clear();
  num_pages_ = 0;
  num_evictable_ = 0;
  for (Node& each : nodes_) {
    if (each.page) {
      ++each.generation;
      each.page.reset();
    }
  }
}

bool PrefixTree::is_valid(const TreeCursor& at) const {
  if (at.num_pages == 0) {
    return true;
  }
  const Node& there = node(at.slot.value());
  return there.page && there.generation == at.generation;
}

void PrefixTree::on_pinned(SlotId slot) noexcept { pin_up(slot.value()); }

void PrefixTree::on_unpinned(SlotId slot) noexcept {
  node(slot.value()).last_used = ++clock_;
  unpin_up(slot.value());
}

// A sequence that keeps its own copy of a page may enter pages below the tree's copy, so a pinned page does not imply
// pinned ancestors. Both walks stop at the first ancestor whose answer does not change: at once when pins come from the
// root down and go from the leaf up, which is the order of matches and releases.
void PrefixTree::pin_up(std::int32_t slot) {
  while (slot >= 0) {
    Node& each = node(slot);
    if (each.num_pinned++ != 0) {
      return;
    }
    --num_evictable_;
    if (evictable_leaves_.contains(slot)) {
      evictable_leaves_.remove(slot);
    }
    slot = each.parent;
  }
}

void PrefixTree::unpin_up(std::int32_t slot) {
  while (slot >= 0) {
    Node& each = node(slot);
    if (--each.num_pinned != 0) {
      return;
    }
    ++num_evictable_;
    if (each.num_children == 0) {
      evictable_leaves_.push(slot, each.last_used);
    }
    slot = each.parent;
  }
}

std::int32_t PrefixTree::find_namespace(std::string_view salt) const {
  const auto it = namespace_ids_.find(salt);
  return it == namespace_ids_.end() ? kNone : it->second;
}

std::int32_t PrefixTree::add_namespace(std::string_view salt) {
  auto id = static_cast<std::int32_t>(namespaces_.size());
  if (free_namespaces_.empty()) {
    namespaces_.emplace_back();
  } else {
    id = free_namespaces_.back();
    free_namespaces_.pop_back();
  }
  namespaces_[static_cast<std::size_t>(id)].salt = salt;
  namespace_ids_.emplace(salt, id);
  return id;
}

void PrefixTree::release_namespace(std::int32_t parent) {
  Namespace& space = namespaces_[namespace_of_parent(parent)];
  if (--space.num_first_pages == 0) {
    namespace_ids_.erase(space.salt);
    space.salt.clear();
    free_namespaces_.push_back(static_cast<std::int32_t>(namespace_of_parent(parent)));
  }
}

std::int32_t PrefixTree::find(std::int32_t parent, std::uint64_t hash, std::span<const TokenId> tokens) const {
  for (std::size_t at = hash & index_mask_; index_[at] != kNone; at = (at + 1) & index_mask_) {
    const std::int32_t slot = index_[at];
    const Node& each = node(slot);
    if (each.hash == hash && each.parent == parent &&
        std::memcmp(tokens_of(slot).data(), tokens.data(), tokens.size_bytes()) == 0) {
      return slot;
    }
  }
  return kNone;
}

void PrefixTree::index_add(std::int32_t slot) {
  std::size_t at = node(slot).hash & index_mask_;
  while (index_[at] != kNone) {
    at = (at + 1) & index_mask_;
  }
  index_[at] = slot;
}

void PrefixTree::index_remove(std::int32_t slot) {
  std::size_t hole = node(slot).hash & index_mask_;
  while (index_[hole] != slot) {
    TANDEM_CHECK(index_[hole] != kNone, "a page of the tree is missing from its index");
    hole = (hole + 1) & index_mask_;
  }
  // Moves back what probed over the hole, so that no search stops short of it.
  for (std::size_t at = (hole + 1) & index_mask_; index_[at] != kNone; at = (at + 1) & index_mask_) {
    const std::size_t home = node(index_[at]).hash & index_mask_;
    if (((at - home) & index_mask_) >= ((at - hole) & index_mask_)) {
      index_[hole] = index_[at];
      hole = at;
    }
  }
  index_[hole] = kNone;
}

void PrefixTree::check() const {
  std::vector<std::int32_t> num_children(nodes_.size(), 0);
  std::vector<std::int32_t> num_pinned(nodes_.size(), 0);
  std::vector<std::int32_t> num_first_pages(namespaces_.size(), 0);
  std::int64_t num_nodes = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Node& each = nodes_[i];
    const auto slot = static_cast<std::int32_t>(i);
    TANDEM_CHECK(static_cast<bool>(each.page) == (pool_.num_handles(SlotId{slot}, Holder::Tree) != 0),
                 "tree and pool disagree about slot " + std::to_string(slot));
    if (!each.page) {
      continue;
    }
    ++num_nodes;
    TANDEM_CHECK(each.page.slot().value() == slot, "a node holds another slot's page");
    TANDEM_CHECK(find(each.parent, each.hash, tokens_of(slot)) == slot, "a page cannot be found by its own tokens");
    if (each.parent < 0) {
      TANDEM_CHECK(
          each.hash == hash_page(hash_salt(namespaces_.at(namespace_of_parent(each.parent)).salt), tokens_of(slot)),
          "a first page's hash is not that of its namespace and tokens");
      ++num_first_pages[namespace_of_parent(each.parent)];
    } else {
      TANDEM_CHECK(static_cast<bool>(node(each.parent).page), "a page of the tree has no parent in it");
      TANDEM_CHECK(each.hash == hash_page(node(each.parent).hash, tokens_of(slot)),
                   "a page's hash is not that of its prefix");
      ++num_children[static_cast<std::size_t>(each.parent)];
    }
    if (pool_.is_pinned(SlotId{slot})) {
      for (std::int32_t up = slot; up >= 0 && num_pinned[static_cast<std::size_t>(up)]++ == 0;) {
        up = node(up).parent;
      }
    }
  }
  std::int64_t num_evictable = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Node& each = nodes_[i];
    const bool leaf_in_order = each.page && num_pinned[i] == 0 && num_children[i] == 0;
    TANDEM_CHECK(evictable_leaves_.contains(static_cast<std::int32_t>(i)) == leaf_in_order,
                 "the eviction order is not the set of unpinned leaves");
    if (each.page) {
      num_evictable += num_pinned[i] == 0 ? 1 : 0;
      TANDEM_CHECK(each.num_children == num_children[i], "a child count is wrong");
      TANDEM_CHECK(each.num_pinned == num_pinned[i], "a pin count is wrong");
    }
  }
  for (std::size_t i = 0; i < namespaces_.size(); ++i) {
    TANDEM_CHECK(namespaces_[i].num_first_pages == num_first_pages[i], "a namespace's page count is wrong");
  }
  const auto num_indexed = static_cast<std::int64_t>(
      std::count_if(index_.begin(), index_.end(), [](std::int32_t slot) { return slot != kNone; }));
  TANDEM_CHECK(num_indexed == num_nodes && num_nodes == num_pages_, "the index has pages that the tree has not");
  TANDEM_CHECK(num_evictable == num_evictable_, "the evictable count is wrong");
  TANDEM_CHECK(evictable_leaves_.is_consistent(), "the eviction order is broken");
}

}  // namespace tandem::kv
