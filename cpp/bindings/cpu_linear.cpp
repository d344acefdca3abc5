#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu_args.h"
#include "tandem/base/check.h"
#include "tandem/cpu/experts.h"
#include "tandem/cpu/linear.h"
#include "tandem/cpu/router.h"
#include "tandem/cpu/rows.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::cpu {
namespace {

// What a row operation costs beside a multiply-add is about 4 per element.
std::int64_t row_work(const ConstMatrix& rows) { return rows.rows * rows.cols * 4; }

void bind_linear(nb::module_& m) {
  nb::class_<PackedLinear>(m, "PackedLinear", "A weight rearranged once for `linear`; keeps a copy, not the tensor.")
      .def(
          "__init__",
          [](PackedLinear* self, const TensorArg& weight) {
            const ConstMatrix matrix = weight.matrix("weight");
            const nb::gil_scoped_release unlocked;
            new (self) PackedLinear(matrix);
          },
          "weight"_a, "`weight`: float32 or bfloat16 `[N, K]`. Raises InvalidArgument for anything else.")
      .def_prop_ro("out_features", &PackedLinear::out_features, "N.")
      .def_prop_ro("in_features", &PackedLinear::in_features, "K.")
      .def_prop_ro("num_bytes", &PackedLinear::num_bytes, "Size of the packed copy.");

  m.def(
      "linear",
      [](const PackedLinear& weight, const TensorArg& x, const TensorArg& out) {
        const Matrix from = x.matrix("x"), to = out.matrix("out");
        run_kernel(from.rows * from.cols * to.cols, [=, &weight = held(weight)] { linear(weight, from, to); });
      },
      "weight"_a, "x"_a, "out"_a,
      "out `[T, N]` = x `[T, K]` @ weight^T, both float32 or both bfloat16.\n\n"
      "Each element is one chain of fp32 multiply-adds over ascending k, rounded once: its bits do not depend on T. "
      "Raises InvalidArgument where shapes or dtypes do not fit.");
}

struct RopeTables {
  std::vector<float> cos;
  std::vector<float> sin;
  std::int64_t positions;
  std::int64_t half;
};

struct NormRope {
  std::vector<NormRopePart> parts;
  std::unique_ptr<float[]> weights;  // of all parts, which point into it
  std::shared_ptr<const RopeTables> rope;
  float eps;
  bool one_plus;

