#include "tandem/cpu/router.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tandem/base/check.h"
#include "tandem/cpu/buffer.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/thread_pool.h"

namespace tandem::cpu {

namespace {

constexpr std::int64_t kMaxExperts = 4096;

void choose(const float* logits, std::int64_t experts, const float* bias, std::int64_t topk, float scale,
            std::int32_t* ids, float* weights) {
  float p[kMaxExperts];
  float kept[kMaxExperts];
  std::int64_t size = 0;
  for (std::int64_t e = 0; e < experts; ++e) {
    p[e] = 1.0f / (1.0f + std::exp(-logits[e]));
    const float choice = p[e] + bias[e];
    if (size == topk && !(choice > kept[topk - 1])) continue;
    std::int64_t place = size < topk ? size++ : topk - 1;
    for (; place > 0 && choice > kept[place - 1]; --place) {
      kept[place] = kept[place - 1];
      ids[place] = ids[place - 1];
    }
    kept[place] = choice;
    ids[place] = static_cast<std::int32_t>(e);
  }
  float sum = 0.0f;
  for (std::int64_t i = 0; i < topk; ++i) sum += p[ids[i]];
  for (std::int64_t i = 0; i < topk; ++i) weights[i] = p[ids[i]] / sum * scale;
}

}  // namespace

void route(const ConstMatrix& x, const ConstMatrix& gate, const float* bias, std::int64_t topk, float scale,
           std::int32_t* ids, float* weights) {
  const std::int64_t experts = gate.rows;
  if (gate.cols != x.cols || gate.dtype != DType::F32) {
    throw InvalidArgument("gate " + std::string(name_of(gate.dtype)) + " [" + std::to_string(experts) + ", " +
                          std::to_string(gate.cols) + "]: expected float32 with x's " + std::to_string(x.cols) +
                          " columns");
  }
  if (topk < 1 || topk > experts || experts > kMaxExperts) {
    throw InvalidArgument("topk " + std::to_string(topk) + " of " + std::to_string(experts) +
                          " experts: allowed are 1 to their number, and at most " + std::to_string(kMaxExperts));
  }
  if (x.rows == 0) return;
  const KernelTable& table = kernels();
  const std::int64_t padded = table.query_floats(x.cols);
  float* queries = scratch_floats(Scratch::Inputs, x.rows * padded);
  float* logits = scratch_floats(Scratch::Products, x.rows * experts);
  ThreadPool& pool = ThreadPool::shared();
  pool.run(x.rows, x.rows * x.cols,
           [&](std::int64_t t) { table.prepare_query(x.dtype, x.row(t), x.cols, gate.dtype, queries + t * padded); });
  constexpr std::int64_t row_tile = 64, expert_tile = 16;
  const std::int64_t expert_tiles = (experts + expert_tile - 1) / expert_tile;
  const std::int64_t row_tiles = (x.rows + row_tile - 1) / row_tile;
  pool.run(expert_tiles * row_tiles, x.rows * x.cols * experts, [&](std::int64_t item) {
    const std::int64_t row = item / expert_tiles * row_tile, expert = item % expert_tiles * expert_tile;
    table.dot(gate.dtype, {queries + row * padded, padded, std::min(row_tile, x.rows - row)},
              {gate.row(expert), gate.stride * size_of(gate.dtype), std::min(expert_tile, experts - expert)}, x.cols,
              logits + row * experts + expert, experts);
  });
  pool.run(x.rows, x.rows * experts * 16, [&](std::int64_t t) {
    choose(logits + t * experts, experts, bias, topk, scale, ids + t * topk, weights + t * topk);
  });
}

void routed_mixture(const PackedExperts& experts, const ConstMatrix& x, const ConstMatrix& gate, const float* bias,
                    std::int64_t topk, float scale, const GatedActivation& activation, const Matrix& out) {
  static_assert(sizeof(float) == sizeof(std::int32_t));
  float* weights = scratch_floats(Scratch::Routes, 2 * x.rows * std::max<std::int64_t>(topk, 0));
  auto* ids = reinterpret_cast<std::int32_t*>(weights + x.rows * topk);
  route(x, gate, bias, topk, scale, ids, weights);
  mixture(experts, x, ids, weights, topk, activation, out);
}

}  // namespace tandem::cpu
