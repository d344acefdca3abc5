// Benchmarks of the page pool, page hashes and prefix tree. Rates are per page unless the name says otherwise.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "tandem/kv/page_pool.h"
#include "tandem/kv/prefix_tree.h"
#include "tandem/kv/sequence_pages.h"

namespace tandem::kv {
namespace {

constexpr std::int32_t kPage = 128;
constexpr std::uint64_t kSeed = 20240607;

void require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "kv_bench: wrong result: %s\n", what);
    std::abort();
  }
}

std::vector<TokenId> random_tokens(std::int64_t n, std::uint64_t seed = kSeed) {
  std::mt19937_64 rng(seed);
  std::vector<TokenId> tokens(static_cast<std::size_t>(n));
  for (TokenId& token : tokens) {
    token = static_cast<TokenId>(rng() % 200064);
  }
  return tokens;
}

void report_per_page(benchmark::State& state, std::int64_t num_pages) {
  state.counters["s_per_page"] = benchmark::Counter(static_cast<double>(state.iterations() * num_pages),
                                                    benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

// One page taken and given back, in a pool of `range(0)` slots whose free list has been shuffled.
void BM_AllocateAndFree(benchmark::State& state) {
  PagePool pool(static_cast<std::int32_t>(state.range(0)));
  std::vector<PageRef> pages;
  while (auto page = pool.allocate()) {
    pages.push_back(std::move(*page));
  }
  std::mt19937_64 rng(kSeed);
  std::shuffle(pages.begin(), pages.end(), rng);
  pages.resize(pages.size() / 2);
  require(pool.num_free() == pool.num_slots() - static_cast<std::int32_t>(pages.size()), "half of the pool is free");
  for (auto _ : state) {
    std::optional<PageRef> page = pool.allocate();
    benchmark::DoNotOptimize(page);
  }
  report_per_page(state, 1);
}
BENCHMARK(BM_AllocateAndFree)->Arg(1 << 10)->Arg(1 << 20);

// A whole sequence of 64 pages taken one by one and given back, so that slots and handles are not the same few.
void BM_AllocateAndFreeSequence(benchmark::State& state) {
  PagePool pool(static_cast<std::int32_t>(state.range(0)));
  std::vector<PageRef> pages;
  pages.reserve(64);
  for (auto _ : state) {
    for (int i = 0; i < 64; ++i) {
      pages.push_back(std::move(*pool.allocate()));
    }
    require(pages.size() == 64, "64 pages were taken");
    while (!pages.empty()) {
      pages.pop_back();
    }
  }
  report_per_page(state, 64);
}
BENCHMARK(BM_AllocateAndFreeSequence)->Arg(1 << 10)->Arg(1 << 20);

// The hash of one page of 128 tokens, over `range(0)` pages of 512 bytes in turn: 64 KiB, as a page that has just been
// filled lies in a cache, and 32 MiB.
void BM_HashPage(benchmark::State& state) {
  const auto num_pages = static_cast<std::size_t>(state.range(0));
  const std::vector<TokenId> tokens = random_tokens(state.range(0) * kPage);
  require(hash_page(1, std::span(tokens).first(kPage)) != hash_page(2, std::span(tokens).first(kPage)),
          "a page's hash depends on the one before it");
  std::size_t at = 0;
  std::uint64_t hash = 0;
  for (auto _ : state) {
    hash = hash_page(hash, std::span(tokens).subspan(at * kPage, kPage));
    at = (at + 1) % num_pages;
  }
  benchmark::DoNotOptimize(hash);
  report_per_page(state, 1);
}
BENCHMARK(BM_HashPage)->Arg(1 << 7)->Arg(1 << 16);

// The floor of the hash: the same 512 bytes a page read once, summed.
void BM_ReadPage(benchmark::State& state) {
  const auto num_pages = static_cast<std::size_t>(state.range(0));
  const std::vector<TokenId> tokens = random_tokens(state.range(0) * kPage);
  std::size_t at = 0;
  for (auto _ : state) {
    const auto page = std::span(tokens).subspan(at * kPage, kPage);
    benchmark::DoNotOptimize(std::accumulate(page.begin(), page.end(), std::int64_t{0}));
    at = (at + 1) % num_pages;
  }
  report_per_page(state, 1);
}
BENCHMARK(BM_ReadPage)->Arg(1 << 7)->Arg(1 << 16);

// A sequence that grows by one token per step, hashed after each: per step, of which one in 128 fills a page.
void BM_ExtendByOneToken(benchmark::State& state) {
  const std::vector<TokenId> tokens = random_tokens(1 << 20);
  PageHashes hashes(kPage, "");
  hashes.reserve(static_cast<std::int64_t>(tokens.size()) / kPage);
  std::size_t n = 0;
  for (auto _ : state) {
    if (n == tokens.size()) {
      n = 0;
      hashes = PageHashes(kPage, "");
      hashes.reserve(static_cast<std::int64_t>(tokens.size()) / kPage);
    }
    benchmark::DoNotOptimize(hashes.extend(std::span(tokens).first(++n)));
  }
  require(hashes.size() == static_cast<std::int64_t>(n) / kPage, "only full pages were hashed");
}
BENCHMARK(BM_ExtendByOneToken);

// A pool of `range(0)` slots whose tree holds prompts of `range(1)` pages until it is half full.
struct CachedPrompts {
  CachedPrompts(std::int32_t num_slots, std::int64_t pages_each) : pool(num_slots), tree(pool, kPage) {
    const std::int64_t num_prompts = std::max<std::int64_t>(1, num_slots / 2 / pages_each);
    for (std::int64_t i = 0; i < num_prompts; ++i) {
      prompts.push_back(random_tokens(pages_each * kPage, kSeed + static_cast<std::uint64_t>(i)));
      SequencePages pages(pool, &tree, kPage);
      require(pages.attach_prefix(prompts.back()) == 0, "prompts are distinct");
      require(pages.grow(pages_each * kPage), "prompts fit the pool");
      pages.set_computed(pages_each * kPage);
      pages.commit(prompts.back());
      hashes.emplace_back(kPage, "");
      hashes.back().extend(prompts.back());
    }
    require(tree.num_evictable() == num_prompts * pages_each, "every prompt is cached");
  }
  PagePool pool;
  PrefixTree tree;
  std::vector<std::vector<TokenId>> prompts;
  std::vector<PageHashes> hashes;
};

// Match, pin and release of a cached prompt whose hashes are known, as when a waiting request is looked at again.
void BM_MatchHashedPrompt(benchmark::State& state) {
  CachedPrompts cached(static_cast<std::int32_t>(state.range(0)), state.range(1));
  std::vector<PageRef> pages;
  pages.reserve(static_cast<std::size_t>(state.range(1)));
  std::size_t i = 0;
  for (auto _ : state) {
    const TreeCursor at = cached.tree.match(cached.prompts[i], cached.hashes[i], Holder::Sequence, pages);
    require(at.num_pages == state.range(1), "the whole prompt is a hit");
    while (!pages.empty()) {
      pages.pop_back();
    }
    i = (i + 1) % cached.prompts.size();
  }
  report_per_page(state, state.range(1));
}
BENCHMARK(BM_MatchHashedPrompt)->Args({1 << 10, 8})->Args({1 << 15, 8})->Args({1 << 10, 256})->Args({1 << 15, 256});

// The same for a prompt seen for the first time: its pages are hashed too.
void BM_MatchNewPrompt(benchmark::State& state) {
  CachedPrompts cached(static_cast<std::int32_t>(state.range(0)), state.range(1));
  std::size_t i = 0;
  for (auto _ : state) {
    SequencePages pages(cached.pool, &cached.tree, kPage);
    pages.reserve(state.range(1));
    require(pages.attach_prefix(cached.prompts[i]) == state.range(1) * kPage, "the whole prompt is a hit");
    i = (i + 1) % cached.prompts.size();
  }
  report_per_page(state, state.range(1));
}
BENCHMARK(BM_MatchNewPrompt)->Args({1 << 10, 8})->Args({1 << 15, 8})->Args({1 << 15, 256});

// A full pool under steady load: a new prompt evicts the oldest pages, is filled and enters the tree. Per page: evict,
// allocate, hash, insert, release.
void BM_EvictFillAndCommit(benchmark::State& state) {
  constexpr std::int64_t kPages = 16;
  CachedPrompts cached(static_cast<std::int32_t>(state.range(0)), kPages);
  std::vector<std::vector<TokenId>> prompts;
  for (std::uint64_t i = 0; i < 64; ++i) {
    prompts.push_back(random_tokens(kPages * kPage, kSeed + (1U << 20) + i));
  }
  TokenId round = 0;
  std::size_t i = 0;
  for (auto _ : state) {
    prompts[i][0] = round++ % 200064;
    SequencePages pages(cached.pool, &cached.tree, kPage);
    pages.reserve(kPages);
    require(pages.grow(kPages * kPage), "free and evictable pages suffice");
    pages.set_computed(kPages * kPage);
    pages.commit(prompts[i]);
    i = (i + 1) % prompts.size();
  }
  report_per_page(state, kPages);
}
BENCHMARK(BM_EvictFillAndCommit)->Arg(1 << 10)->Arg(1 << 15);

}  // namespace
}  // namespace tandem::kv

BENCHMARK_MAIN();
