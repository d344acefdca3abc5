#include "tandem/cpu/experts.h"

#include "support.h"
#include "tandem/base/check.h"
#include "tandem/cpu/router.h"

namespace tandem::cpu::testing {
namespace {

using ExpertsTest = EachIsa;
using RouterTest = EachIsa;
TANDEM_EACH_ISA(ExpertsTest);
TANDEM_EACH_ISA(RouterTest);

struct Model {
  std::int64_t hidden, width, shared_width;
  std::vector<Tensor> gate_up, down;  // routed, then the shared one if its width is not 0

  Model(DType type, std::int64_t experts, std::int64_t h, std::int64_t i, std::int64_t shared, std::mt19937& rng)
      : hidden(h), width(i), shared_width(shared) {
    for (std::int64_t e = 0; e < experts; ++e) add(type, i, rng);
    if (shared > 0) add(type, shared, rng);
  }
  void add(DType type, std::int64_t i, std::mt19937& rng) {
    gate_up.push_back(Tensor::random(type, 2 * i, hidden, rng, 0.4f));
    down.push_back(Tensor::random(type, hidden, i, rng, 0.4f));
  }
  [[nodiscard]] PackedExperts pack() {
    std::vector<PackedMlp> routed;
    const std::size_t count = gate_up.size() - (shared_width > 0 ? 1 : 0);
    for (std::size_t e = 0; e < count; ++e) routed.emplace_back(gate_up[e].view(), down[e].view());
    std::optional<PackedMlp> shared;
    if (shared_width > 0) shared.emplace(gate_up.back().view(), down.back().view());
    return {std::move(routed), std::move(shared)};
  }

  [[nodiscard]] std::vector<double> mlp(std::size_t e, const Tensor& x, std::int64_t t,
                                        const GatedActivation& activation) const {
    const std::int64_t n = down[e].cols();
    std::vector<double> active, out;
    for (std::int64_t i = 0; i < n; ++i) {
      double gate = 0, up = 0;
      for (std::int64_t j = 0; j < hidden; ++j) {
        gate += static_cast<double>(gate_up[e].at(i, j)) * x.at(t, j);
        up += static_cast<double>(gate_up[e].at(n + i, j)) * x.at(t, j);
      }
      if (activation.kind == GatedActivation::Kind::Silu) {
        active.push_back(gate / (1 + std::exp(-gate)) * up);
      } else {
        const double limit = activation.limit, alpha = activation.alpha;
        gate = std::min(gate, limit);
        active.push_back(gate / (1 + std::exp(-alpha * gate)) * (std::clamp(up, -limit, limit) + 1));
      }
    }
    for (std::int64_t j = 0; j < hidden; ++j) {
      double sum = 0;
      for (std::int64_t i = 0; i < n; ++i) sum += active[static_cast<std::size_t>(i)] * down[e].at(j, i);
      out.push_back(sum);
    }
    return out;
  }
};

struct Routing {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::int64_t topk;

  Routing(std::int64_t tokens, std::int64_t k, std::int64_t experts, std::mt19937& rng) : topk(k) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::vector<std::int32_t> order(static_cast<std::size_t>(experts));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), rng);
      for (std::int64_t i = 0; i < k; ++i) {
        ids.push_back(order[static_cast<std::size_t>(i)]);
        weights.push_back(static_cast<float>(rng() % 1000) / 1000.0f);
      }
    }
  }
};

