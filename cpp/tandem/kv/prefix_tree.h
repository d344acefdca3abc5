#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/kv/eviction_heap.h"
#include "tandem/kv/page_hashes.h"
#include "tandem/kv/page_pool.h"

namespace tandem::kv {

// A place in the tree: the node of the last page of some prefix, or the root. Holds nothing: the node may be evicted
// meanwhile, which `PrefixTree::is_valid` tells.
struct TreeCursor {
  SlotId slot;                   // -1: the root
  std::uint32_t generation = 0;  // of the node at that slot
  std::int64_t num_pages = 0;    // pages from the root to here
};

// A radix tree of whole pages, keyed by (parent page, tokens, namespace salt). Tokens are compared, not only hashed. It
// holds one handle of each page in it; a page without any other handle in its subtree is evictable. One node per slot,
// indexed by the slot, so nothing is allocated per page. Used by one thread, at most one per pool; the pool must
// outlive it.
class PrefixTree final : private PinListener {
 public:
  // Throws InvalidArgument unless tokens_per_page >= 1, and for a pool that has a tree already.
  PrefixTree(PagePool& pool, std::int32_t tokens_per_page);
  ~PrefixTree();
  PrefixTree(const PrefixTree&) = delete;
  PrefixTree& operator=(const PrefixTree&) = delete;

  // The longest run of whole cached pages that `tokens` starts with under `salt`, in order, each pinned by a handle for
  // `holder`. Throws InvalidArgument for a negative token id.
  [[nodiscard]] std::vector<PageRef> match(std::span<const TokenId> tokens, std::string_view salt = {},
                                           Holder holder = Holder::Sequence);
  // The same with hashes kept by the caller: hashes new full pages only, appends the handles to `pages` and returns the
  // place reached.
  TreeCursor match(std::span<const TokenId> tokens, PageHashes& hashes, Holder holder, std::vector<PageRef>& pages);
  // How many tokens `match` would cover, without touching any page. Its answer holds until the next call that changes
  // the tree.
  [[nodiscard]] std::int64_t probe(std::span<const TokenId> tokens, PageHashes& hashes) const;

  // Enters the full pages of `tokens`, held by `pages` in order, except where the tree already has a page with the same
  // prefix: that one stays, and the caller's copy stays the caller's. Returns how many pages entered. Throws
  // InvalidArgument if there are fewer handles than full pages, for a negative token id, and for a page of another pool
  // or in the tree with another prefix (pages before that one have entered then).
  std::int64_t insert(std::span<const TokenId> tokens, std::span<const PageRef> pages, std::string_view salt = {});
  // One page below `at`, which must be valid. `hash` is its chained hash, `salt` its namespace. Returns its place:
  // `entered` tells whether `page` is there or an earlier one with the same tokens.
  struct Insertion {
    TreeCursor at;
    bool entered = false;
  };
  Insertion insert(const TreeCursor& at, std::span<const TokenId> page_tokens, std::uint64_t hash,
                   std::string_view salt, const PageRef& page);

  // Frees up to `num_pages` pages that nobody else holds, the least recently used leaf first; returns how many. O(log
  // n) for each. A request for at most `num_evictable` pages is met in full.
  std::int64_t evict(std::int64_t num_pages);
  // Forgets every page; those that others hold live on with them. Sequences that began earlier never enter pages again
  // (`epoch`), so what was computed before a clear is never matched after it. O(num_slots).
  void clear();

  [[nodiscard]] bool is_valid(const TreeCursor& at) const;
  [[nodiscard]] const PagePool& pool() const { return pool_; }
  [[nodiscard]] std::int32_t tokens_per_page() const { return tokens_per_page_; }
  [[nodiscard]] std::int64_t num_pages() const { return num_pages_; }
  // Pages that `evict` can free now. O(1), exact.
  [[nodiscard]] std::int64_t num_evictable() const { return num_evictable_; }
  // Number of clears so far.
  [[nodiscard]] std::uint64_t epoch() const { return epoch_; }
  // Throws InvalidArgument for a slot outside the pool.
  [[nodiscard]] bool contains(SlotId slot) const { return pool_.num_handles(slot, Holder::Tree) != 0; }

  // Aborts unless nodes, index, eviction order and counts agree with each other and with the pool. O(num_slots).
  void check() const;

 private:
  struct alignas(64) Node {       // one cache line
    PageRef page;                 // empty: no node at this slot
    std::uint64_t hash = 0;       // chained
    std::uint64_t last_used = 0;  // clock when it entered or was last let go
    std::int32_t parent = 0;      // slot, or -1 - namespace at the first page
    std::int32_t num_children = 0;
    std::int32_t num_pinned = 0;   // itself if pinned, plus children with a pin in their subtree; 0: evictable
    std::uint32_t generation = 0;  // times a node here was removed
  };
  // Tells sequences apart that must not share pages. Recycled when its last first page goes.
  struct Namespace {
    std::string salt;
    std::int32_t num_first_pages = 0;
  };
  static constexpr std::int32_t kNone = -1;

  void on_pinned(SlotId slot) noexcept override;
  void on_unpinned(SlotId slot) noexcept override;

  [[nodiscard]] Node& node(std::int32_t slot) { return nodes_[static_cast<std::size_t>(slot)]; }
  [[nodiscard]] const Node& node(std::int32_t slot) const { return nodes_[static_cast<std::size_t>(slot)]; }
  [[nodiscard]] std::span<const TokenId> tokens_of(std::int32_t slot) const;

  [[nodiscard]] std::int32_t find_namespace(std::string_view salt) const;
  [[nodiscard]] std::int32_t add_namespace(std::string_view salt);
  void release_namespace(std::int32_t parent);

  // Slot of the child with these tokens, or kNone.
  [[nodiscard]] std::int32_t find(std::int32_t parent, std::uint64_t hash, std::span<const TokenId> tokens) const;
  void index_add(std::int32_t slot);
  void index_remove(std::int32_t slot);

  // Calls `visit(slot)` for each cached page that `tokens` starts with, from the first on.
  template <typename Visit>
  void walk(std::span<const TokenId> tokens, PageHashes& hashes, Visit visit) const;
  void prefetch_candidate(std::uint64_t hash) const;
  void add_leaf(std::int32_t slot, std::int32_t parent, std::span<const TokenId> page_tokens, std::uint64_t hash,
                const PageRef& page);
  void pin_up(std::int32_t slot);
  void unpin_up(std::int32_t slot);
  void remove_leaf(std::int32_t slot);

  PagePool& pool_;
  std::int32_t tokens_per_page_;
  std::vector<Node> nodes_;            // by slot
  std::unique_ptr<TokenId[]> tokens_;  // [num_slots, tokens_per_page], written page by page
  std::vector<std::int32_t> index_;    // open addressing, linear probing: slots by node hash, kNone where empty
  std::size_t index_mask_ = 0;
  EvictionHeap evictable_leaves_;
  std::vector<Namespace> namespaces_;
  std::vector<std::int32_t> free_namespaces_;
  std::map<std::string, std::int32_t, std::less<>> namespace_ids_;
  std::uint64_t clock_ = 0;
  std::uint64_t epoch_ = 0;
  std::int64_t num_pages_ = 0;
  std::int64_t num_evictable_ = 0;
};

}  // namespace tandem::kv
