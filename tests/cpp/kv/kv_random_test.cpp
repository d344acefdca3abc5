#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kv/kv_model.h"
#include "tandem/kv/page_pool.h"
#include "tandem/kv/prefix_tree.h"
#include "tandem/kv/sequence_pages.h"

namespace tandem::kv {
namespace {

constexpr std::uint64_t kSeed = 20240607;
constexpr std::uint64_t kPoison = 0xdeadbeefdeadbeef;

// What a cache entry holds: a value of all tokens up to its own.
std::uint64_t entry_value(const std::string& salt, const std::vector<TokenId>& tokens, std::size_t index) {
  std::uint64_t value = std::hash<std::string>{}(salt);
  for (std::size_t i = 0; i <= index; ++i) {
    value = value * 1099511628211ULL + static_cast<std::uint64_t>(tokens[i]) + 1;
  }
  return value;
}

struct Sequence {
  std::string salt;
  std::vector<TokenId> tokens;
  SequencePages pages;
  std::uint64_t epoch = 0;  // clears seen when its first page came
  std::vector<std::int32_t> slots;
};

// Random operations on a pool, its tree and sequences beside the naive model, with a fake engine that writes a
// recognisable value for each token and poisons every page it is handed.
class Simulation {
 public:
  Simulation(std::uint64_t seed, std::int32_t num_slots, std::int32_t page)
      : rng_(seed), page_(page), pool_(num_slots), tree_(pool_, page), model_(num_slots, page) {
    memory_.assign(static_cast<std::size_t>(num_slots * page), kPoison);
  }

  void step() {
    switch (below(14)) {
      case 0:
      case 1:
        return arrive();
      case 2:
      case 3:
      case 4:
        return grow();
      case 5:
      case 6:
      case 7:
        return compute();
      case 8:
        return finish();
      case 9:
        return preempt();
      case 10:
        return complete_step();
      case 11:
        return lease();
      case 12:
        return end_lease();
      default:
        return below(40) == 0 ? clear() : evict();
    }
  }

  void verify() {
    pool_.check();
    tree_.check();
    for (std::int32_t slot = 0; slot < pool_.num_slots(); ++slot) {
      ASSERT_EQ(pool_.state(SlotId{slot}), model_.state(slot)) << "slot " << slot;
    }
    ASSERT_EQ(pool_.num_free(), model_.num_free());
    ASSERT_EQ(pool_.num_pending(), model_.num_pending());
    ASSERT_EQ(tree_.num_pages(), model_.num_cached_pages());
    ASSERT_EQ(tree_.num_evictable(), model_.num_evictable());
    for (const auto& each : sequences_) {
      const SequencePages& pages = each->pages;
      ASSERT_LE(pages.committed(), pages.computed());
      ASSERT_LE(pages.computed(), pages.capacity());
      for (std::int64_t i = 0; i < pages.num_pages(); ++i) {
        ASSERT_EQ(pages.slot(i).value(), each->slots[static_cast<std::size_t>(i)]);
      }
      for (std::int64_t i = 0; i < pages.computed(); ++i) {
        ASSERT_EQ(entry(pages, i), entry_value(each->salt, each->tokens, static_cast<std::size_t>(i)))
            << "token " << i << " of " << pages.computed();
      }
    }
  }

  void drain() {
    while (!sequences_.empty()) {
      finish();
    }
    while (!steps_.empty()) {
      complete_step();
    }
    while (!leases_.empty()) {
      end_lease();
    }
    const Ledger idle = pool_.ledger();
    ASSERT_EQ(idle.free + idle.cached, idle.total);
    ASSERT_EQ(tree_.num_evictable(), idle.cached);
    tree_.clear();
    ASSERT_EQ(pool_.num_free(), pool_.num_slots());
  }

  [[nodiscard]] std::int64_t num_hits() const { return num_hits_; }
  [[nodiscard]] std::int64_t num_evicted() const { return num_evicted_; }
  [[nodiscard]] std::int64_t num_refused() const { return num_refused_; }
  [[nodiscard]] std::int64_t num_own_copies() const { return num_own_copies_; }

 private:
  std::uint64_t below(std::uint64_t n) { return rng_() % n; }

  std::uint64_t& entry(const SequencePages& pages, std::int64_t index) {
    return memory_[pages.slot(index / page_).index() * static_cast<std::size_t>(page_) +
                   static_cast<std::size_t>(index % page_)];
  }

