#pragma once

#include <cstdint>
#include <vector>

#include "tandem/cpu/linear.h"
#include "tandem/cpu/types.h"

namespace tandem::cpu {

// Operations on one row at a time. fp32 inside; each stored value is rounded once, to nearest even. x and out of a call
// have one dtype. InvalidArgument where shapes or dtypes do not fit.

// out = x * rsqrt(mean(x^2) + eps) * (weight + one_plus). weight has x.cols floats. out may be x.
void rms_norm(const ConstMatrix& x, const float* weight, float eps, bool one_plus, const Matrix& out);

// residual += x, rounded to the residual's dtype; then out = rms_norm(residual) of that rounded value, so the pair
// equals an addition followed by rms_norm.
void add_rms_norm(const ConstMatrix& x, const Matrix& residual, const float* weight, float eps, bool one_plus,
                  const Matrix& out);

// Heads of one kind within a fused projection row.
struct NormRopePart {
  std::int64_t offset = 0;  // column of the first head
  std::int64_t heads = 0;
  std::int64_t dim = 0;           // columns of a head
  std::int64_t rotary_dim = 0;    // leading columns that rotate; 0: none
  const float* weight = nullptr;  // [dim], shared by the heads; null: no norm
};

struct RopeTable {
  const float* cos = nullptr;  // [positions][half], half = rotary_dim / 2 of every part that rotates
  const float* sin = nullptr;
  std::int64_t positions = 0;
  std::int64_t half = 0;
};

// In place on rows [T, C]: each head is normalised in fp32, rotated in fp32, and only then rounded. A head whose part
// has no weight is only rotated. Rotation pairs columns i and i + rotary_dim / 2 with the angle of positions[t]; it
// leaves the columns from rotary_dim on. Rows with a negative position are padding and left alone.
void norm_rope(const Matrix& rows, const std::vector<NormRopePart>& parts, const RopeTable& table,
               const std::int32_t* positions, float eps, bool one_plus);

// A fused projection in one call: `linear` into `rows`, then `norm_rope` on them.
void project(const PackedLinear& weight, const ConstMatrix& x, const std::vector<NormRopePart>& parts,
             const RopeTable& table, const std::int32_t* positions, float eps, bool one_plus, const Matrix& rows);

// gate_up [T, 2I] -> out [T, I]: g = min(gate, limit), u = clamp(up, -limit, limit); g * sigmoid(alpha * g) * (u + 1).
void swiglu_oai(const ConstMatrix& gate_up, float alpha, float limit, const Matrix& out);

// gate_up [T, 2I] -> out [T, I]: gate * sigmoid(gate) * up.
void silu_mul(const ConstMatrix& gate_up, const Matrix& out);

}  // namespace tandem::cpu
