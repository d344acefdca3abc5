#include "tandem/cpu/rows.h"

#include "support.h"
#include "tandem/base/check.h"

namespace tandem::cpu::testing {
namespace {

using RowsTest = EachIsa;
TANDEM_EACH_ISA(RowsTest);

constexpr float kEps = 1e-6f;

std::vector<float> random_floats(std::int64_t n, std::mt19937& rng, float mean = 0.0f) {
  std::normal_distribution<float> normal(mean, 0.3f);
  std::vector<float> values(static_cast<std::size_t>(n));
  for (float& value : values) value = normal(rng);
  return values;
}

double norm_scale(const Tensor& x, std::int64_t row, std::int64_t first, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = first; i < first + n; ++i) sum += static_cast<double>(x.at(row, i)) * x.at(row, i);
  return 1.0 / std::sqrt(sum / static_cast<double>(n) + static_cast<double>(kEps));
}

TEST_P(RowsTest, RmsNormEqualsTheFormulaWithAndWithoutOnePlus) {
  for (const DType type : {DType::F32, DType::BF16}) {
    for (const std::int64_t n : {1, 8, 17, 64, 192, 515}) {
      for (const bool one_plus : {false, true}) {
        Tensor x = Tensor::random(type, 3, n, rng);
        const std::vector<float> weight = random_floats(n, rng);
        Tensor out(type, 3, n);
        rms_norm(x.view(), weight.data(), kEps, one_plus, out.view());
        for (std::int64_t t = 0; t < 3; ++t) {
          const double scale = norm_scale(x, t, 0, n);
          for (std::int64_t i = 0; i < n; ++i) {
            const double expected = x.at(t, i) * scale * ((one_plus ? 1.0 : 0.0) + weight[static_cast<std::size_t>(i)]);
            ASSERT_NEAR(out.at(t, i), expected, tolerance(type, expected, 2e-6 * (1 + std::abs(expected))));
          }
        }
      }
    }
  }
}

TEST_P(RowsTest, AddRmsNormEqualsAdditionThenNorm) {
  for (const DType type : {DType::F32, DType::BF16}) {
    Tensor x = Tensor::random(type, 5, 67, rng), residual = Tensor::random(type, 5, 67, rng);
    const std::vector<float> weight = random_floats(67, rng);
    Tensor sum(type, 5, 67), expected(type, 5, 67), out(type, 5, 67);
    for (std::int64_t i = 0; i < 5 * 67; ++i) sum.set(i, x[i] + residual[i]);
    rms_norm(sum.view(), weight.data(), kEps, true, expected.view());
    add_rms_norm(x.view(), residual.view(), weight.data(), kEps, true, out.view());
    EXPECT_TRUE(residual == sum);
    EXPECT_TRUE(out == expected);
  }
}

TEST_P(RowsTest, RoundsToNearestEvenOnceAndKeepsNanAndInfinity) {
  // Halfway between bf16 neighbours, just above and below, overflow, NaN.
  const std::vector<float> values = {1.00390625f, 1.01171875f, 1.0039063f, 1.0039062f, -1.00390625f, 3.4e38f,
                                     INFINITY,    -INFINITY,   NAN,        1e-40f,     -0.0f};
  std::vector<Bf16> out(values.size());
  kernels().store_row(values.data(), static_cast<std::int64_t>(values.size()), DType::BF16, out.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(values[i])) {
      EXPECT_TRUE(std::isnan(from_bf16(out[i])));
    } else {
      EXPECT_EQ(from_bf16(out[i]), values[i] == 3.4e38f ? INFINITY : round_to_bf16(values[i])) << values[i];
      EXPECT_EQ(std::signbit(from_bf16(out[i])), std::signbit(values[i]));
    }
  }
  Tensor x = Tensor::random(DType::F32, 1, 1000, rng, 1e3f);
  std::vector<Bf16> rounded(1000);
  kernels().store_row(static_cast<const float*>(x.data()), 1000, DType::BF16, rounded.data());
  for (std::int64_t i = 0; i < 1000; ++i)
    ASSERT_EQ(from_bf16(rounded[static_cast<std::size_t>(i)]), round_to_bf16(x[i]));
}

struct RopeCase {
  Tensor rows;
  std::vector<float> cos, sin, q_weight, k_weight;
  std::vector<NormRopePart> parts;
  std::vector<std::int32_t> positions;

