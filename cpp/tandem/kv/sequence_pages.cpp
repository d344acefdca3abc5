#include "tandem/kv/sequence_pages.h"

#include <algorithm>
#include <utility>

#include "tandem/base/check.h"

namespace tandem::kv {

SequencePages::SequencePages(PagePool& pool, PrefixTree* tree, std::int32_t tokens_per_page, std::string salt)
    : pool_(&pool), tree_(tree), tokens_per_page_(tokens_per_page), hashes_(tokens_per_page, std::move(salt)) {
  if (tree != nullptr && tree->tokens_per_page() != tokens_per_page) {
    throw InvalidArgument("SequencePages: tokens_per_page is " + std::to_string(tokens_per_page) + ", the tree's is " +
                          std::to_string(tree->tokens_per_page()));
  }
}

SequencePages::SequencePages(SequencePages&& other) noexcept
    : pool_(other.pool_),
      tree_(other.tree_),
      tokens_per_page_(other.tokens_per_page_),
      pages_(std::move(other.pages_)),
      committed_(std::exchange(other.committed_, 0)),
      computed_(std::exchange(other.computed_, 0)),
      hashes_(std::move(other.hashes_)),
      cursor_(std::exchange(other.cursor_, {})),
      tree_epoch_(other.tree_epoch_) {
  other.pages_.clear();
}

SequencePages::~SequencePages() { release(); }

void SequencePages::start() {
  if (tree_ != nullptr) {
    tree_epoch_ = tree_->epoch();
  }
}

std::int64_t SequencePages::attach_prefix(std::span<const TokenId> tokens) {
  if (!pages_.empty()) {
    throw InvalidArgument("a prefix can only be attached to an empty sequence, this one has " +
                          std::to_string(pages_.size()) + " pages");
  }
  start();
  if (tree_ != nullptr) {
    cursor_ = tree_->match(tokens, hashes_, Holder::Sequence, pages_);
    committed_ = computed_ = capacity();
  }
  return committed_;
}

std::int64_t SequencePages::probe_prefix(std::span<const TokenId> tokens) {
  return tree_ == nullptr ? 0 : tree_->probe(tokens, hashes_);
}

std::int64_t SequencePages::pages_to_grow(std::int64_t num_tokens) const {
  const std::int64_t num_needed = (num_tokens + tokens_per_page_ - 1) / tokens_per_page_;
  return std::max<std::int64_t>(num_needed - num_pages(), 0);
}

bool SequencePages::grow_by_pages(std::int64_t num_tokens) {
  const std::int64_t num_new = pages_to_grow(num_tokens);
  const std::int64_t num_short = num_new - pool_->num_free();
  if (num_short > 0) {
    if (tree_ == nullptr || num_short > tree_->num_evictable()) {
      return false;
    }
    const std::int64_t num_evicted = tree_->evict(num_short);
    TANDEM_CHECK(num_evicted == num_short, "the tree evicted fewer pages than it called evictable");
  }
  if (pages_.empty()) {
    start();
  }
  for (std::int64_t i = 0; i < num_new; ++i) {
    std::optional<PageRef> page = pool_->allocate(Holder::Sequence);
    TANDEM_CHECK(page.has_value(), "the pool ran out of pages that it had counted as free");
    pages_.push_back(std::move(*page));
  }
  return true;
}

void SequencePages::refuse_computed(std::int64_t num_tokens) const {
  throw InvalidArgument("computed is " + std::to_string(num_tokens) + ", must be from " + std::to_string(computed_) +
                        " (its value so far) to " + std::to_string(capacity()) + " (the capacity)");
}

void SequencePages::refuse_tokens(std::size_t num_tokens) const {
  throw InvalidArgument("commit is given " + std::to_string(num_tokens) + " tokens, needs the " +
                        std::to_string(computed_) + " computed ones");
}

void SequencePages::commit_full_pages(std::span<const TokenId> tokens) {
  const std::int64_t num_full = computed_ / tokens_per_page_;
  // Hashed before anything changes: tokens that cannot be hashed are refused here.
  (void)hashes_.extend(tokens.first(static_cast<std::size_t>(num_full * tokens_per_page_)));
  committed_ = num_full * tokens_per_page_;
  enter(tokens, /*below_copies=*/false);
}

void SequencePages::enter_all(std::span<const TokenId> tokens) { enter(tokens, /*below_copies=*/true); }

// A page held here must not lie below one that nobody holds: that one could not be evicted, and the sequence would keep
// more of the pool than its own pages. So the chain stops at the first page that the tree has from elsewhere, is tried
// again there when more pages are full, and goes on below copies only when the sequence is about to let go.
void SequencePages::enter(std::span<const TokenId> tokens, bool below_copies) {
  if (tree_ == nullptr || tree_->epoch() != tree_epoch_ || cursor_.num_pages * tokens_per_page_ == committed_) {
    return;
  }
  const auto page_size = static_cast<std::size_t>(tokens_per_page_);
  const std::span<const std::uint64_t> chain = hashes_.extend(tokens.first(static_cast<std::size_t>(committed_)));
  while (cursor_.num_pages * tokens_per_page_ < committed_) {
    const auto i = static_cast<std::size_t>(cursor_.num_pages);
    const TreeCursor at =
        tree_->insert(cursor_, tokens.subspan(i * page_size, page_size), chain[i], hashes_.salt(), pages_[i]).at;
    if (at.slot != pages_[i].slot() && !below_copies) {
      return;
    }
    cursor_ = at;
  }
}

void SequencePages::release() {
  // From the last page to the first: the order that the tree follows most cheaply.
  while (!pages_.empty()) {
    pages_.pop_back();
  }
  cursor_ = {};
  committed_ = 0;
  computed_ = 0;
}

void SequencePages::release_to_step(std::vector<PageRef>& pages) {
  for (PageRef& page : pages_) {
    page.retag(Holder::Step);
    pages.push_back(std::move(page));
  }
  release();
}

void SequencePages::reserve(std::int64_t num_pages) {
  pages_.reserve(static_cast<std::size_t>(num_pages));
  hashes_.reserve(num_pages);
}

}  // namespace tandem::kv
