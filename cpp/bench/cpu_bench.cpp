#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tandem/cpu/attend.h"
#include "tandem/cpu/buffer.h"
#include "tandem/cpu/experts.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/linear.h"
#include "tandem/cpu/router.h"
#include "tandem/cpu/rows.h"
#include "tandem/cpu/select.h"
#include "tandem/cpu/thread_pool.h"

// Each benchmark rotates over copies of its weights or caches until they pass `kColdBytes`, so that nothing but the
// named size sits in a cache by luck, and reports GB/s of the bytes that must move and GFLOP/s of the multiply-adds.
namespace tandem::cpu {
namespace {

constexpr std::int64_t kColdBytes = std::int64_t{256} << 20;

struct Data {
  DType dtype;
  std::int64_t rows, cols;
  AlignedBuffer buffer;

  Data(DType type, std::int64_t r, std::int64_t c, std::uint32_t seed = 1)
      : dtype(type), rows(r), cols(c), buffer(r * c * size_of(type)) {
    std::uint32_t state = seed * 2654435761u + 1;
    for (std::int64_t i = 0; i < r * c; ++i) {
      state = state * 1664525u + 1013904223u;
      const float x = static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
      if (type == DType::F32) {
        reinterpret_cast<float*>(buffer.data())[i] = x;
      } else {
        std::uint32_t bits = 0;
        std::memcpy(&bits, &x, 4);
        reinterpret_cast<Bf16*>(buffer.data())[i] = {static_cast<std::uint16_t>(bits >> 16)};
      }
    }
  }
  [[nodiscard]] Matrix view() const { return {buffer.data(), dtype, rows, cols, cols}; }
};

void report(benchmark::State& state, double bytes, double multiply_adds) {
  const auto n = static_cast<double>(state.iterations());
  state.counters["GB/s"] = benchmark::Counter(bytes * n * 1e-9, benchmark::Counter::kIsRate);
  state.counters["GFLOP/s"] = benchmark::Counter(2 * multiply_adds * n * 1e-9, benchmark::Counter::kIsRate);
}

// Ends the program unless `call` gives on the portable kernels what it gives on the chosen ones: fp32 or bf16 `out`.
template <class Call>
void check(const Data& out, const Call& call) {
  const std::string chosen = kernels().name;
  const auto run = [&](const std::string& isa) {
    set_isa(isa);
    call();
    std::vector<double> values;
    for (std::int64_t i = 0; i < out.rows * out.cols; ++i) {
      if (out.dtype == DType::F32) {
        values.push_back(static_cast<double>(reinterpret_cast<const float*>(out.buffer.data())[i]));
      } else {
        const std::uint32_t bits = std::uint32_t{reinterpret_cast<const Bf16*>(out.buffer.data())[i].bits} << 16;
        float value = 0;
        std::memcpy(&value, &bits, 4);
        values.push_back(static_cast<double>(value));
      }
    }
    return values;
  };
  const std::vector<double> expected = run("portable"), given = run(chosen);
  double largest = 1e-30;
  for (const double value : expected) largest = std::max(largest, std::abs(value));
  const double allowed = largest * (out.dtype == DType::F32 ? 1e-4 : 1e-2);
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (std::abs(given[i] - expected[i]) <= allowed) continue;
    std::fprintf(stderr, "element %zu is %g, portable gives %g\n", i, given[i], expected[i]);
    std::abort();
  }
}

constexpr DType kTypes[] = {DType::F32, DType::BF16};

// The floor: one pass over so many megabytes, cold as in BM_linear.
void BM_read(benchmark::State& state) {
  const std::int64_t floats = (state.range(0) << 20) / 4;
  std::vector<std::unique_ptr<Data>> copies;
  do {
    copies.push_back(std::make_unique<Data>(DType::F32, 1, floats));
  } while (state.range(1) != 0 && static_cast<std::int64_t>(copies.size()) * floats * 4 < kColdBytes);
  std::size_t next = 0;
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        kernels().find_above(reinterpret_cast<const float*>(copies[next]->buffer.data()), 0, floats, 1.0f));
    next = (next + 1) % copies.size();
  }
  report(state, static_cast<double>(floats * 4), 0);
}
BENCHMARK(BM_read)->ArgNames({"MB", "cold"})->ArgsProduct({{1, 8, 16}, {0}})->ArgsProduct({{100}, {1}});