TEST_P(ExpertsTest, EqualTheWeightedSumOfTheirMlps) {
  struct Geometry {
    std::int64_t experts, topk, hidden, width, shared;
    GatedActivation::Kind kind;
  };
  constexpr auto oai = GatedActivation::Kind::SwigluOai;
  for (const Geometry& g : {Geometry{5, 2, 48, 24, 40, oai}, Geometry{4, 3, 33, 17, 0, oai},
                            Geometry{0, 0, 40, 33, 33, oai}, Geometry{3, 1, 64, 16, 16, GatedActivation::Kind::Silu}}) {
    for (const DType weight_type : {DType::F32, DType::BF16}) {
      for (const DType type : {DType::F32, DType::BF16}) {
        Model model(weight_type, g.experts, g.hidden, g.width, g.shared, rng);
        Tensor x = Tensor::random(type, 7, g.hidden, rng), out(type, 7, g.hidden);
        Routing routing(7, g.topk, g.experts, rng);
        if (g.topk > 1) routing.ids[static_cast<std::size_t>(g.topk * 3)] = -1;  // an empty slot
        const GatedActivation activation{g.kind, 1.702f, 1.5f};
        mixture(model.pack(), x.view(), routing.ids.data(), routing.weights.data(), g.topk, activation, out.view());
        for (std::int64_t t = 0; t < 7; ++t) {
          std::vector<double> expected(static_cast<std::size_t>(g.hidden), 0.0);
          const auto add = [&](std::size_t expert, double weight) {
            const std::vector<double> y = model.mlp(expert, x, t, activation);
            for (std::size_t j = 0; j < expected.size(); ++j) expected[j] += weight * y[j];
          };
          for (std::int64_t i = 0; i < g.topk; ++i) {
            const auto at = static_cast<std::size_t>(t * g.topk + i);
            if (routing.ids[at] >= 0)
              add(static_cast<std::size_t>(routing.ids[at]), static_cast<double>(routing.weights[at]));
          }
          if (g.shared > 0) add(static_cast<std::size_t>(g.experts), 1.0);
          for (std::int64_t j = 0; j < g.hidden; ++j) {
            const double value = expected[static_cast<std::size_t>(j)];
            ASSERT_NEAR(out.at(t, j), value, tolerance(type, value, 5e-5)) << "token " << t << " column " << j;
          }
        }
      }
    }
  }
}

TEST_P(ExpertsTest, ATokenHasTheSameBitsInAnyBatchAndWithAnyNumberOfThreads) {
  constexpr std::int64_t tokens = 61;
  for (const DType weight_type : {DType::F32, DType::BF16}) {
    Model model(weight_type, 6, 192, 128, 128, rng);
    const PackedExperts packed = model.pack();
    Tensor x = Tensor::random(DType::F32, tokens, 192, rng), expected(DType::F32, tokens, 192);
    Routing routing(tokens, 2, 6, rng);
    const auto run = [&](Tensor& out, const std::vector<std::int64_t>& split) {
      std::int64_t first = 0;
      for (const std::int64_t n : split) {
        mixture(packed, x.rows_view(first, n), routing.ids.data() + first * 2, routing.weights.data() + first * 2, 2,
                {}, out.rows_view(first, n));
        first += n;
      }
    };
    ThreadPool::shared().set_num_threads(1);
    run(expected, {tokens});
    ThreadPool::shared().set_num_threads(2);
    for (const auto& split : splits(tokens)) {
      Tensor out(DType::F32, tokens, 192);
      run(out, split);
      EXPECT_TRUE(out == expected) << "first piece " << split.front();
    }
  }
}

TEST_P(ExpertsTest, AnExpertNamedTwiceByATokenCountsTwice) {
  Model model(DType::F32, 3, 32, 16, 24, rng);
  const PackedExperts packed = model.pack();
  for (const std::int64_t tokens : {1, 3}) {
    Tensor x = Tensor::random(DType::F32, tokens, 32, rng), twice(DType::F32, tokens, 32), once(DType::F32, tokens, 32);
    const std::vector<std::int32_t> double_ids(static_cast<std::size_t>(2 * tokens), 1);
    const std::vector<float> double_weights(double_ids.size(), 0.25f);
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), 1);
    const std::vector<float> weights(ids.size(), 0.5f);
    mixture(packed, x.view(), double_ids.data(), double_weights.data(), 2, {}, twice.view());
    mixture(packed, x.view(), ids.data(), weights.data(), 1, {}, once.view());
    for (std::int64_t i = 0; i < tokens * 32; ++i) ASSERT_NEAR(twice[i], once[i], 1e-5);
  }
}

TEST_P(ExpertsTest, RefuseIdsThatDoNotExist) {
  Model model(DType::F32, 2, 16, 8, 0, rng);
  const PackedExperts packed = model.pack();
  Tensor x = Tensor::random(DType::F32, 1, 16, rng), out(DType::F32, 1, 16);
  const std::vector<std::int32_t> ids = {0, 2};
  const std::vector<float> weights = {1, 1};
  EXPECT_THAT([&] { mixture(packed, x.view(), ids.data(), weights.data(), 2, {}, out.view()); },
              ::testing::ThrowsMessage<InvalidArgument>("expert 2 of token 0, slot 1: there are 2"));
  EXPECT_THROW(PackedMlp(Tensor(DType::F32, 8, 16).view(), Tensor(DType::F32, 16, 5).view()), InvalidArgument);
}