  // 4 q heads and 2 k heads with norm and rope, 2 v heads left out, an index head of another width rotated only.
  RopeCase(DType type, std::int64_t tokens, std::mt19937& rng)
      : rows(Tensor::random(type, tokens, 4 * 24 + 2 * 24 + 2 * 24 + 40, rng)),
        cos(random_floats(50 * 8, rng)),
        sin(random_floats(50 * 8, rng)),
        q_weight(random_floats(24, rng)),
        k_weight(random_floats(24, rng)) {
    parts = {{.offset = 0, .heads = 4, .dim = 24, .rotary_dim = 16, .weight = q_weight.data()},
             {.offset = 96, .heads = 2, .dim = 24, .rotary_dim = 16, .weight = k_weight.data()},
             {.offset = 192, .heads = 1, .dim = 40, .rotary_dim = 16, .weight = nullptr}};
    for (std::int64_t t = 0; t < tokens; ++t) positions.push_back(static_cast<std::int32_t>(rng() % 50));
  }
  [[nodiscard]] RopeTable table() const { return {cos.data(), sin.data(), 50, 8}; }
};

TEST_P(RowsTest, NormRopeNormalisesRotatesAndRoundsOnce) {
  for (const DType type : {DType::F32, DType::BF16}) {
    RopeCase c(type, 4, rng);
    c.positions[2] = -1;  // padding
    const Tensor before = c.rows;
    norm_rope(c.rows.view(), c.parts, c.table(), c.positions.data(), kEps, true);
    Tensor expected = before;
    for (std::int64_t t = 0; t < 4; ++t) {
      if (t == 2) continue;
      for (const NormRopePart& part : c.parts) {
        for (std::int64_t h = 0; h < part.heads; ++h) {
          const std::int64_t base = part.offset + h * part.dim;
          std::vector<double> x;
          for (std::int64_t i = 0; i < part.dim; ++i) {
            const double gain = part.weight != nullptr ? norm_scale(before, t, base, part.dim) *
                                                             (1.0 + static_cast<double>(part.weight[i]))
                                                       : 1.0;
            x.push_back(before.at(t, base + i) * gain);
          }
          for (std::size_t i = 0; i < 8; ++i) {
            const auto at = static_cast<std::size_t>(c.positions[static_cast<std::size_t>(t)]) * 8 + i;
            const double a = x[i], b = x[i + 8], cosine = c.cos[at], sine = c.sin[at];
            x[i] = a * cosine - b * sine;
            x[i + 8] = b * cosine + a * sine;
          }
          for (std::int64_t i = 0; i < part.dim; ++i) {
            ASSERT_NEAR(c.rows.at(t, base + i), x[static_cast<std::size_t>(i)],
                        tolerance(type, x[static_cast<std::size_t>(i)], 2e-6 * 4));
          }
        }
      }
    }
    for (std::int64_t t = 0; t < 4; ++t) {
      for (std::int64_t i = 0; i < before.cols(); ++i) {
        if (t == 2 || (i >= 144 && i < 192)) {
          ASSERT_EQ(c.rows.at(t, i), before.at(t, i)) << "padding and v stay";
        }
      }
    }
  }
}

TEST_P(RowsTest, HeadsThatOnlyNormaliseNeedNoRopeTable) {
  RopeCase c(DType::F32, 2, rng);
  Tensor expected = c.rows;
  c.positions = {1000, 0};
  norm_rope(c.rows.view(), {{.offset = 24, .heads = 1, .dim = 24, .rotary_dim = 0, .weight = c.q_weight.data()}}, {},
            c.positions.data(), kEps, true);
  Matrix head = expected.view();
  head.data = static_cast<float*>(head.data) + 24;
  head.cols = 24;
  rms_norm(head, c.q_weight.data(), kEps, true, head);
  EXPECT_TRUE(c.rows == expected);
}

TEST_P(RowsTest, ProjectingInOneCallGivesTheSameBits) {
  RopeCase c(DType::BF16, 5, rng);
  Tensor weight = Tensor::random(DType::BF16, c.rows.cols(), 30, rng), x = Tensor::random(DType::BF16, 5, 30, rng);
  const PackedLinear packed(weight.view());
  Tensor out(DType::BF16, 5, c.rows.cols());
  linear(packed, x.view(), c.rows.view());
  norm_rope(c.rows.view(), c.parts, c.table(), c.positions.data(), kEps, true);
  project(packed, x.view(), c.parts, c.table(), c.positions.data(), kEps, true, out.view());
  EXPECT_TRUE(out == c.rows);
}

