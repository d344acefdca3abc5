#include "tandem/cpu/attend.h"

#include <limits>
#include <optional>
#include <set>

#include "support.h"
#include "tandem/base/check.h"

namespace tandem::cpu::testing {
namespace {

using AttendTest = EachIsa;
TANDEM_EACH_ISA(AttendTest);

struct Token {
  std::int64_t seat, kv_len;
};

// A batch over one cache, with or without chosen blocks.
struct Batch {
  TestCache* cache = nullptr;
  std::int64_t heads = 4;
  std::vector<Token> tokens = {};
  Tensor queries = {};
  std::vector<std::int32_t> blocks = {};  // [tokens, KV heads, topk]
  std::int64_t topk = 0;
  std::int64_t block_size = 0;
  std::int64_t first_index = 0;
  float scale = 0.3f;

  void randomize(DType dtype, std::mt19937& rng) {
    queries = Tensor::random(dtype, static_cast<std::int64_t>(tokens.size()), heads * cache->shape.dim, rng);
  }

  // Random blocks, always including the newest; some tables are short.
  void choose(std::int64_t count, std::int64_t size, std::mt19937& rng) {
    topk = count;
    block_size = size;
    blocks.clear();
    for (const Token& token : tokens) {
      const std::int64_t visible = (token.kv_len + size - 1) / size;
      for (std::int64_t head = 0; head < cache->shape.heads; ++head) {
        std::set<std::int32_t> ids;
        if (visible > 0) ids.insert(static_cast<std::int32_t>(visible - 1));
        const std::int64_t wanted =
            std::min(visible, 1 + static_cast<std::int64_t>(rng() % static_cast<unsigned>(count)));
        while (static_cast<std::int64_t>(ids.size()) < wanted) {
          ids.insert(static_cast<std::int32_t>(rng() % static_cast<unsigned>(visible)));
        }
        blocks.insert(blocks.end(), ids.begin(), ids.end());
        blocks.insert(blocks.end(), static_cast<std::size_t>(count) - ids.size(), -1);
      }
    }
  }

  [[nodiscard]] Tensor run(std::int64_t first, std::int64_t count) {
    std::vector<std::int32_t> seat, length;
    for (std::int64_t t = first; t < first + count; ++t) {
      seat.push_back(static_cast<std::int32_t>(tokens[static_cast<std::size_t>(t)].seat));
      length.push_back(static_cast<std::int32_t>(tokens[static_cast<std::size_t>(t)].kv_len));
    }
    Tensor out(queries.dtype(), count, queries.cols());
    for (std::int64_t i = 0; i < count * queries.cols(); ++i) out.set(i, NAN);
    const std::int64_t table = cache->shape.heads * topk;
    attend({.queries = queries.rows_view(first, count).data,
            .query_stride = queries.cols(),
            .dtype = queries.dtype(),
            .heads = heads,
            .pool = cache->pool(),
            .keys = cache->view(TestCache::kKeys),
            .values = cache->view(TestCache::kValues),
            .table = cache->table(),
            .places = {seat.data(), length.data(), count},
            .blocks = topk > 0 ? blocks.data() + first * table : nullptr,
            .topk = topk,
            .block_size = block_size,
            .scale = scale,
            .first_index = first_index,
            .out = out.data()});
    return out;
  }
  [[nodiscard]] Tensor run() { return run(0, static_cast<std::int64_t>(tokens.size())); }

  // Softmax attention by definition in double precision.
  [[nodiscard]] std::vector<double> reference() const {
    const std::int64_t dim = cache->shape.dim, group = heads / cache->shape.heads;
    std::vector<double> out(tokens.size() * static_cast<std::size_t>(heads * dim), 0.0);
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::int64_t head = 0; head < heads; ++head) {
        std::vector<std::int64_t> keys;
        for (std::int64_t key = first_index; key < tokens[t].kv_len; ++key) {
          if (attended(t, head / group, key)) keys.push_back(key);
        }
        std::vector<double> scores;
        double top = -std::numeric_limits<double>::infinity(), sum = 0;
        for (const std::int64_t key : keys) {
          double score = 0;
          for (std::int64_t d = 0; d < dim; ++d) {
            score += static_cast<double>(queries.at(static_cast<std::int64_t>(t), head * dim + d)) *
                     cache->load(TestCache::kKeys, tokens[t].seat, key, head / group, d);
          }
          scores.push_back(score * static_cast<double>(scale));
          top = std::max(top, scores.back());
        }
        for (double& score : scores) sum += score = std::exp(score - top);
        for (std::size_t i = 0; i < keys.size(); ++i) {
          for (std::int64_t d = 0; d < dim; ++d) {
            out[t * static_cast<std::size_t>(heads * dim) + static_cast<std::size_t>(head * dim + d)] +=
                scores[i] / sum * cache->load(TestCache::kValues, tokens[t].seat, keys[i], head / group, d);
          }
        }
      }
    }
    return out;
  }

