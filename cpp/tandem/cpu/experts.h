#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tandem/cpu/linear.h"

namespace tandem::cpu {

// A gated MLP: gate_up [2I, H] with the gate rows first, down [H, I].
struct PackedMlp {
  // InvalidArgument where the two do not fit each other.
  PackedMlp(const ConstMatrix& gate_up, const ConstMatrix& down);

  PackedLinear gate_up;
  PackedLinear down;
};

// Routed experts of one shape, and optionally one that every token takes.
class PackedExperts {
 public:
  // InvalidArgument if there is no MLP at all, or their widths or dtypes differ.
  PackedExperts(std::vector<PackedMlp> routed, std::optional<PackedMlp> shared);

  [[nodiscard]] std::int64_t hidden_size() const { return any().gate_up.in_features(); }
  [[nodiscard]] std::int64_t num_routed() const { return static_cast<std::int64_t>(routed_.size()); }
  [[nodiscard]] bool has_shared() const { return shared_.has_value(); }
  [[nodiscard]] const PackedMlp& mlp(std::int64_t index) const {
    return index < num_routed() ? routed_[static_cast<std::size_t>(index)] : *shared_;
  }

 private:
  [[nodiscard]] const PackedMlp& any() const { return routed_.empty() ? *shared_ : routed_.front(); }

  std::vector<PackedMlp> routed_;
  std::optional<PackedMlp> shared_;
};

// The gate's activation.
struct GatedActivation {
  enum class Kind : std::uint8_t { SwigluOai, Silu } kind = Kind::SwigluOai;
  float alpha = 1.702f;  // SwigluOai only
  float limit = 7.0f;    // SwigluOai only
};

// out [T, H] = sum over slots i of weights[t][i] * mlp(ids[t][i])(x[t]), slots ascending, plus shared(x[t]). fp32 from
// x to the single rounding at the end. Each MLP's weights are read once per call. ids and weights are [T, topk]; an id
// of -1 is an empty slot; topk is 0 where only the shared MLP is wanted. InvalidArgument where shapes, dtypes or ids do
// not fit.
void mixture(const PackedExperts& experts, const ConstMatrix& x, const std::int32_t* ids, const float* weights,
             std::int64_t topk, const GatedActivation& activation, const Matrix& out);

// Multiply-adds of a call for `tokens` tokens with `topk` slots each.
[[nodiscard]] std::int64_t work_of(const PackedExperts& experts, std::int64_t tokens, std::int64_t topk);

}  // namespace tandem::cpu
