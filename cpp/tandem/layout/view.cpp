#include "tandem/layout/view.h"

#include <limits>
#include <string>

#include "tandem/base/check.h"

namespace tandem::layout {
namespace {

std::string describe(const View& view) {
  return "the view of layer " + std::to_string(view.layer.value()) + " " + std::string(name(view.role)) +
         " in pages of " + std::to_string(view.tokens_per_page) + " tokens";
}

void require_index(const char* what, std::int64_t value, std::int64_t size) {
  if (value < 0 || value >= size) {
    throw InvalidArgument(std::string(what) + " is " + std::to_string(value) + ", must be from 0 to " +
                          std::to_string(size - 1));
  }
}

}  // namespace

std::int64_t View::bound(std::int64_t num_slots) const {
  if (num_slots < 0) {
    throw InvalidArgument("num_slots is " + std::to_string(num_slots) + ", must be at least 0");
  }
  if (num_slots == 0) {
    return 0;
  }
  return base_offset + (num_slots - 1) * slot_stride + (heads - 1) * head_stride + (sub_pages - 1) * sub_page_stride +
         (tokens_per_page - 1) * token_stride + row_bytes();
}

std::int64_t View::offset(SlotId slot, std::int32_t head, std::int32_t sub_page, std::int32_t token) const {
  require_index("slot", slot.value(), std::numeric_limits<std::int32_t>::max());
  require_index("head", head, heads);
  require_index("sub_page", sub_page, sub_pages);
  require_index("token", token, tokens_per_page);
  return base_offset + slot.value() * slot_stride + head * head_stride + sub_page * sub_page_stride +
         token * token_stride;
}

void View::flat_ids(std::span<const std::int32_t> table, std::int64_t num_slots, std::int32_t head,
                    std::span<std::int32_t> ids) const {
  const std::int64_t unit = sub_page_bytes();
  const auto require_multiple = [&](const char* what, std::int64_t value) {
    if (value % unit != 0) {
      throw InvalidArgument(describe(*this) + " has no flat ids: its " + what + " of " + std::to_string(value) +
                            " bytes is no multiple of the sub-page's " + std::to_string(unit));
    }
  };
  require_multiple("base offset", base_offset);
  require_multiple("slot stride", slot_stride);
  require_multiple("head stride", head_stride);
  require_multiple("sub-page stride", sub_page_stride);
  require_index("head", head, heads);
  TANDEM_CHECK(ids.size() == table.size() * static_cast<std::size_t>(sub_pages),
               "flat_ids writes to a buffer of another size");

  const std::int64_t first = (base_offset + head * head_stride) / unit;
  const std::int64_t per_slot = slot_stride / unit;
  const std::int64_t per_sub_page = sub_page_stride / unit;
  std::size_t at = 0;
  for (const std::int32_t slot : table) {
    if (slot != -1) {
      require_index("a slot of the table (or -1 where there is none)", slot, num_slots);
    }
    for (std::int32_t sub_page = 0; sub_page < sub_pages; ++sub_page) {
      const std::int64_t id = slot == -1 ? -1 : first + slot * per_slot + sub_page * per_sub_page;
      if (id > std::numeric_limits<std::int32_t>::max()) {
        throw InvalidArgument(describe(*this) + " has no flat ids: slot " + std::to_string(slot) + " would be number " +
                              std::to_string(id) + ", past 32 bits");
      }
      ids[at++] = static_cast<std::int32_t>(id);
    }
  }
}

}  // namespace tandem::layout
