#include "tandem/cpu/select.h"

#include <limits>

#include "support.h"
#include "tandem/base/check.h"

namespace tandem::cpu::testing {
namespace {

using SelectTest = EachIsa;
TANDEM_EACH_ISA(SelectTest);

struct Token {
  std::int64_t seat, kv_len;
};

struct Selection {
  std::vector<std::int32_t> ids;  // [tokens, heads, topk]
  std::vector<float> scores;      // [tokens, heads, max_blocks]
};

struct Batch {
  TestCache* cache = nullptr;
  std::int64_t heads = 3;
  std::int64_t topk = 4;
  std::int64_t num_local = 1;
  std::int64_t block_size = 4;
  std::vector<Token> tokens = {};
  Tensor queries = {};

  void randomize(DType dtype, std::mt19937& rng) {
    queries = Tensor::random(dtype, static_cast<std::int64_t>(tokens.size()), heads * cache->shape.dim, rng);
  }
  [[nodiscard]] std::int64_t max_blocks() const {
    return (cache->shape.pages * cache->shape.tokens_per_page * cache->shape.sub_pages + block_size - 1) / block_size;
  }

  [[nodiscard]] Selection run(std::int64_t first, std::int64_t count, bool with_scores) {
    std::vector<std::int32_t> seat, length;
    for (std::int64_t t = first; t < first + count; ++t) {
      seat.push_back(static_cast<std::int32_t>(tokens[static_cast<std::size_t>(t)].seat));
      length.push_back(static_cast<std::int32_t>(tokens[static_cast<std::size_t>(t)].kv_len));
    }
    Selection out;
    out.ids.assign(static_cast<std::size_t>(count * heads * topk), -7);
    if (with_scores) out.scores.assign(static_cast<std::size_t>(count * heads * max_blocks()), 7.0f);
    select_blocks({.queries = queries.rows_view(first, count).data,
                   .query_stride = queries.cols(),
                   .dtype = queries.dtype(),
                   .heads = heads,
                   .pool = cache->pool(),
                   .keys = cache->view(TestCache::kIndexKeys),
                   .table = cache->table(),
                   .places = {seat.data(), length.data(), count},
                   .block_size = block_size,
                   .topk = topk,
                   .num_local = num_local,
                   .out = out.ids.data(),
                   .scores = with_scores ? out.scores.data() : nullptr,
                   .max_blocks = max_blocks()});
    return out;
  }
  [[nodiscard]] Selection run(bool with_scores = false) {
    return run(0, static_cast<std::int64_t>(tokens.size()), with_scores);
  }

  // Block scores of one token and head in double precision.
  [[nodiscard]] std::vector<double> scores_of(std::size_t t, std::int64_t head) const {
    std::vector<double> scores;
    for (std::int64_t key = 0; key < tokens[t].kv_len; ++key) {
      double product = 0;
      for (std::int64_t d = 0; d < cache->shape.dim; ++d) {
        product += static_cast<double>(queries.at(static_cast<std::int64_t>(t), head * cache->shape.dim + d)) *
                   cache->load(TestCache::kIndexKeys, tokens[t].seat, key, 0, d);
      }
      if (key % block_size == 0) {
        scores.push_back(product);
      } else {
        scores.back() = std::max(scores.back(), product);
      }
    }
    return scores;
  }

  // By sorting all visible blocks; `scores` are overwritten.
  [[nodiscard]] std::vector<std::int32_t> best(std::vector<double> scores) const {
    const auto blocks = static_cast<std::int64_t>(scores.size());
    for (std::int64_t i = std::max<std::int64_t>(0, blocks - num_local); i < blocks; ++i) {
      scores[static_cast<std::size_t>(i)] = std::numeric_limits<double>::infinity();
    }
    std::vector<std::int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    // Among forced blocks the newest come first, if there are more of them than places.
    std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
      const double x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
      return x != y ? x > y : std::isinf(x) && x > 0 && a > b;
    });
    order.resize(static_cast<std::size_t>(std::min(topk, blocks)));
    std::sort(order.begin(), order.end());
    order.resize(static_cast<std::size_t>(topk), -1);
    return order;
  }

  void expect_reference() {
    const Selection out = run(true);
    const Selection plain = run(false);
    ASSERT_EQ(out.ids, plain.ids) << "asking for scores must not change the choice";
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::int64_t head = 0; head < heads; ++head) {
        const auto row = static_cast<std::int64_t>(t) * heads + head;
        const std::vector<double> scores = scores_of(t, head);
        const float* given = out.scores.data() + row * max_blocks();
        for (std::int64_t b = 0; b < max_blocks(); ++b) {
          if (b < static_cast<std::int64_t>(scores.size())) {
            ASSERT_NEAR(given[b], scores[static_cast<std::size_t>(b)], 1e-4) << "token " << t << " block " << b;
          } else {
            ASSERT_EQ(given[b], -std::numeric_limits<float>::infinity());
          }
        }
        // The choice is judged by the kernel's own scores, so that near ties cannot fail it.
        const std::vector<std::int32_t> expected = best({given, given + scores.size()});
        const std::vector<std::int32_t> ids(out.ids.begin() + row * topk, out.ids.begin() + (row + 1) * topk);
        ASSERT_EQ(ids, expected) << "token " << t << " head " << head;
      }
    }
  }
};