  void arrive() {
    if (sequences_.size() >= 5) {
      return;
    }
    const std::string salt = below(4) == 0 ? "other" : "";
    std::vector<TokenId> tokens;
    if (!prompts_.empty() && below(6) != 0) {
      // The last prompt again, often while its first copy is still being computed, or a part of an older one.
      const bool again = below(2) == 0;
      tokens = again ? prompts_.back() : prompts_[below(prompts_.size())];
      tokens.resize(again ? tokens.size() : below(tokens.size() + 1));
    }
    const std::size_t num_tokens = tokens.size() + 1 + below(static_cast<std::uint64_t>(3 * page_));
    while (tokens.size() < num_tokens) {
      tokens.push_back(static_cast<TokenId>(below(2)));
    }
    prompts_.push_back(tokens);
    auto sequence =
        std::make_unique<Sequence>(Sequence{salt, tokens, SequencePages(pool_, &tree_, page_, salt), 0, {}});
    attach(*sequence);
    sequences_.push_back(std::move(sequence));
  }

  void attach(Sequence& s) {
    const std::vector<std::int32_t> expected = model_.match(s.salt, s.tokens);
    ASSERT_EQ(s.pages.probe_prefix(s.tokens), static_cast<std::int64_t>(expected.size()) * page_);
    ASSERT_EQ(s.pages.attach_prefix(s.tokens), static_cast<std::int64_t>(expected.size()) * page_);
    s.slots = expected;
    s.epoch = clears_;
    for (const std::int32_t slot : expected) {
      model_.add(slot, Holder::Sequence);
    }
    num_hits_ += static_cast<std::int64_t>(expected.size());
  }

  Sequence* any() { return sequences_.empty() ? nullptr : sequences_[below(sequences_.size())].get(); }

  void grow() {
    Sequence* s = any();
    if (s == nullptr) {
      return;
    }
    if (s->pages.num_pages() == 0) {
      attach(*s);
    }
    const std::int64_t num_tokens =
        s->pages.computed() + static_cast<std::int64_t>(below(static_cast<std::uint64_t>(3 * page_)));
    const std::int64_t num_new = s->pages.pages_to_grow(num_tokens);
    const bool fits = num_new <= model_.num_free() + model_.num_evictable();
    if (fits) {
      num_evicted_ += static_cast<std::int64_t>(model_.evict(num_new - model_.num_free()).size());
    }
    ASSERT_EQ(s->pages.grow(num_tokens), fits);
    num_refused_ += fits ? 0 : 1;
    while (static_cast<std::int64_t>(s->slots.size()) < s->pages.num_pages()) {
      const SlotId slot = s->pages.slot(static_cast<std::int64_t>(s->slots.size()));
      ASSERT_EQ(model_.state(slot.value()), PageState::Free) << "a page was handed out that someone still holds";
      model_.add(slot.value(), Holder::Sequence);
      s->slots.push_back(slot.value());
      std::fill_n(memory_.begin() + slot.value() * page_, page_, kPoison);
    }
  }

  void compute() {
    Sequence* s = any();
    if (s == nullptr) {
      return;
    }
    const std::int64_t room = s->pages.capacity() - s->pages.computed();
    const std::int64_t num_new = static_cast<std::int64_t>(below(static_cast<std::uint64_t>(room) + 1));
    for (std::int64_t i = s->pages.computed(); i < s->pages.computed() + num_new; ++i) {
      if (i >= static_cast<std::int64_t>(s->tokens.size())) {
        s->tokens.push_back(static_cast<TokenId>(below(2)));
      }
      entry(s->pages, i) = entry_value(s->salt, s->tokens, static_cast<std::size_t>(i));
    }
    s->pages.set_computed(s->pages.computed() + num_new);
    const std::int64_t tree_before = tree_.num_pages();
    const std::int64_t committed_before = s->pages.committed();
    s->pages.commit(s->tokens);
    if (s->epoch == clears_ && s->pages.committed() != committed_before) {
      model_.commit(s->salt, s->tokens, s->pages.computed(), s->slots, /*below_copies=*/false);
      num_own_copies_ += (s->pages.committed() - committed_before) / page_ > tree_.num_pages() - tree_before ? 1 : 0;
    }
  }

