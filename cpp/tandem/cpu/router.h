#pragma once

#include <cstdint>

#include "tandem/cpu/experts.h"
#include "tandem/cpu/types.h"

namespace tandem::cpu {

// Chooses experts: p = sigmoid(gate @ x) in fp32; the `topk` largest p + bias, descending, ties to the lower id;
// weights are the chosen p (without bias) over their sum, times `scale`. x [T, H]; gate fp32 [E, H]; bias [E]; ids and
// weights [T, topk]. InvalidArgument where shapes do not fit or topk is not in 1..E.
void route(const ConstMatrix& x, const ConstMatrix& gate, const float* bias, std::int64_t topk, float scale,
           std::int32_t* ids, float* weights);

// `route`, then `mixture` with what it chose, without the caller keeping either.
void routed_mixture(const PackedExperts& experts, const ConstMatrix& x, const ConstMatrix& gate, const float* bias,
                    std::int64_t topk, float scale, const GatedActivation& activation, const Matrix& out);

}  // namespace tandem::cpu
