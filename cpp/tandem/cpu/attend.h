#pragma once

#include <cstdint>

#include "tandem/cpu/cache_view.h"
#include "tandem/cpu/cache_write.h"

namespace tandem::cpu {

struct AttendArgs {
  const void* queries = nullptr;  // [tokens, heads, dim], heads adjacent
  std::int64_t query_stride = 0;  // elements from a token to the next
  DType dtype = DType::F32;       // of queries and out
  std::int64_t heads = 0;         // a multiple of the views' heads
  Pool pool;
  CacheView keys;
  CacheView values;
  BlockTable table;
  TokenPlaces places;                    // index: keys that the token sees; 0 for padding
  const std::int32_t* blocks = nullptr;  // [tokens, KV heads, topk], ascending, -1 at the end; null: all keys
  std::int64_t topk = 0;
  std::int64_t block_size = 0;   // tokens; divides 128 or is a multiple of it
  float scale = 1.0f;            // of the dot products
  std::int64_t first_index = 0;  // keys below it do not exist
  void* out = nullptr;           // [tokens, heads, dim], contiguous
};

// Softmax attention of each token over its visible keys, or those of them that lie in its chosen blocks, read through
// the cache. An online softmax over spans of 128 token indices anchored at 0, ascending, fp32 throughout, rounded once;
// keys that are not attended are never read for the token. A token without a key gives zeros. InvalidArgument for
// shapes, seats, pages, slots or block ids out of range, and for ids that do not ascend.
void attend(const AttendArgs& args);

// Work of a call in multiply-adds, or what costs as much.
[[nodiscard]] std::int64_t work_of(const AttendArgs& args);

}  // namespace tandem::cpu
