#pragma once

#include <cstddef>
#include <cstdint>

#include "tandem/cpu/types.h"

namespace tandem::cpu {

// The bytes of all slots.
struct Pool {
  std::byte* data = nullptr;
  std::int64_t num_bytes = 0;
};

// Affine map from (slot, head, sub page, token) to the first byte of `dim` contiguous elements of one (layer, role).
// Strides and offsets are bytes and 64 bits wide, so no product of a slot and a stride can wrap.
struct CacheView {
  DType dtype = DType::F32;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  std::int64_t tokens_per_page = 0;  // of the view; a slot holds `sub_pages` of these
  std::int64_t sub_pages = 1;
  std::int64_t base_offset = 0;
  std::int64_t slot_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t sub_page_stride = 0;
  std::int64_t token_stride = 0;

  [[nodiscard]] std::int64_t tokens_per_slot() const { return tokens_per_page * sub_pages; }

  [[nodiscard]] std::int64_t offset(std::int64_t slot, std::int64_t head, std::int64_t sub_page,
                                    std::int64_t token) const {
    return base_offset + slot * slot_stride + head * head_stride + sub_page * sub_page_stride + token * token_stride;
  }

  // Slots of a pool of `num_bytes` that lie in it whole.
  [[nodiscard]] std::int64_t num_slots(std::int64_t num_bytes) const {
    const std::int64_t end = offset(0, heads - 1, sub_pages - 1, tokens_per_page - 1) + dim * size_of(dtype);
    return num_bytes < end ? 0 : (num_bytes - end) / slot_stride + 1;
  }
};

// Slots of each seat's pages: int32 [seats, pages]. Entries past a sequence's length are never read.
struct BlockTable {
  const std::int32_t* slots = nullptr;
  std::int64_t seats = 0;
  std::int64_t pages = 0;

  [[nodiscard]] const std::int32_t* row(std::int64_t seat) const { return slots + seat * pages; }
};

// Tokens of one head of one sequence, read through its row of the block table.
class TokenRuns {
 public:
  struct Run {
    std::int64_t offset;  // bytes from the start of the pool
    std::int64_t count;   // tokens, `token_stride` apart
  };

  TokenRuns(const CacheView& view, const std::int32_t* slots, std::int64_t head)
      : view_(view),
        slots_(slots),
        head_(head),
        page_tokens_(view.tokens_per_slot()),
        run_tokens_(view.sub_page_stride == view.tokens_per_page * view.token_stride ? page_tokens_
                                                                                     : view.tokens_per_page) {}

  // The longest run of equally spaced tokens that starts at token index `index` and has at most `limit` tokens.
  [[nodiscard]] Run at(std::int64_t index, std::int64_t limit) const {
    const std::int64_t slot = slots_[index / page_tokens_];
    const std::int64_t in_page = index % page_tokens_;
    const std::int64_t left = run_tokens_ - in_page % run_tokens_;
    return {view_.offset(slot, head_, in_page / view_.tokens_per_page, in_page % view_.tokens_per_page),
            left < limit ? left : limit};
  }

 private:
  const CacheView& view_;
  const std::int32_t* slots_;
  std::int64_t head_;
  std::int64_t page_tokens_;
  std::int64_t run_tokens_;
};

}  // namespace tandem::cpu
