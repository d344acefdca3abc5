#include "tandem/cpu/cache_write.h"

#include "support.h"
#include "tandem/base/check.h"

namespace tandem::cpu::testing {
namespace {

using CacheWriteTest = EachIsa;
TANDEM_EACH_ISA(CacheWriteTest);

struct Write {
  Tensor keys, values, index_keys;
  std::vector<std::int32_t> seat, index;

  Write(const TestCache& cache, DType type, std::vector<std::int32_t> seats, std::vector<std::int32_t> indices,
        std::mt19937& rng)
      : seat(std::move(seats)), index(std::move(indices)) {
    const auto tokens = static_cast<std::int64_t>(seat.size());
    keys = Tensor::random(type, tokens, cache.shape.heads * cache.shape.dim, rng);
    values = Tensor::random(type, tokens, cache.shape.heads * cache.shape.dim, rng);
    index_keys = Tensor::random(type, tokens, cache.shape.dim, rng);
  }
  [[nodiscard]] TokenPlaces places() const {
    return {seat.data(), index.data(), static_cast<std::int64_t>(seat.size())};
  }
  [[nodiscard]] std::vector<CacheSource> sources(const TestCache& cache) {
    std::vector<CacheSource> all;
    Tensor* tensors[] = {&keys, &values, &index_keys};
    for (const auto role : {TestCache::kKeys, TestCache::kValues, TestCache::kIndexKeys}) {
      all.push_back({cache.view(role), tensors[role]->data(), tensors[role]->dtype(), tensors[role]->cols()});
    }
    return all;
  }
};

TEST_P(CacheWriteTest, WritesItsTokensAndNotOneByteMore) {
  for (const DType cache_type : {DType::F32, DType::BF16}) {
    for (const DType type : {DType::F32, DType::BF16}) {
      TestCache cache(
          {.dtype = cache_type, .heads = 2, .dim = 24, .tokens_per_page = 2, .sub_pages = 2, .seats = 3, .pages = 5},
          rng);
      std::vector<std::int32_t> seats, indices;
      for (std::int32_t i = 3; i < 14; ++i) {  // crosses pages and sub pages
        seats.push_back(1);
        indices.push_back(i);
      }
      seats.insert(seats.end(), {2, 0, -9, 0});
      indices.insert(indices.end(), {19, -1, -1, 0});  // two of them padding
      Write write(cache, type, seats, indices, rng);
      TestCache expected = cache;
      for (std::int64_t t = 0; t < static_cast<std::int64_t>(seats.size()); ++t) {
        if (indices[static_cast<std::size_t>(t)] < 0) continue;
        for (std::int64_t h = 0; h < 2; ++h) {
          for (std::int64_t d = 0; d < 24; ++d) {
            const std::int64_t seat = seats[static_cast<std::size_t>(t)], index = indices[static_cast<std::size_t>(t)];
            expected.store(TestCache::kKeys, seat, index, h, d, write.keys.at(t, h * 24 + d));
            expected.store(TestCache::kValues, seat, index, h, d, write.values.at(t, h * 24 + d));
            if (h == 0) expected.store(TestCache::kIndexKeys, seat, index, 0, d, write.index_keys.at(t, d));
          }
        }
      }
      write_cache(cache.pool(), write.sources(cache), write.places(), cache.table());
      EXPECT_EQ(cache.bytes, expected.bytes);
    }
  }
}

TEST_P(CacheWriteTest, MinusOneWritesNothingAtAll) {
  TestCache cache({.seats = 1, .pages = 2}, rng);
  const std::vector<std::byte> before = cache.bytes;
  Write write(cache, DType::F32, {0, -1, 5}, {-1, -1, -1}, rng);
  write_cache(cache.pool(), write.sources(cache), write.places(), cache.table());
  EXPECT_EQ(cache.bytes, before);
}

TEST_P(CacheWriteTest, RowsOfAWiderProjectionAreWrittenInPlace) {
  TestCache cache({.dtype = DType::BF16, .heads = 2, .dim = 16, .tokens_per_page = 4, .seats = 1, .pages = 2}, rng);
  TestCache expected = cache;
  Tensor fused = Tensor::random(DType::F32, 3, 100, rng);
  const std::vector<std::int32_t> seat = {0, 0, 0}, index = {2, 3, 4};
  for (std::int64_t t = 0; t < 3; ++t) {
    for (std::int64_t i = 0; i < 32; ++i) {
      expected.store(TestCache::kKeys, 0, index[static_cast<std::size_t>(t)], i / 16, i % 16, fused.at(t, 40 + i));
    }
  }
  write_cache(cache.pool(), {{cache.view(TestCache::kKeys), static_cast<float*>(fused.data()) + 40, DType::F32, 100}},
              {seat.data(), index.data(), 3}, cache.table());
  EXPECT_EQ(cache.bytes, expected.bytes);
}

TEST_P(CacheWriteTest, ARefusedWriteChangesNothing) {
  TestCache cache({.heads = 2, .dim = 16, .tokens_per_page = 4, .seats = 2, .pages = 3}, rng);
  const std::vector<std::byte> before = cache.bytes;
  const auto refuse = [&](std::int32_t seat, std::int32_t index, const char* message) {
    Write write(cache, DType::F32, {0, seat}, {1, index}, rng);
    EXPECT_THAT([&] { write_cache(cache.pool(), write.sources(cache), write.places(), cache.table()); },
                ::testing::ThrowsMessage<InvalidArgument>(message));
    EXPECT_EQ(cache.bytes, before);
  };
  refuse(2, 0, "seat 2: the block table has 2");
  refuse(-1, 0, "seat -1: the block table has 2");
  refuse(1, 12, "page 3 of seat 1: the block table has 3 pages");
  cache.table_slots[4] = -1;
  refuse(1, 5, "slot -1 at page 1 of seat 1: the pool has 9");
  cache.table_slots[4] = 9;
  refuse(1, 5, "slot 9 at page 1 of seat 1: the pool has 9");
}

TEST(CacheViewTest, OffsetsPassTwoGibibytesWithoutWrapping) {
  const CacheView view{.dtype = DType::BF16,
                       .heads = 4,
                       .dim = 128,
                       .tokens_per_page = 32,
                       .sub_pages = 4,
                       .base_offset = 1 << 20,
                       .slot_stride = 17440 * 1024,
                       .head_stride = 3904 * 1024,
                       .sub_page_stride = 32 * 256,
                       .token_stride = 256};
  const std::vector<std::int32_t> slots = {121, 7000};
  const TokenRuns runs(view, slots.data(), 3);
  const std::int64_t base = (std::int64_t{1} << 20) + 3 * std::int64_t{3904} * 1024;
  EXPECT_EQ(runs.at(0, 1000).offset, base + 121 * std::int64_t{17440} * 1024);
  EXPECT_EQ(runs.at(128 + 70, 1000).offset, base + 7000 * std::int64_t{17440} * 1024 + 70 * 256);
  EXPECT_EQ(runs.at(128 + 70, 1000).count, 58);
  EXPECT_EQ(view.num_slots(17440 * 1024 * std::int64_t{7001}), 7001);
}

TEST(CacheViewTest, RunsEndWhereTokensCeaseToBeEvenlySpaced) {
  CacheView view{.dtype = DType::F32,
                 .heads = 1,
                 .dim = 8,
                 .tokens_per_page = 4,
                 .sub_pages = 2,
                 .slot_stride = 1024,
                 .head_stride = 1024,
                 .sub_page_stride = 512,
                 .token_stride = 32};
  const std::vector<std::int32_t> slots = {1, 0};
  EXPECT_EQ(TokenRuns(view, slots.data(), 0).at(1, 100).count, 3);
  EXPECT_EQ(TokenRuns(view, slots.data(), 0).at(5, 100).offset, 1024 + 512 + 32);
  EXPECT_EQ(TokenRuns(view, slots.data(), 0).at(5, 2).count, 2);
  view.sub_page_stride = 128;
  EXPECT_EQ(TokenRuns(view, slots.data(), 0).at(1, 100).count, 7);
}

}  // namespace
}  // namespace tandem::cpu::testing