// Arguments: rows, out features, in features, weight dtype (0 f32, 1 bf16), input dtype, cold.
void BM_linear(benchmark::State& state) {
  ThreadPool::shared().set_num_threads(1);
  const std::int64_t rows = state.range(0), n = state.range(1), k = state.range(2);
  const DType weight_type = kTypes[state.range(3)], type = kTypes[state.range(4)];
  const Data weight(weight_type, n, k), x(type, rows, k), out(type, rows, n);
  const std::int64_t bytes = n * k * size_of(weight_type);
  std::vector<std::unique_ptr<PackedLinear>> packed;
  do {
    packed.push_back(std::make_unique<PackedLinear>(weight.view()));
  } while (state.range(5) != 0 && static_cast<std::int64_t>(packed.size()) * bytes < kColdBytes);
  check(out, [&] { linear(*packed[0], x.view(), out.view()); });
  std::size_t next = 0;
  for (auto _ : state) {
    linear(*packed[next], x.view(), out.view());
    next = (next + 1) % packed.size();
  }
  report(state, static_cast<double>(bytes), static_cast<double>(rows * n * k));
}
BENCHMARK(BM_linear)
    ->ArgNames({"T", "N", "K", "w16", "x16", "cold"})
    ->ArgsProduct({{1, 2, 4, 8}, {2048}, {2048}, {0, 1}, {0}, {0}})  // 16 and 8 MB
    ->ArgsProduct({{1, 4, 8}, {8192}, {6144}, {1}, {0, 1}, {1}})     // 100 MB
    ->ArgsProduct({{1, 4, 8}, {6144}, {5120}, {0}, {0}, {1}})        // 126 MB
    ->ArgsProduct({{1, 4, 512}, {2688}, {192}, {1}, {0}, {0}})       // the demo's fused projection
    ->ArgsProduct({{64, 512}, {2048}, {2048}, {0, 1}, {0}, {0}})
    ->ArgsProduct({{512}, {2048}, {2048}, {1}, {1}, {0}});

// Arguments: rows, experts, hidden, width, top-k.
void BM_experts(benchmark::State& state) {
  ThreadPool::shared().set_num_threads(1);
  const std::int64_t rows = state.range(0), experts = state.range(1), hidden = state.range(2), width = state.range(3);
  const std::int64_t topk = state.range(4);
  const Data gate_up(DType::BF16, 2 * width, hidden), down(DType::BF16, hidden, width);
  std::vector<PackedMlp> routed;
  for (std::int64_t e = 0; e < experts; ++e) routed.emplace_back(gate_up.view(), down.view());
  const PackedExperts packed(std::move(routed), PackedMlp(gate_up.view(), down.view()));
  const Data x(DType::F32, rows, hidden), out(DType::F32, rows, hidden);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * topk));
  const std::vector<float> weights(ids.size(), 0.5f);
  std::mt19937 rng(7);
  check(out, [&] { mixture(packed, x.view(), ids.data(), weights.data(), topk, {}, out.view()); });
  double hit = 0, calls = 0;
  for (auto _ : state) {
    state.PauseTiming();
    std::vector<bool> seen(static_cast<std::size_t>(experts), false);
    for (std::size_t t = 0; t < ids.size(); t += static_cast<std::size_t>(topk)) {
      for (std::size_t i = 0; i < static_cast<std::size_t>(topk); ++i) {
        ids[t + i] = static_cast<std::int32_t>((rng() % 1000 * static_cast<unsigned>(topk) + i) %
                                               static_cast<unsigned>(experts));
        seen[static_cast<std::size_t>(ids[t + i])] = true;
      }
    }
    hit += static_cast<double>(std::count(seen.begin(), seen.end(), true)) + 1;
    ++calls;
    state.ResumeTiming();
    mixture(packed, x.view(), ids.data(), weights.data(), topk, {}, out.view());
  }
  report(state, hit / calls * static_cast<double>(3 * width * hidden * 2),
         static_cast<double>(rows * (topk + 1) * 3 * width * hidden));
}
BENCHMARK(BM_experts)
    ->ArgNames({"T", "E", "H", "I", "k"})
    ->ArgsProduct({{1, 4, 512}, {8}, {192}, {128}, {2}})
    ->ArgsProduct({{1, 4, 256}, {32}, {2048}, {512}, {4}});

struct Cache {
  CacheView keys, values, index_keys;
  Pool pool;
  AlignedBuffer buffer;
  std::vector<std::int32_t> slots;

  Cache(DType type, std::int64_t heads, std::int64_t dim, std::int64_t context) {
    const std::int64_t tile = 128 * dim * size_of(type), slot = (2 * heads + 1) * tile, pages = (context + 127) / 128;
    const CacheView base{.dtype = type,
                         .heads = heads,
                         .dim = dim,
                         .tokens_per_page = 128,
                         .sub_pages = 1,
                         .base_offset = 0,
                         .slot_stride = slot,
                         .head_stride = 2 * tile,
                         .sub_page_stride = tile,
                         .token_stride = dim * size_of(type)};
    keys = values = index_keys = base;
    values.base_offset = tile;
    index_keys.base_offset = 2 * heads * tile;
    index_keys.heads = 1;
    Data data(type, pages * (2 * heads + 1) * 128, dim, 3);
    buffer = std::move(data.buffer);
    pool = {buffer.data(), buffer.num_bytes()};
    slots.resize(static_cast<std::size_t>(pages));
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
  }
  [[nodiscard]] BlockTable table() const { return {slots.data(), 1, static_cast<std::int64_t>(slots.size())}; }
};