TEST_P(RouterTest, ChoosesByBiasedAndWeighsByUnbiasedProbability) {
  for (const DType type : {DType::F32, DType::BF16}) {
    for (const auto& [experts, hidden] : {std::pair<std::int64_t, std::int64_t>{8, 192}, {37, 50}, {128, 64}}) {
      Tensor x = Tensor::random(type, 9, hidden, rng), gate = Tensor::random(DType::F32, experts, hidden, rng, 0.1f);
      Tensor bias = Tensor::random(DType::F32, 1, experts, rng, 0.5f);
      std::vector<std::int32_t> ids(9 * 3);
      std::vector<float> weights(9 * 3);
      route(x.view(), gate.view(), static_cast<const float*>(bias.data()), 3, 2.0f, ids.data(), weights.data());
      for (std::int64_t t = 0; t < 9; ++t) {
        std::vector<double> p;
        for (std::int64_t e = 0; e < experts; ++e) {
          double logit = 0;
          for (std::int64_t j = 0; j < hidden; ++j) logit += static_cast<double>(x.at(t, j)) * gate.at(e, j);
          p.push_back(1 / (1 + std::exp(-logit)));
        }
        std::vector<std::int32_t> order(p.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
          return p[static_cast<std::size_t>(a)] + bias[a] > p[static_cast<std::size_t>(b)] + bias[b];
        });
        double sum = 0;
        for (std::size_t i = 0; i < 3; ++i) sum += p[static_cast<std::size_t>(order[i])];
        for (std::size_t i = 0; i < 3; ++i) {
          const auto at = static_cast<std::size_t>(t) * 3 + i;
          ASSERT_EQ(ids[at], order[i]);
          ASSERT_NEAR(weights[at], 2 * p[static_cast<std::size_t>(order[i])] / sum, 1e-5);
        }
      }
    }
  }
}

TEST_P(RouterTest, RoutingAndMixingInOneCallGivesTheSameBits) {
  Model model(DType::BF16, 6, 48, 24, 24, rng);
  const PackedExperts packed = model.pack();
  Tensor x = Tensor::random(DType::BF16, 11, 48, rng), gate = Tensor::random(DType::F32, 6, 48, rng);
  const std::vector<float> bias = {0, 0.1f, 0, -0.2f, 0, 0};
  Tensor expected(DType::BF16, 11, 48), out(DType::BF16, 11, 48);
  std::vector<std::int32_t> ids(22);
  std::vector<float> weights(22);
  route(x.view(), gate.view(), bias.data(), 2, 2.0f, ids.data(), weights.data());
  mixture(packed, x.view(), ids.data(), weights.data(), 2, {}, expected.view());
  routed_mixture(packed, x.view(), gate.view(), bias.data(), 2, 2.0f, {}, out.view());
  EXPECT_TRUE(out == expected);
  EXPECT_THROW(routed_mixture(packed, x.view(), gate.view(), bias.data(), 0, 2.0f, {}, out.view()), InvalidArgument);
}

TEST_P(RouterTest, TiesGoToTheLowerExpertAndBatchesDoNotMatter) {
  Tensor x = Tensor::random(DType::F32, 70, 24, rng), gate = Tensor::random(DType::F32, 20, 24, rng);
  for (std::int64_t j = 0; j < 24; ++j) gate.set(17 * 24 + j, gate.at(4, j));  // expert 17 equals expert 4
  std::vector<float> bias(20, 0.0f);
  bias[4] = bias[17] = 2.0f;  // both always first
  std::vector<std::int32_t> ids(70 * 3);
  std::vector<float> weights(70 * 3);
  route(x.view(), gate.view(), bias.data(), 3, 1.0f, ids.data(), weights.data());
  for (std::int64_t t = 0; t < 70; ++t) {
    std::int32_t one[3];
    float share[3];
    route(x.rows_view(t, 1), gate.view(), bias.data(), 3, 1.0f, one, share);
    for (std::int64_t i = 0; i < 3; ++i) {
      ASSERT_EQ(one[i], ids[static_cast<std::size_t>(t * 3 + i)]);
      ASSERT_EQ(share[i], weights[static_cast<std::size_t>(t * 3 + i)]);
    }
    ASSERT_EQ(one[0], 4);
    ASSERT_EQ(one[1], 17);
    // A tie for the last place.
    route(x.rows_view(t, 1), gate.view(), bias.data(), 1, 1.0f, one, share);
    ASSERT_EQ(one[0], 4);
  }
}

}  // namespace
}  // namespace tandem::cpu::testing
