#include "tandem/cpu/linear.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tandem/base/check.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/thread_pool.h"

namespace tandem::cpu {

namespace {

std::string shape(const ConstMatrix& m) {
  return std::string(name_of(m.dtype)) + " [" + std::to_string(m.rows) + ", " + std::to_string(m.cols) + "]";
}

// The row of the weight in column `column` of panel `panel`; at or past `rows` there is none.
std::int64_t source_row(PanelOrder order, std::int64_t rows, std::int64_t panel, std::int64_t column) {
  if (order == PanelOrder::Plain) return panel * kPanelColumns + column;
  constexpr std::int64_t half_columns = kPanelColumns / 2;
  const std::int64_t half = rows / 2;
  const std::int64_t in_half = panel * half_columns + column % half_columns;
  if (in_half >= half) return rows;
  return column < half_columns ? in_half : half + in_half;
}

void pack_f32(const ConstMatrix& weight, PanelOrder order, std::int64_t panel, std::int64_t padded_k, float* out) {
  for (std::int64_t column = 0; column < kPanelColumns; ++column) {
    const std::int64_t n = source_row(order, weight.rows, panel, column);
    const auto* row = n < weight.rows ? static_cast<const float*>(weight.row(n)) : nullptr;
    for (std::int64_t k = 0; k < padded_k; ++k) {
      out[k * kPanelColumns + column] = row != nullptr && k < weight.cols ? row[k] : 0.0f;
    }
  }
}

void pack_bf16(const ConstMatrix& weight, PanelOrder order, std::int64_t panel, std::int64_t padded_k,
               std::uint32_t* out) {
  for (std::int64_t column = 0; column < kPanelColumns; ++column) {
    const std::int64_t n = source_row(order, weight.rows, panel, column);
    const auto* row = n < weight.rows ? static_cast<const Bf16*>(weight.row(n)) : nullptr;
    for (std::int64_t k = 0; k < padded_k; k += 2) {
      const std::uint32_t even = row != nullptr ? row[k].bits : 0;
      const std::uint32_t odd = row != nullptr && k + 1 < weight.cols ? row[k + 1].bits : 0;
      out[k / 2 * kPanelColumns + column] = even << 16 | odd;
    }
  }
}

}  // namespace

PackedLinear::PackedLinear(const ConstMatrix& weight, PanelOrder order)
    : dtype_(weight.dtype),
      out_features_(weight.rows),
      in_features_(weight.cols),
      padded_k_((weight.cols + 1) / 2 * 2),
      num_panels_((weight.rows + kPanelColumns - 1) / kPanelColumns),
      panel_bytes_(padded_k_ * kPanelColumns * size_of(weight.dtype)) {
  if (weight.rows < 1 || weight.cols < 1) throw InvalidArgument("weight " + shape(weight) + " is empty");
  if (order == PanelOrder::GateUp) {
    if (weight.rows % 2 != 0) throw InvalidArgument("gate_up weight " + shape(weight) + ": rows must be even");
    num_panels_ = (weight.rows / 2 + kPanelColumns / 2 - 1) / (kPanelColumns / 2);
  }
  panels_ = WeightBuffer(num_panels_ * panel_bytes_);
  ThreadPool::shared().run(num_panels_, weight.rows * weight.cols, [&](std::int64_t index) {
    std::byte* out = panels_.data() + index * panel_bytes_;
    if (dtype_ == DType::F32) {
      pack_f32(weight, order, index, padded_k_, reinterpret_cast<float*>(out));
    } else {
      pack_bf16(weight, order, index, padded_k_, reinterpret_cast<std::uint32_t*>(out));
    }
  });
}

InputTiles::InputTiles(std::int64_t num_rows, std::int64_t padded_k, const KernelTable& table)
    : num_rows_(num_rows),
      padded_k_(padded_k),
      num_tiles_((num_rows + table.max_rows - 1) / table.max_rows),
      max_panels_(1) {
  if (num_rows == 0) return;
  const std::int64_t rows = (num_rows + num_tiles_ - 1) / num_tiles_;
  max_panels_ = table.max_panels(static_cast<int>(rows));
}

PanelItems::PanelItems(std::int64_t num_panels, std::int64_t max_panels, std::int64_t work)
    : num_panels_(num_panels), num_threads_(ThreadPool::shared().num_threads()) {
  constexpr std::int64_t worthwhile = 250'000;  // multiply-adds: a claim costs some 50 ns
  const std::int64_t calls = (num_panels + max_panels - 1) / max_panels;
  const std::int64_t rounds = (std::min(calls, work / worthwhile) + num_threads_ - 1) / num_threads_;
  num_items_ = std::clamp<std::int64_t>(rounds * num_threads_, 1, num_panels);
}

void linear(const PackedLinear& weight, const ConstMatrix& x, const Matrix& out) {
  if (x.cols != weight.in_features()) {
    throw InvalidArgument("x " + shape(x) + ": the weight takes " + std::to_string(weight.in_features()) + " columns");
  }
  if (out.rows != x.rows || out.cols != weight.out_features() || out.dtype != x.dtype) {
    throw InvalidArgument("out " + shape(out) + ": expected " + name_of(x.dtype) + " [" + std::to_string(x.rows) +
                          ", " + std::to_string(weight.out_features()) + "]");
  }
  if (x.rows == 0) return;
  const KernelTable& table = kernels();
  const InputTiles inputs(x.rows, weight.padded_k(), table);
  ThreadPool& pool = ThreadPool::shared();

  const float* packed = static_cast<const float*>(x.data);
  if (x.rows > 1 || x.dtype != DType::F32 || weight.padded_k() != x.cols) {
    float* tiles = scratch_floats(Scratch::Inputs, inputs.num_floats());
    pool.run(inputs.num_tiles(), x.rows * x.cols, [&](std::int64_t tile) {
      const void* rows[16];
      for (int r = 0; r < inputs.rows(tile); ++r) rows[r] = x.row(inputs.first_row(tile) + r);
      table.interleave_rows(x.dtype, rows, inputs.rows(tile), x.cols, weight.padded_k(), tiles + inputs.offset(tile));
    });
    packed = tiles;
  }

  const std::int64_t work = panel_work(weight, x.rows, weight.num_panels());
  const PanelItems items(weight.num_panels(), inputs.max_panels(), work);
  pool.run(items.num_items(), work, [&](std::int64_t item) {
    multiply(table, weight, items.first(item), items.count(item), inputs, packed, weight.panel(items.next(item)),
             [&](std::int64_t row, int rows, std::int64_t panel, std::int64_t panels, const float* products) {
               const std::int64_t column = panel * kPanelColumns;
               const std::int64_t columns = std::min(panels * kPanelColumns, out.cols - column);
               for (int r = 0; r < rows; ++r) {
                 table.store_row(products + r * panels * kPanelColumns, columns, out.dtype,
                                 static_cast<std::byte*>(out.row(row + r)) + column * size_of(out.dtype));
               }
             });
  });
}

}  // namespace tandem::cpu