struct Ladder {
  std::vector<std::int32_t> seat, length;
  Ladder(std::int64_t tokens, std::int64_t context) : seat(static_cast<std::size_t>(tokens), 0) {
    for (std::int64_t t = 0; t < tokens; ++t) length.push_back(static_cast<std::int32_t>(context - tokens + 1 + t));
  }
  [[nodiscard]] TokenPlaces places() const {
    return {seat.data(), length.data(), static_cast<std::int64_t>(seat.size())};
  }
};

// Arguments: query tokens, context, cache dtype, index heads, top-k.
void BM_select(benchmark::State& state) {
  ThreadPool::shared().set_num_threads(1);
  const std::int64_t tokens = state.range(0), context = state.range(1), heads = state.range(3), topk = state.range(4);
  const DType type = kTypes[state.range(2)];
  const Cache cache(type, 1, 128, context);
  const Data queries(DType::F32, tokens, heads * 128);
  const Ladder ladder(tokens, context);
  std::vector<std::int32_t> out(static_cast<std::size_t>(tokens * heads * topk));
  const SelectArgs args = {.queries = queries.buffer.data(),
                           .query_stride = heads * 128,
                           .dtype = DType::F32,
                           .heads = heads,
                           .pool = cache.pool,
                           .keys = cache.index_keys,
                           .table = cache.table(),
                           .places = ladder.places(),
                           .block_size = 128,
                           .topk = topk,
                           .num_local = 1,
                           .out = out.data()};
  const std::string chosen = kernels().name;
  set_isa("portable");
  select_blocks(args);
  const std::vector<std::int32_t> expected = out;
  set_isa(chosen);
  select_blocks(args);
  std::int64_t differing = 0;  // near ties
  for (std::size_t i = 0; i < out.size(); ++i) differing += out[i] != expected[i] ? 1 : 0;
  if (differing * 50 > static_cast<std::int64_t>(out.size())) std::abort();
  for (auto _ : state) select_blocks(args);
  report(state, static_cast<double>(context * 128 * size_of(type)),
         static_cast<double>(tokens * heads * context * 128));
}
BENCHMARK(BM_select)
    ->ArgNames({"T", "ctx", "kv16", "Hi", "k"})
    ->ArgsProduct({{1, 4}, {64, 4096, 32768, 131072}, {0, 1}, {4}, {4}})
    ->ArgsProduct({{1, 4, 512}, {32768}, {1}, {4}, {16}});

// Arguments: query tokens, context, cache dtype, query heads, KV heads, top-k (0: dense).
void BM_attend(benchmark::State& state) {
  ThreadPool::shared().set_num_threads(1);
  const std::int64_t tokens = state.range(0), context = state.range(1), heads = state.range(3),
                     kv_heads = state.range(4);
  const std::int64_t topk = state.range(5), blocks_visible = (context + 127) / 128;
  const DType type = kTypes[state.range(2)];
  const Cache cache(type, kv_heads, 128, context);
  const Data queries(DType::F32, tokens, heads * 128), out(DType::F32, tokens, heads * 128);
  const Ladder ladder(tokens, context);
  std::vector<std::int32_t> blocks;
  for (std::int64_t row = 0; topk > 0 && row < tokens * kv_heads; ++row) {
    const std::int64_t visible = (ladder.length[static_cast<std::size_t>(row / kv_heads)] + 127) / 128;
    const std::int64_t count = std::min(topk, visible);
    for (std::int64_t i = 0; i < topk; ++i) {
      blocks.push_back(i < count ? static_cast<std::int32_t>((i + 1) * visible / count - 1) : -1);
    }
  }
  const AttendArgs args = {.queries = queries.buffer.data(),
                           .query_stride = heads * 128,
                           .dtype = DType::F32,
                           .heads = heads,
                           .pool = cache.pool,
                           .keys = cache.keys,
                           .values = cache.values,
                           .table = cache.table(),
                           .places = ladder.places(),
                           .blocks = topk > 0 ? blocks.data() : nullptr,
                           .topk = topk,
                           .block_size = 128,
                           .scale = 0.0883883f,
                           .out = out.buffer.data()};
  check(out, [&] { attend(args); });
  for (auto _ : state) attend(args);
  const std::int64_t keys = topk > 0 ? std::min(topk, blocks_visible) * 128 : context;
  const std::int64_t attended = std::min(keys, context);
  report(state, static_cast<double>(attended * kv_heads * 256 * size_of(type)),
         static_cast<double>(tokens * heads * attended * 256));
}
BENCHMARK(BM_attend)
    ->ArgNames({"T", "ctx", "kv16", "Hq", "Hk", "k"})
    ->ArgsProduct({{1, 4}, {64, 4096, 32768}, {0, 1}, {8}, {4}, {0, 4}})
    ->ArgsProduct({{1, 4}, {131072}, {1}, {8}, {4}, {0, 4}})
    ->ArgsProduct({{1, 4, 128}, {32768}, {1}, {64}, {4}, {16}})
    ->ArgsProduct({{1, 4}, {4096}, {1}, {64}, {4}, {0}})
    ->ArgsProduct({{512}, {4096}, {0, 1}, {8}, {4}, {0, 4}});