  [[nodiscard]] RopeTable table() const {
    if (rope == nullptr) return {};
    return {rope->cos.data(), rope->sin.data(), rope->positions, rope->half};
  }
};

using PartTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::optional<TensorArg>>;

void bind_rows(nb::module_& m) {
  m.def(
      "rms_norm",
      [](const TensorArg& x, const TensorArg& weight, float eps, bool one_plus, const TensorArg& out) {
        const Matrix from = x.matrix("x"), to = out.matrix("out");
        weight.require("weight", 1).require_size("weight", 0, from.cols);
        const float* gain = weight.floats("weight");
        run_kernel(row_work(from), [=] { rms_norm(from, gain, eps, one_plus, to); });
      },
      "x"_a, "weight"_a, "eps"_a, "one_plus"_a, "out"_a,
      "out = x * rsqrt(mean(x^2) + eps) * (weight + one_plus), per row of x `[T, H]`.\n\n"
      "weight float32 `[H]`; fp32 inside, rounded once. out may be x.");

  m.def(
      "add_rms_norm",
      [](const TensorArg& x, const TensorArg& residual, const TensorArg& weight, float eps, bool one_plus,
         const TensorArg& out) {
        const Matrix from = x.matrix("x"), sum = residual.matrix("residual"), to = out.matrix("out");
        weight.require("weight", 1).require_size("weight", 0, from.cols);
        const float* gain = weight.floats("weight");
        run_kernel(row_work(from), [=] { add_rms_norm(from, sum, gain, eps, one_plus, to); });
      },
      "x"_a, "residual"_a, "weight"_a, "eps"_a, "one_plus"_a, "out"_a,
      "residual += x (rounded to its dtype), then out = rms_norm(residual).");

  nb::class_<RopeTables>(m, "RopeTable", "Cosines and sines by position, shared by the NormRope of all layers.")
      .def(
          "__init__",
          [](RopeTables* self, const TensorArg& cos, const TensorArg& sin) {
            cos.require("cos", 2);
            sin.require("sin", 2).require_size("sin", 0, cos.size(0));
            sin.require_size("sin", 1, cos.size(1));
            const std::int64_t count = cos.size(0) * cos.size(1);
            const float *c = cos.floats("cos"), *s = sin.floats("sin");
            new (self) RopeTables{{c, c + count}, {s, s + count}, cos.size(0), cos.size(1)};
          },
          "cos"_a, "sin"_a, "float32 `[positions, rotary_dim / 2]` each; copied.");

  nb::class_<NormRope>(m, "NormRope", "What `norm_rope` does to the heads of one fused projection row.")
      .def(
          "__init__",
          [](NormRope* self, const std::vector<PartTuple>& parts, std::shared_ptr<RopeTables> rope, float eps,
             bool one_plus) {
            std::int64_t floats = 0;
            for (const auto& [offset, heads, dim, rotary_dim, weight] : parts) {
              if (!weight) continue;
              weight->require("weight", 1).require_size("weight", 0, dim);
              floats += dim;
            }
            NormRope plan{
                {}, std::make_unique<float[]>(static_cast<std::size_t>(floats)), std::move(rope), eps, one_plus};
            float* next = plan.weights.get();
            for (const auto& [offset, heads, dim, rotary_dim, weight] : parts) {
              plan.parts.push_back({offset, heads, dim, rotary_dim, weight ? next : nullptr});
              if (weight) next = std::copy_n(weight->floats("weight"), dim, next);
            }
            new (self) NormRope(std::move(plan));
          },
          "parts"_a, "rope"_a.none(), "eps"_a, "one_plus"_a,
          "`parts`: (first column, heads, head dim, rotary dim, norm weight float32 `[dim]` or None) each; weights are "
          "copied. rotary dim is 0 (no rotation) or twice the table's columns.");

  m.def(
      "norm_rope",
      [](const NormRope& plan, const TensorArg& rows, const TensorArg& positions) {
        const Matrix matrix = rows.matrix("rows");
        positions.require("positions", 1).require_size("positions", 0, matrix.rows);
        const std::int32_t* at = positions.ints("positions");
        run_kernel(row_work(matrix), [=, &plan = held(plan)] {
          norm_rope(matrix, plan.parts, plan.table(), at, plan.eps, plan.one_plus);
        });
      },
      "plan"_a, "rows"_a, "positions"_a,
      "In place on rows `[T, C]` (float32 or bfloat16): per head RMS norm, then half-split rotation by positions int32 "
      "`[T]`, both in fp32, then one rounding. Rows with a negative position are padding and stay as they are.");

  m.def(
      "project",
      [](const PackedLinear& weight, const NormRope& plan, const TensorArg& x, const TensorArg& positions,
         const TensorArg& rows) {
        const Matrix from = x.matrix("x"), to = rows.matrix("rows");
        positions.require("positions", 1).require_size("positions", 0, to.rows);
        const std::int32_t* at = positions.ints("positions");
        run_kernel(from.rows * from.cols * to.cols, [=, &weight = held(weight), &plan = held(plan)] {
          project(weight, from, plan.parts, plan.table(), at, plan.eps, plan.one_plus, to);
        });
      },
      "weight"_a, "plan"_a, "x"_a, "positions"_a, "rows"_a,
      "`linear(weight, x, rows)`, then `norm_rope(plan, rows, positions)`, to the same bits.");

  m.def(
      "swiglu_oai",
      [](const TensorArg& gate_up, float alpha, float limit, const TensorArg& out) {
        const Matrix from = gate_up.matrix("gate_up"), to = out.matrix("out");
        run_kernel(row_work(from), [=] { swiglu_oai(from, alpha, limit, to); });
      },
      "gate_up"_a, "alpha"_a, "limit"_a, "out"_a,
      "gate_up `[T, 2I]` (gates first) -> out `[T, I]`: g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), "
      "u = clamp(up, -limit, limit).");

  m.def(
      "silu_mul",
      [](const TensorArg& gate_up, const TensorArg& out) {
        const Matrix from = gate_up.matrix("gate_up"), to = out.matrix("out");
        run_kernel(row_work(from), [=] { silu_mul(from, to); });
      },
      "gate_up"_a, "out"_a, "gate_up `[T, 2I]` (gates first) -> out `[T, I]`: gate * sigmoid(gate) * up.");
}

using TensorPair = std::pair<TensorArg, TensorArg>;

void bind_experts(nb::module_& m) {
  m.def(
      "route",
      [](const TensorArg& x, const TensorArg& gate, const TensorArg& bias, std::int64_t topk, float scale,
         const TensorArg& ids, const TensorArg& weights) {
        const Matrix rows = x.matrix("x"), experts = gate.matrix("gate");
        bias.require("bias", 1).require_size("bias", 0, experts.rows);
        ids.require("ids", 2).require_size("ids", 0, rows.rows);
        ids.require_size("ids", 1, topk);
        weights.require("weights", 2).require_size("weights", 0, rows.rows);
        weights.require_size("weights", 1, topk);
        const float* offsets = bias.floats("bias");
        std::int32_t* chosen = ids.ints("ids");
        float* shares = weights.floats("weights");
        run_kernel(rows.rows * rows.cols * experts.rows,
                   [=] { route(rows, experts, offsets, topk, scale, chosen, shares); });
      },
      "x"_a, "gate"_a, "bias"_a, "topk"_a, "scale"_a, "ids"_a, "weights"_a,
      "Experts of x `[T, H]`: p = sigmoid(gate @ x) in fp32; ids int32 `[T, topk]` by p + bias, descending, ties to "
      "the "
      "lower id; weights float32 `[T, topk]` = p / sum of the chosen p * scale. gate float32 `[E, H]`, bias `[E]`.");

  nb::class_<PackedExperts>(m, "PackedExperts", "Gated MLPs rearranged once for `moe`; keeps copies.")
      .def(
          "__init__",
          [](PackedExperts* self, const std::vector<TensorArg>& gate_up, const std::vector<TensorArg>& down,
             const std::optional<TensorPair>& shared) {
            if (gate_up.size() != down.size()) {
              throw InvalidArgument(std::to_string(gate_up.size()) + " gate_up and " + std::to_string(down.size()) +
                                    " down weights: expected as many");
            }
            std::vector<std::pair<ConstMatrix, ConstMatrix>> weights;
            for (std::size_t i = 0; i < gate_up.size(); ++i) {
              weights.emplace_back(gate_up[i].matrix("gate_up"), down[i].matrix("down"));
            }
            std::optional<std::pair<ConstMatrix, ConstMatrix>> always;
            if (shared) always.emplace(shared->first.matrix("shared gate_up"), shared->second.matrix("shared down"));
            const nb::gil_scoped_release unlocked;
            std::vector<PackedMlp> routed;
            for (const auto& [in, out] : weights) routed.emplace_back(in, out);
            std::optional<PackedMlp> common;
            if (always) common.emplace(always->first, always->second);
            new (self) PackedExperts(std::move(routed), std::move(common));
          },
          "gate_up"_a, "down"_a, "shared"_a = nb::none(),
          "`gate_up` `[2I, H]` (gates first) and `down` `[H, I]` per routed expert, float32 or bfloat16; `shared`: one "
          "such "
          "pair that every token takes, of any I.")
      .def_prop_ro("num_routed", &PackedExperts::num_routed, "Routed experts.")
      .def_prop_ro("has_shared", &PackedExperts::has_shared, "Whether there is a shared one.")
      .def_prop_ro("hidden_size", &PackedExperts::hidden_size, "H.");

  const auto activated = [](const PackedExperts& experts, const TensorArg& x, const std::optional<TensorArg>& ids,
                            const std::optional<TensorArg>& weights, const GatedActivation& activation,
                            const TensorArg& out) {
    const Matrix from = x.matrix("x"), to = out.matrix("out");
    std::int64_t topk = 0;
    const std::int32_t* chosen = nullptr;
    const float* shares = nullptr;
    if (ids.has_value() != weights.has_value()) throw InvalidArgument("ids and weights: expected both or neither");
    if (ids) {
      ids->require("ids", 2).require_size("ids", 0, from.rows);
      topk = ids->size(1);
      weights->require("weights", 2).require_size("weights", 0, from.rows);
      weights->require_size("weights", 1, topk);
      chosen = ids->ints("ids");
      shares = weights->floats("weights");
    }
    run_kernel(work_of(experts, from.rows, topk),
               [=, &experts = held(experts)] { mixture(experts, from, chosen, shares, topk, activation, to); });
  };

  m.def(
      "moe",
      [activated](const PackedExperts& experts, const TensorArg& x, const std::optional<TensorArg>& ids,
                  const std::optional<TensorArg>& weights, float limit, float alpha, const TensorArg& out) {
        activated(experts, x, ids, weights, {GatedActivation::Kind::SwigluOai, alpha, limit}, out);
      },
      "experts"_a, "x"_a, "ids"_a.none(), "weights"_a.none(), "limit"_a, "alpha"_a, "out"_a,
      "out `[T, H]` = sum over slots of weights[t, i] * mlp[ids[t, i]](x[t]), slots ascending, plus the shared MLP.\n\n"
      "ids int32 and weights float32 `[T, topk]`, id -1 an empty slot; both None where there are only shared weights. "
      "SwiGLU-OAI inside; fp32 from x to the single rounding at the end.");
  m.def(
      "routed_moe",
      [](const PackedExperts& experts, const TensorArg& x, const TensorArg& gate, const TensorArg& bias,
         std::int64_t topk, float scale, float limit, float alpha, const TensorArg& out) {
        const Matrix from = x.matrix("x"), router = gate.matrix("gate"), to = out.matrix("out");
        bias.require("bias", 1).require_size("bias", 0, router.rows);
        const float* offsets = bias.floats("bias");
        const GatedActivation activation{GatedActivation::Kind::SwigluOai, alpha, limit};
        run_kernel(work_of(experts, from.rows, topk) + from.rows * from.cols * router.rows,
                   [=, &experts = held(experts)] {
                     routed_mixture(experts, from, router, offsets, topk, scale, activation, to);
                   });
      },
      "experts"_a, "x"_a, "gate"_a, "bias"_a, "topk"_a, "scale"_a, "limit"_a, "alpha"_a, "out"_a,
      "`route`, then `moe` with what it chose, to the same bits.");
  m.def(
      "moe_silu",
      [activated](const PackedExperts& experts, const TensorArg& x, const std::optional<TensorArg>& ids,
                  const std::optional<TensorArg>& weights, const TensorArg& out) {
        activated(experts, x, ids, weights, {GatedActivation::Kind::Silu, 0.0f, 0.0f}, out);
      },
      "experts"_a, "x"_a, "ids"_a.none(), "weights"_a.none(), "out"_a, "`moe` with gate * sigmoid(gate) * up inside.");
}

}  // namespace

void bind_linears(nb::module_& m) {
  bind_linear(m);
  bind_rows(m);
  bind_experts(m);
}

}  // namespace tandem::cpu
