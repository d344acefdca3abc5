#include "tandem/cpu/rows.h"

#include <algorithm>
#include <string>

#include "tandem/base/check.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/thread_pool.h"

namespace tandem::cpu {

namespace {

std::string describe(const ConstMatrix& m) {
  return std::string(name_of(m.dtype)) + " [" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "]";
}

void require_like(const char* name, const ConstMatrix& given, const ConstMatrix& x, std::int64_t cols) {
  if (given.rows == x.rows && given.cols == cols && given.dtype == x.dtype) return;
  throw InvalidArgument(std::string(name) + " " + describe(given) + ": expected " + name_of(x.dtype) + " [" +
                        std::to_string(x.rows) + ", " + std::to_string(cols) + "]");
}

// Row groups of a parallel loop; what a row costs beside a multiply-add is about 4 per element.
template <class Body>
void for_rows(std::int64_t rows, std::int64_t cols, const Body& body) {
  const std::int64_t per_item = std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, cols));
  ThreadPool::shared().run((rows + per_item - 1) / per_item, rows * cols * 4, [&](std::int64_t item) {
    const std::int64_t end = std::min(rows, (item + 1) * per_item);
    for (std::int64_t row = item * per_item; row < end; ++row) body(row);
  });
}

void gated(const ConstMatrix& gate_up, const Matrix& out, const auto& kernel) {
  if (gate_up.cols % 2 != 0) throw InvalidArgument("gate_up " + describe(gate_up) + ": columns must be even");
  const std::int64_t half = gate_up.cols / 2;
  require_like("out", out, gate_up, half);
  for_rows(gate_up.rows, gate_up.cols, [&](std::int64_t row) {
    const auto* gate = static_cast<const std::byte*>(gate_up.row(row));
    kernel(gate, gate + half * size_of(gate_up.dtype), half, out.row(row));
  });
}

}  // namespace

void rms_norm(const ConstMatrix& x, const float* weight, float eps, bool one_plus, const Matrix& out) {
  require_like("out", out, x, x.cols);
  const KernelTable& table = kernels();
  for_rows(x.rows, x.cols, [&](std::int64_t row) {
    table.rms_norm_row(x.dtype, x.row(row), weight, x.cols, eps, one_plus, out.row(row));
  });
}

void add_rms_norm(const ConstMatrix& x, const Matrix& residual, const float* weight, float eps, bool one_plus,
                  const Matrix& out) {
  require_like("residual", residual, x, x.cols);
  require_like("out", out, x, x.cols);
  const KernelTable& table = kernels();
  for_rows(x.rows, x.cols, [&](std::int64_t row) {
    table.add_row(x.dtype, x.row(row), x.cols, residual.row(row));
    table.rms_norm_row(x.dtype, residual.row(row), weight, x.cols, eps, one_plus, out.row(row));
  });
}

void norm_rope(const Matrix& rows, const std::vector<NormRopePart>& parts, const RopeTable& rope,
               const std::int32_t* positions, float eps, bool one_plus) {
  for (const NormRopePart& part : parts) {
    if (part.offset < 0 || part.heads < 0 || part.dim < 1 || part.dim > kMaxHeadDim ||
        part.offset + part.heads * part.dim > rows.cols) {
      throw InvalidArgument("part at column " + std::to_string(part.offset) + " of " + std::to_string(part.heads) +
                            " heads of " + std::to_string(part.dim) + ": must lie in " + std::to_string(rows.cols) +
                            " columns, heads of 1 to " + std::to_string(kMaxHeadDim));
    }
    if (part.rotary_dim != 0 && (part.rotary_dim != 2 * rope.half || part.rotary_dim > part.dim)) {
      throw InvalidArgument("rotary_dim " + std::to_string(part.rotary_dim) + ": expected 0 or twice the table's " +
                            std::to_string(rope.half) + " columns, at most the head's " + std::to_string(part.dim));
    }
  }
  const bool rotates = std::ranges::any_of(parts, [](const NormRopePart& part) { return part.rotary_dim != 0; });
  for (std::int64_t t = 0; rotates && t < rows.rows; ++t) {
    if (positions[t] >= rope.positions) {
      throw InvalidArgument("position " + std::to_string(positions[t]) + " of row " + std::to_string(t) +
                            ": the rope table has " + std::to_string(rope.positions));
    }
  }
  const KernelTable& table = kernels();
  for_rows(rows.rows, rows.cols, [&](std::int64_t t) {
    const std::int64_t position = positions[t];
    if (position < 0) return;
    const float* cos = rotates ? rope.cos + position * rope.half : nullptr;
    const float* sin = rotates ? rope.sin + position * rope.half : nullptr;
    for (const NormRopePart& part : parts) {
      auto* head = static_cast<std::byte*>(rows.row(t)) + part.offset * size_of(rows.dtype);
      for (std::int64_t h = 0; h < part.heads; ++h, head += part.dim * size_of(rows.dtype)) {
        table.norm_rope_head(rows.dtype, head, part.dim, part.weight, eps, one_plus, part.rotary_dim, cos, sin);
      }
    }
  });
}

void project(const PackedLinear& weight, const ConstMatrix& x, const std::vector<NormRopePart>& parts,
             const RopeTable& rope, const std::int32_t* positions, float eps, bool one_plus, const Matrix& rows) {
  linear(weight, x, rows);
  norm_rope(rows, parts, rope, positions, eps, one_plus);
}

void swiglu_oai(const ConstMatrix& gate_up, float alpha, float limit, const Matrix& out) {
  const KernelTable& table = kernels();
  gated(gate_up, out, [&](const void* gate, const void* up, std::int64_t n, void* to) {
    table.swiglu_oai_row(gate_up.dtype, gate, up, n, alpha, limit, to);
  });
}

void silu_mul(const ConstMatrix& gate_up, const Matrix& out) {
  const KernelTable& table = kernels();
  gated(gate_up, out, [&](const void* gate, const void* up, std::int64_t n, void* to) {
    table.silu_mul_row(gate_up.dtype, gate, up, n, to);
  });
}

}  // namespace tandem::cpu
