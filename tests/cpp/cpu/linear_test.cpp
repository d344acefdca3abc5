#include "tandem/cpu/linear.h"

#include <algorithm>
#include <memory>

#include "support.h"
#include "tandem/base/check.h"
#include "tandem/cpu/buffer.h"

namespace tandem::cpu::testing {
namespace {

using LinearTest = EachIsa;
TANDEM_EACH_ISA(LinearTest);

struct Sizes {
  std::int64_t n, k;
};
// One column, odd k, ragged panels, several panel groups.
constexpr Sizes kSizes[] = {{1, 1}, {3, 7}, {32, 64}, {33, 65}, {190, 24}, {256, 96}, {301, 129}};

TEST_P(LinearTest, EqualsADoublePrecisionProduct) {
  for (const auto& [n, k] : kSizes) {
    for (const DType weight_type : {DType::F32, DType::BF16}) {
      for (const DType type : {DType::F32, DType::BF16}) {
        Tensor weight = Tensor::random(weight_type, n, k, rng);
        Tensor x = Tensor::random(type, 5, k, rng);
        Tensor out(type, 5, n);
        linear(PackedLinear(weight.view()), x.view(), out.view());
        for (std::int64_t t = 0; t < 5; ++t) {
          for (std::int64_t i = 0; i < n; ++i) {
            double sum = 0, size = 0;
            for (std::int64_t j = 0; j < k; ++j) {
              sum += static_cast<double>(x.at(t, j)) * weight.at(i, j);
              size += std::abs(static_cast<double>(x.at(t, j)) * weight.at(i, j));
            }
            ASSERT_NEAR(out.at(t, i), sum, tolerance(type, sum, 1e-6 * size))
                << n << "x" << k << " at " << t << "," << i;
          }
        }
      }
    }
  }
}

TEST_P(LinearTest, ARowHasTheSameBitsInAnyBatchAndWithAnyNumberOfThreads) {
  constexpr std::int64_t rows = 45;
  for (const auto& [n, k] : {Sizes{301, 129}, Sizes{96, 640}}) {
    for (const DType weight_type : {DType::F32, DType::BF16}) {
      for (const DType type : {DType::F32, DType::BF16}) {
        Tensor weight = Tensor::random(weight_type, n, k, rng);
        const PackedLinear packed(weight.view());
        Tensor x = Tensor::random(type, rows, k, rng);
        Tensor expected(type, rows, n);
        ThreadPool::shared().set_num_threads(1);
        linear(packed, x.view(), expected.view());
        ThreadPool::shared().set_num_threads(2);
        for (const auto& split : splits(rows)) {
          Tensor out(type, rows, n);
          std::int64_t first = 0;
          for (const std::int64_t count : split) {
            linear(packed, x.rows_view(first, count), out.rows_view(first, count));
            first += count;
          }
          ASSERT_TRUE(out == expected) << "first piece " << split.front();
        }
      }
    }
  }
}

TEST_P(LinearTest, EveryNumberOfRowsUpToThreeTilesAgreesWithOneRow) {
  Tensor weight = Tensor::random(DType::BF16, 300, 40, rng);
  const PackedLinear packed(weight.view());
  Tensor x = Tensor::random(DType::F32, 37, 40, rng);
  Tensor single(DType::F32, 37, 300);
  for (std::int64_t t = 0; t < 37; ++t) linear(packed, x.rows_view(t, 1), single.rows_view(t, 1));
  for (std::int64_t rows = 1; rows <= 37; ++rows) {
    Tensor out(DType::F32, 37, 300);
    linear(packed, x.rows_view(0, rows), out.rows_view(0, rows));
    for (std::int64_t i = 0; i < rows * 300; ++i) ASSERT_EQ(out[i], single[i]) << rows << " rows, element " << i;
  }
}

TEST_P(LinearTest, ABf16WeightGivesTheBitsOfItsFp32Copy) {
  Tensor half = Tensor::random(DType::BF16, 77, 51, rng);
  Tensor full(DType::F32, 77, 51);
  for (std::int64_t i = 0; i < 77 * 51; ++i) full.set(i, half[i]);
  Tensor x = Tensor::random(DType::F32, 9, 51, rng);
  Tensor a(DType::F32, 9, 77), b(DType::F32, 9, 77);
  linear(PackedLinear(half.view()), x.view(), a.view());
  linear(PackedLinear(full.view()), x.view(), b.view());
  EXPECT_TRUE(a == b);
}

TEST_P(LinearTest, ReadsStridedRowsAndWritesNothingBesideItsOwn) {
  Tensor weight = Tensor::random(DType::F32, 40, 20, rng);
  Tensor wide = Tensor::random(DType::F32, 6, 50, rng);
  Tensor x(DType::F32, 6, 20);
  for (std::int64_t t = 0; t < 6; ++t) {
    for (std::int64_t j = 0; j < 20; ++j) x.set(t * 20 + j, wide.at(t, 10 + j));
  }
  const PackedLinear packed(weight.view());
  Tensor expected(DType::F32, 6, 40);
  linear(packed, x.view(), expected.view());
  Tensor out = Tensor::random(DType::F32, 6, 100, rng);
  const Tensor before = out;
  linear(packed, {static_cast<float*>(wide.data()) + 10, DType::F32, 6, 20, 50},
         {static_cast<float*>(out.data()) + 30, DType::F32, 6, 40, 100});
  for (std::int64_t t = 0; t < 6; ++t) {
    for (std::int64_t i = 0; i < 100; ++i) {
      ASSERT_EQ(out.at(t, i), i >= 30 && i < 70 ? expected.at(t, i - 30) : before.at(t, i));
    }
  }
}

TEST_P(LinearTest, ANanRowLeavesTheOtherRowsAlone) {
  Tensor weight = Tensor::random(DType::F32, 40, 20, rng);
  const PackedLinear packed(weight.view());
  Tensor x = Tensor::random(DType::F32, 13, 20, rng);
  Tensor expected(DType::F32, 13, 40), out(DType::F32, 13, 40);
  linear(packed, x.view(), expected.view());
  for (std::int64_t j = 0; j < 20; ++j) x.set(5 * 20 + j, NAN);
  linear(packed, x.view(), out.view());
  for (std::int64_t t = 0; t < 13; ++t) {
    for (std::int64_t i = 0; i < 40; ++i) {
      if (t == 5) {
        ASSERT_TRUE(std::isnan(out.at(t, i)));
      } else {
        ASSERT_EQ(out.at(t, i), expected.at(t, i));
      }
    }
  }
}

TEST_P(LinearTest, NoRowsIsNoWork) {
  Tensor weight = Tensor::random(DType::F32, 4, 4, rng);
  Tensor x(DType::F32, 0, 4), out(DType::F32, 0, 4);
  EXPECT_NO_THROW(linear(PackedLinear(weight.view()), x.view(), out.view()));
}

TEST_P(LinearTest, RefusesShapesAndDtypesThatDoNotFitAndNamesThem) {
  Tensor weight = Tensor::random(DType::F32, 4, 6, rng);
  const PackedLinear packed(weight.view());
  Tensor x(DType::F32, 2, 5), good(DType::F32, 2, 6), out(DType::F32, 2, 4), half(DType::BF16, 2, 4);
  EXPECT_THAT([&] { linear(packed, x.view(), out.view()); },
              ::testing::ThrowsMessage<InvalidArgument>("x float32 [2, 5]: the weight takes 6 columns"));
  EXPECT_THAT([&] { linear(packed, good.view(), half.view()); },
              ::testing::ThrowsMessage<InvalidArgument>("out bfloat16 [2, 4]: expected float32 [2, 4]"));
  EXPECT_THROW(PackedLinear(Tensor(DType::F32, 0, 3).view()), InvalidArgument);
}

TEST(PanelItemsTest, EveryPanelIsInOneItemAndSharesDifferByAtMostOne) {
  for (const int threads : {1, 2, 3}) {
    ThreadPool::shared().set_num_threads(threads);
    for (const std::int64_t panels : {1, 2, 11, 12, 84}) {
      for (const std::int64_t work : {1, 1'000'000, 100'000'000}) {
        const PanelItems items(panels, 8, work);
        ASSERT_GE(items.num_items(), 1);
        std::int64_t expected = 0;
        for (std::int64_t i = 0; i < items.num_items(); ++i) {
          EXPECT_EQ(items.first(i), expected);
          EXPECT_GE(items.count(i), panels / items.num_items());
          EXPECT_LE(items.count(i), panels / items.num_items() + 1);
          EXPECT_EQ(items.next(i), i + threads < items.num_items() ? items.first(i + threads) : panels);
          expected += items.count(i);
        }
        EXPECT_EQ(expected, panels);
        // Where the work is worth a round of claims, no thread is left with an item more than another.
        if (work >= 250'000 && panels >= threads) {
          EXPECT_EQ(items.num_items() % threads, 0);
        }
      }
    }
  }
  ThreadPool::shared().set_num_threads(1);
}

TEST(WeightBufferTest, WeightsFollowEachOtherAndKeepTheirMemoryWhenOthersGo) {
  const WeightBuffer first(100);
  auto second = std::make_unique<WeightBuffer>(64), third = std::make_unique<WeightBuffer>(1);
  EXPECT_EQ(second->data() - first.data(), 128);
  EXPECT_EQ(third->data() - second->data(), 64);
  std::fill_n(first.data(), 100, std::byte{1});
  std::fill_n(third->data(), 1, std::byte{3});
  second.reset();
  // A weight larger than a block has one of its own.
  const WeightBuffer large(std::int64_t{40} << 20);
  std::fill_n(large.data(), large.num_bytes(), std::byte{9});
  EXPECT_EQ(std::count(first.data(), first.data() + 100, std::byte{1}), 100);
  EXPECT_EQ(*third->data(), std::byte{3});
}

}  // namespace
}  // namespace tandem::cpu::testing