  [[nodiscard]] bool attended(std::size_t t, std::int64_t kv_head, std::int64_t key) const {
    if (topk == 0) return true;
    const auto* begin = blocks.data() + (static_cast<std::int64_t>(t) * cache->shape.heads + kv_head) * topk;
    return std::find(begin, begin + topk, key / block_size) != begin + topk;
  }

  void expect_reference() {
    const std::vector<double> expected = reference();
    const Tensor out = run();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(out[static_cast<std::int64_t>(i)], expected[i], tolerance(queries.dtype(), expected[i], 2e-5))
          << "element " << i;
    }
  }
};

// Prefill of three sequences, a verify ladder, plain decode and padding, ragged.
std::vector<Token> mixed_tokens() {
  std::vector<Token> tokens = {};
  for (std::int64_t i = 1; i <= 9; ++i) tokens.push_back({0, i});
  tokens.push_back({0, 0});
  for (std::int64_t i = 29; i <= 32; ++i) tokens.push_back({1, i});
  tokens.push_back({2, 1});
  tokens.push_back({-1, 0});
  for (std::int64_t i = 14; i <= 19; ++i) tokens.push_back({2, i});
  tokens.push_back({0, 31});
  return tokens;
}

TEST_P(AttendTest, EqualsTheDefinitionForRaggedBatchesOfAnyGeometry) {
  struct Geometry {
    std::int64_t heads, kv_heads, dim, page, sub_pages;
  };
  for (const Geometry& g : {Geometry{4, 2, 16, 4, 1}, Geometry{8, 2, 24, 8, 1}, Geometry{3, 3, 8, 2, 4},
                            Geometry{16, 1, 40, 4, 2}, Geometry{5, 1, 136, 16, 1}, Geometry{4, 4, 256, 4, 1}}) {
    for (const DType cache_type : {DType::F32, DType::BF16}) {
      TestCache cache({.dtype = cache_type,
                       .heads = g.kv_heads,
                       .dim = g.dim,
                       .tokens_per_page = g.page,
                       .sub_pages = g.sub_pages,
                       .seats = 3,
                       .pages = (32 + g.page * g.sub_pages - 1) / (g.page * g.sub_pages)},
                      rng);
      cache.fill(0, 31, rng);
      cache.fill(1, 32, rng);
      cache.fill(2, 19, rng);
      for (const DType type : {DType::F32, DType::BF16}) {
        Batch batch{.cache = &cache, .heads = g.heads, .tokens = mixed_tokens()};
        batch.randomize(type, rng);
        batch.expect_reference();
        batch.first_index = 1;
        batch.expect_reference();
        batch.first_index = 0;
        batch.choose(3, 4, rng);
        batch.expect_reference();
        batch.choose(2, 16, rng);
        batch.expect_reference();
      }
    }
  }
}

TEST_P(AttendTest, LongContextsCrossManySpansDenseAndSparse) {
  for (const DType cache_type : {DType::F32, DType::BF16}) {
    TestCache cache({.dtype = cache_type, .heads = 2, .dim = 128, .tokens_per_page = 128, .seats = 1, .pages = 7}, rng);
    cache.fill(0, 800, rng);
    Batch batch{.cache = &cache, .heads = 4, .scale = 0.09f};
    for (const std::int64_t length : {1, 127, 128, 129, 255, 256, 257, 640, 641, 797, 798, 799, 800}) {
      batch.tokens.push_back({0, length});
    }
    batch.randomize(DType::F32, rng);
    batch.expect_reference();
    batch.choose(4, 128, rng);
    batch.expect_reference();
    batch.choose(2, 256, rng);
    batch.expect_reference();
  }
}