TEST_P(RowsTest, GatedActivationsEqualTheirFormulas) {
  for (const DType type : {DType::F32, DType::BF16}) {
    for (const std::int64_t n : {1, 15, 16, 70}) {
      Tensor x = Tensor::random(type, 3, 2 * n, rng, 8.0f);  // many beyond the limit
      Tensor oai(type, 3, n), silu(type, 3, n);
      swiglu_oai(x.view(), 1.702f, 7.0f, oai.view());
      silu_mul(x.view(), silu.view());
      for (std::int64_t t = 0; t < 3; ++t) {
        for (std::int64_t i = 0; i < n; ++i) {
          const double gate = x.at(t, i), up = x.at(t, n + i);
          const double g = std::min(gate, 7.0), u = std::clamp(up, -7.0, 7.0);
          const double a = g / (1 + std::exp(-1.702 * g)) * (u + 1);
          const double b = gate / (1 + std::exp(-gate)) * up;
          ASSERT_NEAR(oai.at(t, i), a, tolerance(type, a, 1e-6 * (1 + std::abs(a))));
          ASSERT_NEAR(silu.at(t, i), b, tolerance(type, b, 1e-6 * (1 + std::abs(b))));
        }
      }
    }
  }
}

TEST_P(RowsTest, EveryRowOperationGivesARowTheSameBitsInAnyBatch) {
  constexpr std::int64_t rows = 300;  // enough for several items of the parallel loop
  for (const DType type : {DType::F32, DType::BF16}) {
    RopeCase c(type, rows, rng);
    const std::int64_t cols = c.rows.cols();
    Tensor x = Tensor::random(type, rows, cols, rng), residual = Tensor::random(type, rows, cols, rng);
    const std::vector<float> weight = random_floats(cols, rng);
    const auto run = [&](const std::vector<std::int64_t>& split) {
      std::vector<Tensor> outs = {c.rows,
                                  residual,
                                  Tensor(type, rows, cols),
                                  Tensor(type, rows, cols),
                                  Tensor(type, rows, cols / 2),
                                  Tensor(type, rows, cols / 2)};
      std::int64_t first = 0;
      for (const std::int64_t n : split) {
        norm_rope(outs[0].rows_view(first, n), c.parts, c.table(), c.positions.data() + first, kEps, true);
        add_rms_norm(x.rows_view(first, n), outs[1].rows_view(first, n), weight.data(), kEps, true,
                     outs[2].rows_view(first, n));
        rms_norm(x.rows_view(first, n), weight.data(), kEps, false, outs[3].rows_view(first, n));
        swiglu_oai(x.rows_view(first, n), 1.702f, 7.0f, outs[4].rows_view(first, n));
        silu_mul(x.rows_view(first, n), outs[5].rows_view(first, n));
        first += n;
      }
      return outs;
    };
    const std::vector<Tensor> expected = run(std::vector<std::int64_t>(rows, 1));
    for (const auto& split : splits(rows)) {
      const std::vector<Tensor> outs = run(split);
      for (std::size_t i = 0; i < outs.size(); ++i) EXPECT_TRUE(outs[i] == expected[i]) << "operation " << i;
    }
  }
}

TEST_P(RowsTest, RefusesShapesThatDoNotFit) {
  RopeCase c(DType::F32, 2, rng);
  c.positions[1] = 50;
  EXPECT_THAT([&] { norm_rope(c.rows.view(), c.parts, c.table(), c.positions.data(), kEps, true); },
              ::testing::ThrowsMessage<InvalidArgument>("position 50 of row 1: the rope table has 50"));
  c.positions[1] = 0;
  c.parts[0].rotary_dim = 24;
  EXPECT_THROW(norm_rope(c.rows.view(), c.parts, c.table(), c.positions.data(), kEps, true), InvalidArgument);
  c.parts[0] = {.offset = 230, .heads = 1, .dim = 24, .rotary_dim = 0, .weight = nullptr};
  EXPECT_THROW(norm_rope(c.rows.view(), c.parts, c.table(), c.positions.data(), kEps, true), InvalidArgument);
  Tensor x(DType::F32, 2, 5), out(DType::F32, 2, 2);
  EXPECT_THAT([&] { swiglu_oai(x.view(), 1, 7, out.view()); },
              ::testing::ThrowsMessage<InvalidArgument>("gate_up float32 [2, 5]: columns must be even"));
}

}  // namespace
}  // namespace tandem::cpu::testing