std::vector<Token> mixed_tokens() {
  std::vector<Token> tokens;
  for (std::int64_t i = 1; i <= 12; ++i) tokens.push_back({0, i});
  tokens.push_back({0, 0});
  for (std::int64_t i = 59; i <= 64; ++i) tokens.push_back({1, i});
  tokens.push_back({-1, 0});
  tokens.push_back({2, 37});
  tokens.push_back({0, 61});
  return tokens;
}

TEST_P(SelectTest, ChoosesTheBestBlocksOfRaggedBatchesForAnyGeometry) {
  struct Geometry {
    std::int64_t heads, dim, page, sub_pages, topk, local, block;
  };
  for (const Geometry& g :
       {Geometry{1, 16, 4, 1, 4, 1, 4}, Geometry{2, 24, 8, 1, 3, 2, 8}, Geometry{3, 8, 2, 4, 2, 1, 8},
        Geometry{4, 128, 4, 2, 5, 0, 4}, Geometry{5, 40, 16, 1, 1, 1, 4}, Geometry{4, 136, 4, 1, 2, 3, 16},
        Geometry{2, 16, 4, 1, 64, 1, 4}}) {
    for (const DType cache_type : {DType::F32, DType::BF16}) {
      const std::int64_t page = g.page * g.sub_pages;
      TestCache cache({.dtype = cache_type,
                       .heads = 1,
                       .dim = g.dim,
                       .tokens_per_page = g.page,
                       .sub_pages = g.sub_pages,
                       .seats = 3,
                       .pages = 64 / page},
                      rng);
      cache.fill(0, 61, rng);
      cache.fill(1, 64, rng);
      cache.fill(2, 37, rng);
      for (const DType type : {DType::F32, DType::BF16}) {
        Batch batch{.cache = &cache,
                    .heads = g.heads,
                    .topk = g.topk,
                    .num_local = g.local,
                    .block_size = g.block,
                    .tokens = mixed_tokens()};
        batch.randomize(type, rng);
        batch.expect_reference();
      }
    }
  }
}

TEST_P(SelectTest, ATokenChoosesTheSameInPrefillVerifyAndDecode) {
  TestCache cache({.dtype = DType::BF16, .heads = 1, .dim = 128, .tokens_per_page = 16, .seats = 1, .pages = 40}, rng);
  cache.fill(0, 640, rng);
  Batch batch{.cache = &cache, .heads = 4, .topk = 8, .block_size = 16};
  for (std::int64_t i = 560; i <= 640; ++i) batch.tokens.push_back({0, i});
  batch.randomize(DType::F32, rng);
  ThreadPool::shared().set_num_threads(1);
  const Selection expected = batch.run(true);
  ThreadPool::shared().set_num_threads(2);
  for (const auto& split : splits(static_cast<std::int64_t>(batch.tokens.size()))) {
    Selection out;
    std::int64_t first = 0;
    for (const std::int64_t piece : split) {
      const Selection part = batch.run(first, piece, true);
      out.ids.insert(out.ids.end(), part.ids.begin(), part.ids.end());
      out.scores.insert(out.scores.end(), part.scores.begin(), part.scores.end());
      first += piece;
    }
    EXPECT_EQ(out.ids, expected.ids);
    EXPECT_EQ(std::memcmp(out.scores.data(), expected.scores.data(), out.scores.size() * sizeof(float)), 0);
  }
}

TEST_P(SelectTest, FindsANeedleInAnyBlockOfALongContext) {
  constexpr std::int64_t blocks = 40, size = 16, dim = 32;
  TestCache cache({.dtype = DType::F32, .heads = 1, .dim = dim, .tokens_per_page = size, .seats = 1, .pages = blocks},
                  rng);
  cache.fill(0, blocks * size, rng);
  Batch batch{.cache = &cache, .heads = 2, .topk = 3, .block_size = size, .tokens = {{0, blocks * size}}};
  batch.randomize(DType::F32, rng);
  for (std::int64_t needle = 0; needle < blocks; ++needle) {
    TestCache marked = cache;
    for (std::int64_t d = 0; d < dim; ++d) {
      marked.store(TestCache::kIndexKeys, 0, needle * size + needle % size, 0, d, 3 * batch.queries.at(0, dim + d));
    }
    batch.cache = &marked;
    const Selection out = batch.run(true);
    const std::vector<std::int32_t> second(out.ids.begin() + 3, out.ids.end());
    ASSERT_THAT(second, ::testing::Contains(static_cast<std::int32_t>(needle)));
    const auto [low, high] = std::minmax_element(out.scores.begin(), out.scores.end());
    ASSERT_LT(*low, *high);
  }
}

