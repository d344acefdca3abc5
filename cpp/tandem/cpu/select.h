#pragma once

#include <cstdint>

#include "tandem/cpu/cache_view.h"
#include "tandem/cpu/cache_write.h"

namespace tandem::cpu {

struct SelectArgs {
  const void* queries = nullptr;  // [tokens, heads, dim], heads adjacent
  std::int64_t query_stride = 0;  // elements from a token to the next
  DType dtype = DType::F32;
  std::int64_t heads = 0;
  Pool pool;
  CacheView keys;  // one head, shared by the query heads
  BlockTable table;
  TokenPlaces places;           // index: keys that the token sees; 0 for padding
  std::int64_t block_size = 0;  // tokens, anchored at token index 0
  std::int64_t topk = 0;
  std::int64_t num_local = 0;   // newest blocks that are always chosen; they use up places
  std::int32_t* out = nullptr;  // [tokens, heads, topk]
  float* scores = nullptr;      // [tokens, heads, max_blocks], or null
  std::int64_t max_blocks = 0;
};

// Chooses for each token and head exactly min(topk, visible blocks) blocks: the newest `num_local`, then by the largest
// dot product of the query with a visible key of the block (raw, fp32), ties to the lower id. Ids ascend and are padded
// with -1. Keys past a token's count are never read for it. With `scores`, also stores every visible block's score and
// -inf elsewhere. InvalidArgument for shapes, seats, pages or slots out of range.
void select_blocks(const SelectArgs& args);

// Work of a call in multiply-adds, or what costs as much.
[[nodiscard]] std::int64_t work_of(const SelectArgs& args);

}  // namespace tandem::cpu
