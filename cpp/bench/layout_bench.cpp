// Benchmarks of the cache layout: what is done once at start, and what a step may ask.

#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "tandem/layout/cache_layout.h"

namespace tandem::layout {
namespace {

// MiniMax-M3 with a GQA drafter as layer 60, bf16.
std::vector<TileSpec> m3_tiles() {
  std::vector<TileSpec> tiles;
  for (std::int32_t layer = 0; layer <= 60; ++layer) {
    tiles.push_back({LayerId{layer}, Role::K, ElementType::BF16, 4, 128, false});
    tiles.push_back({LayerId{layer}, Role::V, ElementType::BF16, 4, 128, false});
    if (layer >= 3 && layer < 60) {
      tiles.push_back({LayerId{layer}, Role::INDEX_K, ElementType::BF16, 1, 128, true});
    }
  }
  return tiles;
}

void require(bool condition, const char* what) {
  if (!condition) {
    std::fprintf(stderr, "layout_bench: wrong result: %s\n", what);
    std::abort();
  }
}

void BM_BuildM3Layout(benchmark::State& state) {
  const std::vector<TileSpec> tiles = m3_tiles();
  require(CacheLayout(tiles, 128).slot_bytes() == 17440 * 1024, "slot bytes of M3 on one rank");
  for (auto _ : state) {
    benchmark::DoNotOptimize(CacheLayout(tiles, 128, {8, 3}));
  }
}
BENCHMARK(BM_BuildM3Layout)->Unit(benchmark::kMicrosecond);

void BM_View(benchmark::State& state) {
  const CacheLayout layout(m3_tiles(), 128);
  require(layout.view(LayerId{60}, Role::V, 32).sub_pages == 4, "four sub-pages of 32 tokens");
  std::int32_t layer = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(layout.view(LayerId{layer}, Role::V, 32));
    layer = (layer + 1) % 61;
  }
}
BENCHMARK(BM_View);

// Flat ids of a table of 1024 pages (131,072 tokens) in sub-pages of 32 tokens.
void BM_FlatIds(benchmark::State& state) {
  const View view = CacheLayout(m3_tiles(), 128).view(LayerId{3}, Role::K, 32);
  std::vector<std::int32_t> table(1024);
  std::iota(table.begin(), table.end(), 0);
  std::vector<std::int32_t> ids(table.size() * 4);
  view.flat_ids(table, 1024, 0, ids);
  require(ids[4095] == view.offset(SlotId{1023}, 0, 3, 0) / view.sub_page_bytes(), "the last flat id");
  for (auto _ : state) {
    view.flat_ids(table, 1024, 0, ids);
    benchmark::DoNotOptimize(ids.data());
    benchmark::ClobberMemory();
  }
}
BENCHMARK(BM_FlatIds)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace tandem::layout

BENCHMARK_MAIN();