TEST_P(AttendTest, ATokenHasTheSameBitsInAnyBatchChunkingAndNumberOfThreads) {
  for (const DType cache_type : {DType::F32, DType::BF16}) {
    TestCache cache({.dtype = cache_type, .heads = 2, .dim = 128, .tokens_per_page = 128, .seats = 2, .pages = 4}, rng);
    cache.fill(0, 420, rng);
    cache.fill(1, 130, rng);
    Batch batch{.cache = &cache, .heads = 6};
    for (std::int64_t i = 380; i <= 420; ++i) batch.tokens.push_back({0, i});
    for (std::int64_t i = 120; i <= 130; ++i) batch.tokens.push_back({1, i});
    const auto count = static_cast<std::int64_t>(batch.tokens.size());
    for (const std::int64_t topk : {0, 2}) {
      if (topk > 0) batch.choose(topk, 128, rng);
      batch.randomize(DType::F32, rng);
      ThreadPool::shared().set_num_threads(1);
      const Tensor expected = batch.run();
      ThreadPool::shared().set_num_threads(2);
      for (const auto& split : splits(count)) {
        std::int64_t first = 0;
        for (const std::int64_t piece : split) {
          const Tensor out = batch.run(first, piece);
          for (std::int64_t i = 0; i < piece * out.cols(); ++i) {
            ASSERT_EQ(out[i], expected[first * out.cols() + i]) << "token " << first + i / out.cols();
          }
          first += piece;
        }
      }
    }
  }
}

TEST_P(AttendTest, ChoosingEveryBlockGivesTheBitsOfDenseAttention) {
  TestCache cache({.dtype = DType::BF16, .heads = 2, .dim = 32, .tokens_per_page = 4, .seats = 1, .pages = 40}, rng);
  cache.fill(0, 160, rng);
  for (const std::int64_t size : {4, 16, 128}) {
    Batch batch{.cache = &cache, .heads = 4};
    for (std::int64_t i = 118; i <= 160; ++i) batch.tokens.push_back({0, i});
    batch.randomize(DType::F32, rng);
    const Tensor dense = batch.run();
    batch.topk = 160 / size + 1;
    batch.block_size = size;
    for (const Token& token : batch.tokens) {
      for (int head = 0; head < 2; ++head) {
        for (std::int64_t i = 0; i < batch.topk; ++i) {
          batch.blocks.push_back(i * size < token.kv_len ? static_cast<std::int32_t>(i) : -1);
        }
      }
    }
    EXPECT_TRUE(batch.run() == dense) << "block size " << size;
  }
}

TEST_P(AttendTest, SubPagesAndPagesGiveTheSameBits) {
  TestCache whole({.dtype = DType::F32, .heads = 2, .dim = 16, .tokens_per_page = 16, .seats = 1, .pages = 4}, rng);
  whole.fill(0, 61, rng);
  TestCache split = whole;
  Batch batch{.cache = &whole};
  for (std::int64_t i = 50; i <= 61; ++i) batch.tokens.push_back({0, i});
  batch.randomize(DType::F32, rng);
  const Tensor expected = batch.run();
  // The same bytes, seen as four pages of four tokens each.
  CacheView keys = whole.view(TestCache::kKeys), values = whole.view(TestCache::kValues);
  for (CacheView* view : {&keys, &values}) {
    view->tokens_per_page = 4;
    view->sub_pages = 4;
    view->sub_page_stride = 4 * view->token_stride;
  }
  std::vector<std::int32_t> seat(batch.tokens.size(), 0), length;
  for (const Token& token : batch.tokens) length.push_back(static_cast<std::int32_t>(token.kv_len));
  Tensor out(DType::F32, expected.rows(), expected.cols());
  attend({.queries = batch.queries.data(),
          .query_stride = batch.queries.cols(),
          .dtype = DType::F32,
          .heads = 4,
          .pool = split.pool(),
          .keys = keys,
          .values = values,
          .table = split.table(),
          .places = {seat.data(), length.data(), expected.rows()},
          .scale = batch.scale,
          .out = out.data()});
  EXPECT_TRUE(out == expected);
}

