#include "tandem/cpu/cache_write.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "tandem/base/check.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/thread_pool.h"

namespace tandem::cpu {

namespace {

void require_seat(const BlockTable& table, std::int64_t seat) {
  if (seat >= 0 && seat < table.seats) return;
  throw InvalidArgument("seat " + std::to_string(seat) + ": the block table has " + std::to_string(table.seats));
}

void require_slot(std::int64_t slot, std::int64_t seat, std::int64_t page, std::int64_t num_slots) {
  if (slot >= 0 && slot < num_slots) return;
  throw InvalidArgument("slot " + std::to_string(slot) + " at page " + std::to_string(page) + " of seat " +
                        std::to_string(seat) + ": the pool has " + std::to_string(num_slots));
}

void require_page(std::int64_t page, std::int64_t seat, const BlockTable& table) {
  if (page < table.pages) return;
  throw InvalidArgument("page " + std::to_string(page) + " of seat " + std::to_string(seat) + ": the block table has " +
                        std::to_string(table.pages) + " pages");
}

}  // namespace

void require_pages(const BlockTable& table, std::int64_t seat, std::int64_t length, std::int64_t page_tokens,
                   std::int64_t num_slots) {
  require_seat(table, seat);
  const std::int64_t pages = (length + page_tokens - 1) / page_tokens;
  if (pages > 0) require_page(pages - 1, seat, table);
  const std::int32_t* slots = table.row(seat);
  for (std::int64_t page = 0; page < pages; ++page) require_slot(slots[page], seat, page, num_slots);
}

std::int64_t work_of(const std::vector<CacheSource>& sources, const TokenPlaces& places) {
  std::int64_t elements = 0;
  for (const CacheSource& source : sources) elements += source.view.heads * source.view.dim;
  return places.count * elements * 2;
}

void write_cache(const Pool& pool, const std::vector<CacheSource>& sources, const TokenPlaces& places,
                 const BlockTable& table) {
  for (const CacheSource& source : sources) {
    const std::int64_t page_tokens = source.view.tokens_per_slot();
    const std::int64_t num_slots = source.view.num_slots(pool.num_bytes);
    for (std::int64_t t = 0; t < places.count; ++t) {
      const std::int64_t index = places.index[t], seat = places.seat[t];
      if (index < 0) continue;
      require_seat(table, seat);
      require_page(index / page_tokens, seat, table);
      require_slot(table.row(seat)[index / page_tokens], seat, index / page_tokens, num_slots);
    }
  }
  const KernelTable& kernel = kernels();
  constexpr std::int64_t per_item = 8;
  ThreadPool::shared().run((places.count + per_item - 1) / per_item, work_of(sources, places), [&](std::int64_t item) {
    const std::int64_t end = std::min(places.count, (item + 1) * per_item);
    for (std::int64_t t = item * per_item; t < end; ++t) {
      const std::int64_t index = places.index[t];
      if (index < 0) continue;
      for (const CacheSource& source : sources) {
        const CacheView& view = source.view;
        const std::int64_t head_bytes = view.dim * size_of(source.dtype);
        const auto* from = static_cast<const std::byte*>(source.data) + t * source.token_stride * size_of(source.dtype);
        for (std::int64_t head = 0; head < view.heads; ++head, from += head_bytes) {
          std::byte* to = pool.data + TokenRuns(view, table.row(places.seat[t]), head).at(index, 1).offset;
          if (source.dtype == view.dtype) {
            std::memcpy(to, from, static_cast<std::size_t>(head_bytes));
          } else if (source.dtype == DType::F32) {
            kernel.store_row(reinterpret_cast<const float*>(from), view.dim, view.dtype, to);
          } else {
            const void* row = from;
            kernel.interleave_rows(source.dtype, &row, 1, view.dim, view.dim, reinterpret_cast<float*>(to));
          }
        }
      }
    }
  });
}

}  // namespace tandem::cpu
