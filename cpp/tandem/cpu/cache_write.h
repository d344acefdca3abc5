#pragma once

#include <cstdint>
#include <vector>

#include "tandem/cpu/cache_view.h"
#include "tandem/cpu/types.h"

namespace tandem::cpu {

// Where the tokens of a step sit: one entry per token.
struct TokenPlaces {
  const std::int32_t* seat = nullptr;   // row of the block table; ignored for padding
  const std::int32_t* index = nullptr;  // what the call says: a token index, or a count of visible keys
  std::int64_t count = 0;
};

// What to write to one (layer, role): [tokens, heads, dim], heads adjacent, tokens `token_stride` elements apart.
struct CacheSource {
  CacheView view;
  const void* data = nullptr;
  DType dtype = DType::F32;
  std::int64_t token_stride = 0;
};

// Writes each source's token t at index `places.index[t]` of seat `places.seat[t]`, rounded to the view's dtype; a
// negative index writes nothing. All or nothing: InvalidArgument for a seat, index or slot out of range before any
// byte changes.
void write_cache(const Pool& pool, const std::vector<CacheSource>& sources, const TokenPlaces& places,
                 const BlockTable& table);

// Work of a call in multiply-adds, or what costs as much.
[[nodiscard]] std::int64_t work_of(const std::vector<CacheSource>& sources, const TokenPlaces& places);

// InvalidArgument unless the pages of the first `length` tokens of `seat` exist and name slots below `num_slots`.
void require_pages(const BlockTable& table, std::int64_t seat, std::int64_t length, std::int64_t page_tokens,
                   std::int64_t num_slots);

}  // namespace tandem::cpu