TEST_P(AttendTest, TheOrderOfSlotsInThePoolDoesNotMatter) {
  TestCache cache({.dtype = DType::F32, .heads = 2, .dim = 16, .tokens_per_page = 4, .seats = 1, .pages = 8}, rng);
  std::mt19937 contents(kSeed);
  cache.fill(0, 30, contents);
  Batch batch{.cache = &cache};
  for (std::int64_t i = 25; i <= 30; ++i) batch.tokens.push_back({0, i});
  batch.randomize(DType::F32, rng);
  const Tensor expected = batch.run();
  TestCache reversed = cache;
  std::fill(reversed.bytes.begin(), reversed.bytes.end(), std::byte{0xff});
  std::reverse(reversed.table_slots.begin(), reversed.table_slots.end());
  std::mt19937 again(kSeed);
  reversed.fill(0, 30, again);
  batch.cache = &reversed;
  EXPECT_TRUE(batch.run() == expected);
}

TEST_P(AttendTest, LargeNumbersInUnusedMemoryChangeNothing) {
  TestCache cache({.dtype = DType::BF16, .heads = 1, .dim = 16, .tokens_per_page = 4, .seats = 2, .pages = 8}, rng);
  cache.fill(0, 27, rng);
  Batch batch{.cache = &cache, .heads = 2, .tokens = {{0, 25}, {0, 26}, {0, 27}, {1, 0}, {0, 5}}};
  batch.randomize(DType::F32, rng);
  batch.choose(3, 4, rng);
  const Tensor expected = batch.run();  // unused memory is NaN
  TestCache other = cache;
  for (std::int64_t seat = 0; seat < 2; ++seat) {
    for (std::int64_t index = seat == 0 ? 27 : 0; index < 32; ++index) {
      for (std::int64_t d = 0; d < 16; ++d) {
        other.store(TestCache::kKeys, seat, index, 0, d, 1e4f);
        other.store(TestCache::kValues, seat, index, 0, d, 1e4f);
      }
    }
  }
  batch.cache = &other;
  EXPECT_TRUE(batch.run() == expected);
}

TEST_P(AttendTest, TokensWithoutAKeyGiveZerosAndTouchNothing) {
  TestCache cache({.seats = 1, .pages = 2}, rng);  // all NaN
  Batch batch{.cache = &cache, .tokens = {{7, 0}, {-1, 0}, {0, 1}, {0, -1}}};
  batch.first_index = 1;  // so token 2 has none either
  batch.randomize(DType::BF16, rng);
  const Tensor out = batch.run();
  for (std::int64_t i = 0; i < out.rows() * out.cols(); ++i) ASSERT_EQ(out[i], 0.0f);
  batch.first_index = 0;
  batch.tokens = {{0, 8}};
  batch.topk = 2;
  batch.block_size = 4;
  batch.blocks.assign(4, -1);  // nothing chosen
  const Tensor none = batch.run();
  for (std::int64_t i = 0; i < none.cols(); ++i) ASSERT_EQ(none[i], 0.0f);
}

TEST_P(AttendTest, ScoresFarBelowZeroOrAboveItAreOnlyComparedWithEachOther) {
  TestCache cache({.dtype = DType::F32, .heads = 1, .dim = 8, .tokens_per_page = 4, .seats = 1, .pages = 5}, rng);
  cache.fill(0, 19, rng);
  for (std::int64_t key = 0; key < 19; ++key) cache.store(TestCache::kKeys, 0, key, 0, 0, 3.0f);
  for (const float shift : {-400.0f, 400.0f}) {
    Batch batch{.cache = &cache, .heads = 1};
    for (std::int64_t i = 1; i <= 19; ++i) batch.tokens.push_back({0, i});
    batch.randomize(DType::F32, rng);
    for (std::int64_t t = 0; t < 19; ++t) batch.queries.set(t * 8, shift);
    const std::vector<double> expected = batch.reference();
    const Tensor out = batch.run();
    // Scores of some 360 have steps of 2^-15 in fp32.
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(out[static_cast<std::int64_t>(i)], expected[i], 1e-3);
  }
}