  void let_go(Sequence& s, bool to_step) {
    if (below(2) == 0) {
      s.pages.enter_all(s.tokens);
      if (s.epoch == clears_) {
        model_.commit(s.salt, s.tokens, s.pages.committed(), s.slots, /*below_copies=*/true);
      }
    }
    if (to_step) {
      steps_.emplace_back();
      s.pages.release_to_step(steps_.back());
      for (const std::int32_t slot : s.slots) {
        model_.retag(slot, Holder::Sequence, Holder::Step);
      }
    } else {
      s.pages.release();
      for (auto it = s.slots.rbegin(); it != s.slots.rend(); ++it) {
        model_.drop(*it, Holder::Sequence);
      }
    }
    s.slots.clear();
  }

  void finish() {
    if (sequences_.empty()) {
      return;
    }
    const std::size_t i = below(sequences_.size());
    let_go(*sequences_[i], below(2) == 0);
    sequences_.erase(sequences_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void preempt() {
    if (Sequence* s = any(); s != nullptr) {
      let_go(*s, below(2) == 0);
      if (below(2) == 0) {
        attach(*s);
      }
    }
  }

  void drop_front_to_back(std::vector<PageRef>& pages, Holder holder) {
    for (PageRef& page : pages) {
      const std::int32_t slot = page.slot().value();
      page.reset();
      model_.drop(slot, holder);
    }
  }

  void complete_step() {
    if (!steps_.empty()) {
      drop_front_to_back(steps_.front(), Holder::Step);
      steps_.erase(steps_.begin());
    }
  }

  void lease() {
    Sequence* s = any();
    if (s == nullptr || leases_.size() >= 3) {
      return;
    }
    leases_.emplace_back();
    // A reader may need only the pages past its own hit.
    for (std::size_t i = below(s->slots.size() + 1); i < s->slots.size(); ++i) {
      leases_.back().push_back(s->pages.pages()[i].share(Holder::Lease));
      model_.add(s->slots[i], Holder::Lease);
    }
  }

  void end_lease() {
    if (!leases_.empty()) {
      const std::size_t i = below(leases_.size());
      drop_front_to_back(leases_[i], Holder::Lease);
      leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }

  void evict() {
    const auto n = static_cast<std::int64_t>(below(4));
    const std::vector<std::int32_t> expected = model_.evict(n);
    ASSERT_EQ(tree_.evict(n), static_cast<std::int64_t>(expected.size()));
    num_evicted_ += static_cast<std::int64_t>(expected.size());
  }

  void clear() {
    tree_.clear();
    model_.clear();
    ++clears_;
  }

  std::mt19937_64 rng_;
  std::int32_t page_;
  PagePool pool_;
  PrefixTree tree_;
  KvModel model_;
  std::vector<std::uint64_t> memory_;  // [num_slots, page]
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<std::vector<PageRef>> steps_;
  std::vector<std::vector<PageRef>> leases_;
  std::vector<std::vector<TokenId>> prompts_;
  std::uint64_t clears_ = 0;
  std::int64_t num_hits_ = 0;
  std::int64_t num_evicted_ = 0;
  std::int64_t num_refused_ = 0;
  std::int64_t num_own_copies_ = 0;
};

TEST(KvRandom, AgreesWithTheNaiveModelAtEveryStep) {
  struct Shape {
    std::int32_t num_slots;
    std::int32_t page;
  };
  std::int64_t hits = 0;
  std::int64_t evicted = 0;
  std::int64_t refused = 0;
  std::int64_t own_copies = 0;
  std::uint64_t seed = kSeed;
  for (const Shape shape : {Shape{1, 2}, Shape{6, 1}, Shape{12, 2}, Shape{24, 4}, Shape{40, 3}}) {
    for (int repeat = 0; repeat < 3; ++repeat, ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(shape.num_slots) + " slots of " +
                   std::to_string(shape.page));
      Simulation simulation(seed, shape.num_slots, shape.page);
      for (int step = 0; step < 8000; ++step) {
        simulation.step();
        simulation.verify();
        if (HasFatalFailure()) {
          FAIL() << "at step " << step;
        }
      }
      simulation.drain();
      hits += simulation.num_hits();
      evicted += simulation.num_evicted();
      refused += simulation.num_refused();
      own_copies += simulation.num_own_copies();
    }
  }
  // The run must have been through what it is meant to test.
  EXPECT_GT(hits, 1000);
  EXPECT_GT(evicted, 1000);
  EXPECT_GT(refused, 500);
  EXPECT_GT(own_copies, 100);
}

}  // namespace
}  // namespace tandem::kv
