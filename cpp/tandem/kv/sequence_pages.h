#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tandem/kv/page_hashes.h"
#include "tandem/kv/page_pool.h"
#include "tandem/kv/prefix_tree.h"

namespace tandem::kv {

// The pages of one sequence, in token order, and how far they are filled, in tokens:
//   committed: full pages offered to the prefix tree (a multiple of the page);
//   computed:  entries written by completed steps;
//   capacity:  pages held times tokens_per_page.
// Always committed <= computed <= capacity. Lives as long as the request: after `release` it is empty and may start
// again, with its page hashes kept.
class SequencePages {
 public:
  // `tree` is nullptr where prefixes are not cached. Throws InvalidArgument unless tokens_per_page >= 1 and equals the
  // tree's.
  SequencePages(PagePool& pool, PrefixTree* tree, std::int32_t tokens_per_page, std::string salt = {});
  ~SequencePages();
  SequencePages(SequencePages&& other) noexcept;
  SequencePages& operator=(SequencePages&&) = delete;
  SequencePages(const SequencePages&) = delete;
  SequencePages& operator=(const SequencePages&) = delete;

  // Pins the longest cached prefix of `tokens` and takes its pages as the first ones. Only for an empty sequence
  // (else InvalidArgument). Returns its length in tokens, now committed, computed and capacity. Undone by `release`.
  std::int64_t attach_prefix(std::span<const TokenId> tokens);
  // What `attach_prefix` would return, without pinning anything.
  [[nodiscard]] std::int64_t probe_prefix(std::span<const TokenId> tokens);

  // Makes room for `num_tokens` tokens in all, evicting from the tree what free pages do not cover. All or nothing:
  // false if free and evictable pages do not suffice, and then nothing has changed.
  [[nodiscard]] bool grow(std::int64_t num_tokens) { return num_tokens <= capacity() || grow_by_pages(num_tokens); }
  // Pages that `grow(num_tokens)` would have to obtain.
  [[nodiscard]] std::int64_t pages_to_grow(std::int64_t num_tokens) const;

  // A completed step wrote the entries below `num_tokens`: never less than before, never above capacity
  // (else InvalidArgument).
  void set_computed(std::int64_t num_tokens) {
    if (num_tokens < computed_ || num_tokens > capacity()) [[unlikely]] {
      refuse_computed(num_tokens);
    }
    computed_ = num_tokens;
  }
  // Offers every full page below `computed` to the tree. `tokens` are the sequence's tokens from 0, at least `computed`
  // of them, the same as in earlier calls: throws InvalidArgument for fewer, or for a negative token. Pages that the
  // tree has already keep their own slots here, and those behind them wait for `enter_all`, unless the tree's copy goes
  // first.
  void commit(std::span<const TokenId> tokens) {
    if (static_cast<std::int64_t>(tokens.size()) < computed_) [[unlikely]] {
      refuse_tokens(tokens.size());
    }
    if (computed_ - committed_ >= tokens_per_page_) {
      commit_full_pages(tokens);
    }
  }
  // Enters the committed pages that wait, below the tree's copies. To be called right before a release: until then the
  // copies could not be evicted.
  void enter_all(std::span<const TokenId> tokens);

  // Drops every page.
  void release();
  // Hands every page to a step in flight that still uses it: appends them to `pages` with Holder::Step.
  void release_to_step(std::vector<PageRef>& pages);

  [[nodiscard]] const PagePool& pool() const { return *pool_; }
  [[nodiscard]] std::int64_t committed() const { return committed_; }
  [[nodiscard]] std::int64_t computed() const { return computed_; }
  [[nodiscard]] std::int64_t capacity() const { return num_pages() * tokens_per_page_; }
  [[nodiscard]] std::int64_t num_pages() const { return static_cast<std::int64_t>(pages_.size()); }
  [[nodiscard]] std::int32_t tokens_per_page() const { return tokens_per_page_; }
  [[nodiscard]] std::span<const PageRef> pages() const { return pages_; }
  [[nodiscard]] SlotId slot(std::int64_t page_index) const {
    return pages_.at(static_cast<std::size_t>(page_index)).slot();
  }
  [[nodiscard]] const std::string& salt() const { return hashes_.salt(); }

  // Reserves memory so that growing to `num_pages` pages allocates none.
  void reserve(std::int64_t num_pages);

 private:
  void start();
  [[nodiscard]] bool grow_by_pages(std::int64_t num_tokens);
  [[noreturn]] void refuse_computed(std::int64_t num_tokens) const;
  [[noreturn]] void refuse_tokens(std::size_t num_tokens) const;
  void commit_full_pages(std::span<const TokenId> tokens);
  void enter(std::span<const TokenId> tokens, bool below_copies);

  PagePool* pool_;
  PrefixTree* tree_;
  std::int32_t tokens_per_page_;
  // What every step looks at lies together.
  std::vector<PageRef> pages_;
  std::int64_t committed_ = 0;
  std::int64_t computed_ = 0;
  PageHashes hashes_;
  TreeCursor cursor_;             // where the next committed page enters
  std::uint64_t tree_epoch_ = 0;  // of the tree when the first page came
};

}  // namespace tandem::kv