TEST_P(SelectTest, TiesGoToTheLowerId) {
  TestCache cache({.dtype = DType::F32, .heads = 1, .dim = 8, .tokens_per_page = 4, .seats = 1, .pages = 30}, rng);
  for (std::int64_t index = 0; index < 120; ++index) {
    // Blocks 20 to 24 score 2, the others 1.
    for (std::int64_t d = 0; d < 8; ++d) {
      cache.store(TestCache::kIndexKeys, 0, index, 0, d, index / 4 >= 20 && index / 4 < 25 ? 0.25f : 0.125f);
    }
  }
  Batch batch{.cache = &cache, .heads = 1, .topk = 8, .tokens = {{0, 120}}};
  batch.queries = Tensor(DType::F32, 1, 8);
  for (std::int64_t d = 0; d < 8; ++d) batch.queries.set(d, 1.0f);
  EXPECT_THAT(batch.run().ids, ::testing::ElementsAre(0, 1, 20, 21, 22, 23, 24, 29));
  batch.topk = 4;
  EXPECT_THAT(batch.run().ids, ::testing::ElementsAre(20, 21, 22, 29));
}

TEST_P(SelectTest, EveryIndexHeadChoosesOnItsOwn) {
  TestCache cache({.dtype = DType::F32, .heads = 1, .dim = 8, .tokens_per_page = 4, .seats = 1, .pages = 10}, rng);
  for (std::int64_t index = 0; index < 40; ++index) {
    for (std::int64_t d = 0; d < 8; ++d)
      cache.store(TestCache::kIndexKeys, 0, index, 0, d, index / 4 == d ? 1.0f : 0.0f);
  }
  Batch batch{.cache = &cache, .heads = 3, .topk = 2, .tokens = {{0, 40}, {0, 40}}};
  batch.queries = Tensor(DType::F32, 2, 24);  // token t, head h looks for block 2t + h
  for (std::int64_t i = 0; i < 48; ++i) batch.queries.set(i, 0.0f);
  for (std::int64_t t = 0; t < 2; ++t) {
    for (std::int64_t h = 0; h < 3; ++h) batch.queries.set(t * 24 + h * 8 + 2 * t + h, 1.0f);
  }
  EXPECT_THAT(batch.run().ids, ::testing::ElementsAre(0, 9, 1, 9, 2, 9, 2, 9, 3, 9, 4, 9));
}

TEST_P(SelectTest, PoisonOutsideTheVisibleKeysChangesNothing) {
  for (const DType type : {DType::F32, DType::BF16}) {
    TestCache cache({.dtype = type, .heads = 1, .dim = 16, .tokens_per_page = 4, .seats = 1, .pages = 8}, rng);
    cache.fill(0, 32, rng);
    Batch batch{.cache = &cache, .topk = 3, .num_local = 0};
    for (const std::int64_t length : {13, 14, 15, 16, 17, 27}) batch.tokens.push_back({0, length});
    batch.randomize(DType::F32, rng);
    for (std::size_t t = 0; t < batch.tokens.size(); ++t) {
      const auto at = static_cast<std::int64_t>(t);
      const Selection expected = batch.run(at, 1, true);
      for (const float poison : {1e4f, std::numeric_limits<float>::quiet_NaN()}) {
        TestCache dirty = cache;
        for (std::int64_t index = batch.tokens[t].kv_len; index < 32; ++index) {
          for (std::int64_t d = 0; d < 16; ++d) dirty.store(TestCache::kIndexKeys, 0, index, 0, d, poison);
        }
        batch.cache = &dirty;
        const Selection out = batch.run(at, 1, true);
        EXPECT_EQ(out.ids, expected.ids);
        EXPECT_EQ(out.scores, expected.scores);
      }
      batch.cache = &cache;
    }
  }
}

TEST_P(SelectTest, NanKeysThatAreVisibleStillGiveValidDistinctIds) {
  TestCache cache({.dtype = DType::F32, .heads = 1, .dim = 16, .tokens_per_page = 4, .seats = 1, .pages = 16},
                  rng);  // all NaN
  Batch batch{.cache = &cache, .heads = 1, .tokens = {{0, 64}}};
  batch.randomize(DType::F32, rng);
  EXPECT_THAT(batch.run().ids, ::testing::ElementsAre(0, 1, 2, 15));
}

TEST_P(SelectTest, RefusesWhatItCannotExpress) {
  TestCache cache({.dtype = DType::F32, .heads = 2, .dim = 16, .tokens_per_page = 4, .seats = 1, .pages = 4}, rng);
  cache.fill(0, 16, rng);
  Batch batch{.cache = &cache, .tokens = {{0, 17}}};
  batch.randomize(DType::F32, rng);
  EXPECT_THROW(static_cast<void>(batch.run()), InvalidArgument);
  batch.tokens = {{2, 3}};
  EXPECT_THROW(static_cast<void>(batch.run()), InvalidArgument);
  batch.tokens = {{0, 16}};
  batch.topk = 0;
  EXPECT_THAT([&] { static_cast<void>(batch.run()); },
              ::testing::ThrowsMessage<InvalidArgument>("topk 0: allowed are 1 to 1024"));
}

}  // namespace
}  // namespace tandem::cpu::testing