// Arguments: rows, columns, dtype.
void BM_add_rms_norm(benchmark::State& state) {
  const DType type = kTypes[state.range(2)];
  const Data x(type, state.range(0), state.range(1)), residual(type, state.range(0), state.range(1));
  const Data out(type, state.range(0), state.range(1));
  const std::vector<float> weight(static_cast<std::size_t>(state.range(1)), 0.1f);
  const Data fresh(type, state.range(0), state.range(1));
  check(out, [&] {
    std::memcpy(residual.buffer.data(), fresh.buffer.data(), static_cast<std::size_t>(fresh.buffer.num_bytes()));
    add_rms_norm(x.view(), residual.view(), weight.data(), 1e-6f, true, out.view());
  });
  for (auto _ : state) add_rms_norm(x.view(), residual.view(), weight.data(), 1e-6f, true, out.view());
  report(state, static_cast<double>(state.range(0) * state.range(1) * 4 * size_of(type)), 0);
}
BENCHMARK(BM_add_rms_norm)->ArgNames({"T", "H", "x16"})->ArgsProduct({{1, 4}, {192, 6144}, {0, 1}});

// The demo's row: 8 q, 4 k, 4 index q and 1 index k heads normalised and rotated, 4 v heads left alone.
void BM_norm_rope(benchmark::State& state) {
  const std::int64_t rows = state.range(0);
  const Data x(kTypes[state.range(1)], rows, 21 * 128);
  const std::vector<float> weight(128, 0.1f), cos(4096 * 32, 0.6f), sin(4096 * 32, 0.8f);
  const std::vector<std::int32_t> positions(static_cast<std::size_t>(rows), 1000);
  std::vector<NormRopePart> parts;
  for (const auto& [offset, heads] : {std::pair<std::int64_t, std::int64_t>{0, 8}, {8, 4}, {16, 4}, {20, 1}}) {
    parts.push_back({offset * 128, heads, 128, 64, weight.data()});
  }
  const auto call = [&] {
    norm_rope(x.view(), parts, {cos.data(), sin.data(), 4096, 32}, positions.data(), 1e-6f, true);
  };
  const Data fresh(x.dtype, rows, 21 * 128);
  check(x, [&] {
    std::memcpy(x.buffer.data(), fresh.buffer.data(), static_cast<std::size_t>(fresh.buffer.num_bytes()));
    call();
  });
  for (auto _ : state) call();
  report(state, static_cast<double>(rows * 17 * 128 * 2 * size_of(x.dtype)), 0);
}
BENCHMARK(BM_norm_rope)->ArgNames({"T", "x16"})->ArgsProduct({{1, 4}, {0, 1}});

void BM_route(benchmark::State& state) {
  const std::int64_t rows = state.range(0), experts = state.range(1), hidden = state.range(2);
  const Data x(DType::F32, rows, hidden), gate(DType::F32, experts, hidden, 9), weights(DType::F32, rows, 4);
  const std::vector<float> bias(static_cast<std::size_t>(experts), 0.0f);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * 4));
  const auto call = [&] {
    route(x.view(), gate.view(), bias.data(), 4, 2.0f, ids.data(), reinterpret_cast<float*>(weights.buffer.data()));
  };
  check(weights, call);
  for (auto _ : state) call();
  report(state, static_cast<double>(experts * hidden * 4), static_cast<double>(rows * experts * hidden));
}
BENCHMARK(BM_route)
    ->ArgNames({"T", "E", "H"})
    ->Args({1, 8, 192})
    ->Args({4, 8, 192})
    ->Args({1, 128, 6144})
    ->Args({4, 128, 6144});

// A loop of two empty items: the price of sharing work. The caller spins in between, as a step's kernels would.
void BM_fork_join(benchmark::State& state) {
  ThreadPool::shared().set_num_threads(2);
  for (auto _ : state) {
    ThreadPool::shared().run(2, std::int64_t{1} << 40, [](std::int64_t item) { benchmark::DoNotOptimize(item); });
  }
  ThreadPool::shared().set_num_threads(1);
}
BENCHMARK(BM_fork_join);

}  // namespace
}  // namespace tandem::cpu

BENCHMARK_MAIN();