TEST_P(AttendTest, QueriesMayBePartOfWiderRows) {
  TestCache cache({.dtype = DType::F32, .heads = 2, .dim = 16, .tokens_per_page = 4, .seats = 1, .pages = 4}, rng);
  cache.fill(0, 16, rng);
  Batch batch{.cache = &cache, .tokens = {{0, 9}, {0, 10}, {0, 16}}};
  batch.randomize(DType::BF16, rng);
  const Tensor expected = batch.run();
  Tensor wide(DType::BF16, 3, 100);
  for (std::int64_t i = 0; i < 300; ++i) wide.set(i, NAN);
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t i = 0; i < 64; ++i) wide.set(t * 100 + 20 + i, batch.queries.at(t, i));
  }
  const std::vector<std::int32_t> seat = {0, 0, 0}, length = {9, 10, 16};
  Tensor out(DType::BF16, 3, 64);
  attend({.queries = static_cast<const Bf16*>(wide.data()) + 20,
          .query_stride = 100,
          .dtype = DType::BF16,
          .heads = 4,
          .pool = cache.pool(),
          .keys = cache.view(TestCache::kKeys),
          .values = cache.view(TestCache::kValues),
          .table = cache.table(),
          .places = {seat.data(), length.data(), 3},
          .scale = batch.scale,
          .out = out.data()});
  EXPECT_TRUE(out == expected);
}

TEST_P(AttendTest, ANanQueryLeavesItsNeighboursAlone) {
  TestCache cache({.dtype = DType::F32, .heads = 1, .dim = 16, .tokens_per_page = 4, .seats = 1, .pages = 8}, rng);
  cache.fill(0, 32, rng);
  Batch batch{.cache = &cache, .heads = 2};
  for (std::int64_t i = 20; i <= 28; ++i) batch.tokens.push_back({0, i});
  batch.randomize(DType::F32, rng);
  const Tensor expected = batch.run();
  for (std::int64_t d = 0; d < 32; ++d) batch.queries.set(4 * 32 + d, NAN);
  const Tensor out = batch.run();
  for (std::int64_t t = 0; t < out.rows(); ++t) {
    for (std::int64_t d = 0; d < 32; ++d) {
      if (t == 4) {
        ASSERT_TRUE(std::isnan(out.at(t, d)));
      } else {
        ASSERT_EQ(out.at(t, d), expected.at(t, d));
      }
    }
  }
}

TEST_P(AttendTest, RefusesWhatLiesOutsideTheCache) {
  TestCache cache({.seats = 1, .pages = 4}, rng);
  cache.fill(0, 16, rng);
  Batch batch{.cache = &cache, .tokens = {{0, 17}}};
  batch.randomize(DType::F32, rng);
  EXPECT_THAT([&] { static_cast<void>(batch.run()); },
              ::testing::ThrowsMessage<InvalidArgument>("page 4 of seat 0: the block table has 4 pages"));
  batch.tokens = {{1, 3}};
  EXPECT_THAT([&] { static_cast<void>(batch.run()); },
              ::testing::ThrowsMessage<InvalidArgument>("seat 1: the block table has 1"));
  batch.tokens = {{0, 9}};
  batch.topk = 2;
  batch.block_size = 4;
  for (const std::vector<std::int32_t>& wrong : {std::vector<std::int32_t>{0, 3}, {1, 0}, {1, 1}, {-1, 0}, {-2, -1}}) {
    batch.blocks = {0, 1};
    batch.blocks.insert(batch.blocks.end(), wrong.begin(), wrong.end());
    EXPECT_THROW(static_cast<void>(batch.run()), InvalidArgument) << wrong[0] << "," << wrong[1];
  }
  batch.topk = 0;
  cache.table_slots[2] = 99;
  EXPECT_THAT([&] { static_cast<void>(batch.run()); },
              ::testing::ThrowsMessage<InvalidArgument>("slot 99 at page 2 of seat 0: the pool has 7"));
  batch.tokens = {{0, 8}};  // does not reach that page
  EXPECT_NO_THROW(static_cast<void>(batch.run()));
}

}  // namespace
}  // namespace tandem::cpu::testing
