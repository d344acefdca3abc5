#pragma once

#include <cstdint>
#include <span>

#include "tandem/base/strong_id.h"
#include "tandem/layout/tile.h"

namespace tandem::layout {

// An affine map from (slot, local head, sub-page, token) to bytes of the pool, for one (layer, role): what a kernel is
// given. A page is seen as `sub_pages` pages of `tokens_per_page` tokens; page q of a sequence in these units is
// (table[q / sub_pages], q % sub_pages). All offsets and strides are bytes.
struct View {
  LayerId layer;
  Role role = Role::K;
  ElementType dtype = ElementType::BF16;
  std::int32_t heads = 0;  // local
  std::int32_t dim = 0;
  std::int32_t tokens_per_page = 0;  // of this view
  std::int32_t sub_pages = 0;        // layout page / this view's page
  std::int64_t base_offset = 0;      // of slot 0, head 0, sub-page 0, token 0
  std::int64_t slot_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t sub_page_stride = 0;
  std::int64_t token_stride = 0;

  // Bytes of one token of one head, contiguous at `offset`.
  [[nodiscard]] std::int64_t row_bytes() const { return dim * element_bits(dtype) / 8; }
  // Bytes of one sub-page of one head, contiguous.
  [[nodiscard]] std::int64_t sub_page_bytes() const { return tokens_per_page * row_bytes(); }

  // First byte past all that the view addresses in a pool of `num_slots` slots: the least size of such a pool's buffer
  // as far as this view goes. Throws InvalidArgument for a negative count.
  [[nodiscard]] std::int64_t bound(std::int64_t num_slots) const;

  // First byte of one token of one head. Throws InvalidArgument for a coordinate out of range, and names it.
  [[nodiscard]] std::int64_t offset(SlotId slot, std::int32_t head, std::int32_t sub_page, std::int32_t token) const;

  // Numbers of sub-pages for kernels that see the pool as one array of `sub_page_bytes` units: writes, for each entry
  // of `table` in turn, the `sub_pages` ids of its slot for local head `head`; -1 entries give -1. `ids` has
  // table.size() * sub_pages places. Throws InvalidArgument, saying why, unless the sub-page size divides base offset
  // and every stride; for a slot outside [0, num_slots); and for an id past 32 bits.
  void flat_ids(std::span<const std::int32_t> table, std::int64_t num_slots, std::int32_t head,
                std::span<std::int32_t> ids) const;

  friend bool operator==(const View&, const View&) = default;
};

}  // namespace tandem::layout
