#pragma once

#include <algorithm>
#include <cstdint>

#include "tandem/cpu/buffer.h"
#include "tandem/cpu/kernel_table.h"
#include "tandem/cpu/types.h"

namespace tandem::cpu {

// Where the rows of a weight go in its panels of 32 columns.
enum class PanelOrder : std::uint8_t {
  Plain,   // row n is column n % 32 of panel n / 32
  GateUp,  // a panel holds 16 rows of the first half and the 16 matching rows of the second
};

// A weight [out_features, in_features] rearranged once so that a step reads it front to back. Owns its memory.
class PackedLinear {
 public:
  // Rows of `weight` may be strided. InvalidArgument if it is empty, or GateUp with an odd number of rows.
  explicit PackedLinear(const ConstMatrix& weight, PanelOrder order = PanelOrder::Plain);

  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] std::int64_t out_features() const { return out_features_; }
  [[nodiscard]] std::int64_t in_features() const { return in_features_; }
  [[nodiscard]] std::int64_t padded_k() const { return padded_k_; }
  [[nodiscard]] std::int64_t num_panels() const { return num_panels_; }
  [[nodiscard]] std::int64_t panel_bytes() const { return panel_bytes_; }
  [[nodiscard]] std::int64_t num_bytes() const { return panels_.num_bytes(); }
  [[nodiscard]] const std::byte* panel(std::int64_t index) const { return panels_.data() + index * panel_bytes_; }

 private:
  DType dtype_;
  std::int64_t out_features_;
  std::int64_t in_features_;
  std::int64_t padded_k_;
  std::int64_t num_panels_;
  std::int64_t panel_bytes_;
  WeightBuffer panels_;
};

// out [T, N] = x [T, K] @ weight^T. Each element is one chain of fp32 multiply-adds over ascending k, rounded once to
// out's dtype, whatever T is. x and out have one dtype; InvalidArgument where shapes or dtypes do not fit.
void linear(const PackedLinear& weight, const ConstMatrix& x, const Matrix& out);

// Input rows cut into tiles of at most `max_rows` rows, each laid out [k][rows] in fp32.
class InputTiles {
 public:
  InputTiles(std::int64_t num_rows, std::int64_t padded_k, const KernelTable& table);

  [[nodiscard]] std::int64_t num_tiles() const { return num_tiles_; }
  [[nodiscard]] std::int64_t first_row(std::int64_t tile) const { return tile * num_rows_ / num_tiles_; }
  [[nodiscard]] int rows(std::int64_t tile) const { return static_cast<int>(first_row(tile + 1) - first_row(tile)); }
  [[nodiscard]] std::int64_t num_floats() const { return num_rows_ * padded_k_; }
  [[nodiscard]] std::int64_t offset(std::int64_t tile) const { return first_row(tile) * padded_k_; }
  [[nodiscard]] int max_panels() const { return max_panels_; }  // that one kernel call takes with these tiles

 private:
  std::int64_t num_rows_;
  std::int64_t padded_k_;
  std::int64_t num_tiles_;
  int max_panels_;
};

// Multiplies panels [first, first + count) of `weight` with every tile of `inputs` (at `x`), and calls
// sink(first row, rows, first panel, panels, products [rows][panels * 32]) for each piece. `ahead` is where the next
// weight is read afterwards, a hint.
template <class Sink>
void multiply(const KernelTable& table, const PackedLinear& weight, std::int64_t first, std::int64_t count,
              const InputTiles& inputs, const float* x, const void* ahead, const Sink& sink) {
  constexpr std::int64_t kTileFloats = 64 * kPanelColumns;
  float* products = scratch_floats(Scratch::Tile, kTileFloats);
  const std::int64_t most = inputs.max_panels();
  const std::int64_t groups = (count + most - 1) / most;
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::int64_t begin = first + group * count / groups;
    const std::int64_t panels = first + (group + 1) * count / groups - begin;
    for (std::int64_t tile = 0; tile < inputs.num_tiles(); ++tile) {
      const int rows = inputs.rows(tile);
      table.linear_tile(weight.dtype(), {.panels = weight.panel(begin),
                                         .panel_bytes = weight.panel_bytes(),
                                         .num_panels = static_cast<int>(panels),
                                         .rows = rows,
                                         .k = weight.padded_k(),
                                         .x = x + inputs.offset(tile),
                                         .out = products,
                                         .ahead = tile > 0             ? nullptr
                                                  : group + 1 < groups ? weight.panel(begin + panels)
                                                                       : ahead});
      sink(inputs.first_row(tile), rows, begin, panels, static_cast<const float*>(products));
    }
  }
}

// Reading a weight once costs as much as multiplying so many rows with it.
inline constexpr std::int64_t kReadRows = 4;

// Work of multiplying `rows` rows with `count` panels of a weight, in multiply-adds.
[[nodiscard]] inline std::int64_t panel_work(const PackedLinear& weight, std::int64_t rows, std::int64_t count) {
  return std::max(rows, kReadRows) * weight.padded_k() * kPanelColumns * count;
}

// Panels cut into items of a parallel loop: nearly equal ones, whole kernel calls where there are enough, as many for
// each thread, and each worth claiming.
class PanelItems {
 public:
  // `max_panels`: of a kernel call; `work`: of all panels, in multiply-adds.
  PanelItems(std::int64_t num_panels, std::int64_t max_panels, std::int64_t work);

  [[nodiscard]] std::int64_t num_items() const { return num_items_; }
  [[nodiscard]] std::int64_t first(std::int64_t item) const { return item * num_panels_ / num_items_; }
  [[nodiscard]] std::int64_t count(std::int64_t item) const { return first(item + 1) - first(item); }
  // Where the thread of an item probably goes on: the first panel of a later item, or the end.
  [[nodiscard]] std::int64_t next(std::int64_t item) const {
    return item + num_threads_ < num_items_ ? first(item + num_threads_) : num_panels_;
  }

 private:
  std::int64_t num_panels_;
  std::int64_t num_threads_;
  std::int64_t num_items_;
};

}  // namespace tandem::cpu
