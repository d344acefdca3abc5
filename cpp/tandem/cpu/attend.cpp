#include "tandem/cpu/attend.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tandem/base/check.h"
#include "tandem/cpu/buffer.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/thread_pool.h"
#include "tandem/cpu/token_tiles.h"

namespace tandem::cpu {

namespace {

constexpr std::int64_t kSpan = 128;  // token indices of one step of the online softmax

void require_blocks(const AttendArgs& args, std::int64_t t) {
  const std::int64_t visible = (args.places.index[t] + args.block_size - 1) / args.block_size;
  for (std::int64_t head = 0; head < args.keys.heads; ++head) {
    const std::int32_t* blocks = args.blocks + (t * args.keys.heads + head) * args.topk;
    std::int64_t before = -1;
    for (std::int64_t i = 0; i < args.topk; ++i) {
      const std::int64_t block = blocks[i];
      const bool ended = i > 0 && blocks[i - 1] < 0;
      if (block == -1 || (block > before && block < visible && !ended)) {
        before = block;
        continue;
      }
      throw InvalidArgument("block " + std::to_string(block) + " at place " + std::to_string(i) + " of token " +
                            std::to_string(t) + ", head " + std::to_string(head) + ": the token sees " +
                            std::to_string(visible) + " blocks; ids ascend, with -1 after the last");
    }
  }
}

void require(const AttendArgs& args) {
  if (args.keys.heads < 1 || args.keys.heads != args.values.heads || args.keys.dim != args.values.dim ||
      args.keys.tokens_per_slot() != args.values.tokens_per_slot()) {
    throw InvalidArgument("key view of " + std::to_string(args.keys.heads) + " heads of " +
                          std::to_string(args.keys.dim) + " and value view of " + std::to_string(args.values.heads) +
                          " heads of " + std::to_string(args.values.dim) + " differ, or their pages do");
  }
  if (args.heads % args.keys.heads != 0) {
    throw InvalidArgument(std::to_string(args.heads) + " query heads: expected a multiple of the cache's " +
                          std::to_string(args.keys.heads));
  }
  if (args.first_index < 0) throw InvalidArgument("first_index " + std::to_string(args.first_index) + " is negative");
  if (args.blocks != nullptr &&
      (args.block_size < 1 || (kSpan % args.block_size != 0 && args.block_size % kSpan != 0))) {
    throw InvalidArgument("block_size " + std::to_string(args.block_size) + ": must divide 128 or be a multiple of it");
  }
  const std::int64_t num_slots =
      std::min(args.keys.num_slots(args.pool.num_bytes), args.values.num_slots(args.pool.num_bytes));
  for (const TokenTile& tile : token_tiles(args.places, args.places.count)) {
    require_pages(args.table, args.places.seat[tile.first], tile.longest, args.keys.tokens_per_slot(), num_slots);
    if (args.blocks == nullptr) continue;
    for (std::int64_t t = tile.first; t < tile.first + tile.count; ++t) require_blocks(args, t);
  }
}

// Keys [begin, end) of one token index range.
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The keys of one token and KV head in ascending order, span by span.
class KeyCursor {
 public:
  KeyCursor() = default;
  KeyCursor(const AttendArgs& args, std::int64_t t, std::int64_t kv_head)
      : first_(args.first_index), length_(args.places.index[t]), block_size_(args.block_size) {
    if (args.blocks == nullptr) {
      range_ = {first_, std::max(first_, length_)};
      return;
    }
    blocks_ = args.blocks + (t * args.keys.heads + kv_head) * args.topk;
    blocks_end_ = blocks_ + args.topk;
    next_block();
  }

  [[nodiscard]] bool done() const { return range_.begin == range_.end; }
  [[nodiscard]] std::int64_t span() const { return range_.begin / kSpan; }
  [[nodiscard]] std::int64_t next() const { return range_.begin; }

  // Takes the ranges within the current span; returns how many.
  int take(Range* ranges) {
    const std::int64_t end = (span() + 1) * kSpan;
    int count = 0;
    while (!done() && range_.begin < end) {
      const Range range = {range_.begin, std::min(range_.end, end)};
      if (count > 0 && ranges[count - 1].end == range.begin) {
        ranges[count - 1].end = range.end;
      } else {
        ranges[count++] = range;
      }
      range_.begin = range.end;
      if (done() && blocks_ != nullptr) next_block();
    }
    return count;
  }

 private:
  void next_block() {
    range_ = {};
    while (done() && blocks_ != blocks_end_ && *blocks_ >= 0) {
      const std::int64_t begin = *blocks_++ * block_size_;
      range_ = {std::max(begin, first_), std::min(begin + block_size_, length_)};
      if (range_.begin > range_.end) range_ = {};
    }
  }

  std::int64_t first_ = 0;
  std::int64_t length_ = 0;
  std::int64_t block_size_ = 0;
  Range range_;
  const std::int32_t* blocks_ = nullptr;
  const std::int32_t* blocks_end_ = nullptr;
};

// One tile of tokens and one KV head: rows are (token, query head of the group).
class TileAttention {
 public:
  TileAttention(const AttendArgs& args, const KernelTable& table, const TokenTile& tile, std::int64_t kv_head)
      : args_(args),
        table_(table),
        tile_(tile),
        kv_head_(kv_head),
        group_(args.heads / args.keys.heads),
        padded_(table.query_floats(args.keys.dim)),
        scale_log2e_(args.scale * 1.44269504088896f),
        key_runs_(args.keys, args.table.row(args.places.seat[tile.first]), kv_head),
        value_runs_(args.values, args.table.row(args.places.seat[tile.first]), kv_head) {
    const std::int64_t rows = tile.count * group_;
    float* floats = scratch_floats(Scratch::Scores, rows * (2 * padded_ + kSpan + 2));
    queries_ = floats;
    accumulators_ = queries_ + rows * padded_;
    scores_ = accumulators_ + rows * padded_;
    maxima_ = scores_ + rows * kSpan;
    sums_ = maxima_ + rows;
    std::fill(accumulators_, accumulators_ + rows * padded_, 0.0f);
    std::fill(maxima_, maxima_ + rows, -std::numeric_limits<float>::infinity());
    std::fill(sums_, sums_ + rows, 0.0f);
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t from =
          (tile.first + row / group_) * args.query_stride + (kv_head_ * group_ + row % group_) * args.keys.dim;
      table_.prepare_query(args.dtype, static_cast<const std::byte*>(args.queries) + from * size_of(args.dtype),
                           args.keys.dim, args.keys.dtype, queries_ + row * padded_);
    }
    for (std::int64_t token = 0; token < tile.count; ++token) {
      cursors_[token] = KeyCursor(args, tile.first + token, kv_head);
    }
  }

  static constexpr std::int64_t kMaxTokens = 16;
  static constexpr std::int64_t kRows = 32;  // aimed at

  // `after`: the keys that this thread reads next, a hint.
  void run(const std::byte* after) {
    after_ = after;
    for (;;) {
      std::int64_t span = -1;
      for (std::int64_t token = 0; token < tile_.count; ++token) {
        if (!cursors_[token].done() && (span < 0 || cursors_[token].span() < span)) span = cursors_[token].span();
      }
      if (span < 0) break;
      attend_span(span);
    }
    for (std::int64_t row = 0; row < tile_.count * group_; ++row) {
      const float factor = sums_[row] > 0.0f || sums_[row] != sums_[row] ? 1.0f / sums_[row] : 0.0f;
      table_.finish_row(accumulators_ + row * padded_, args_.values.dim, args_.values.dtype, factor, args_.dtype,
                        static_cast<std::byte*>(args_.out) + place(row));
    }
  }

 private:
  // Bytes to the row's head in out.
  [[nodiscard]] std::int64_t place(std::int64_t row) const {
    const std::int64_t head = (tile_.first + row / group_) * args_.heads + kv_head_ * group_ + row % group_;
    return head * args_.keys.dim * size_of(args_.dtype);
  }

  void attend_span(std::int64_t span) {
    Range ranges[kMaxTokens][kSpan];
    int counts[kMaxTokens];
    for (std::int64_t token = 0; token < tile_.count; ++token) {
      KeyCursor& cursor = cursors_[token];
      counts[token] = !cursor.done() && cursor.span() == span ? cursor.take(ranges[token]) : 0;
    }
    const KeyCursor& last = cursors_[tile_.count - 1];
    next_keys_ = last.done() ? after_ : args_.pool.data + key_runs_.at(last.next(), 1).offset;
    for (std::int64_t token = 0; token < tile_.count;) {
      std::int64_t next = token + 1;
      if (counts[token] == 1) {
        while (next < tile_.count && counts[next] == 1 && ranges[next][0].begin == ranges[token][0].begin) ++next;
        attend_together(token, next, ranges);
      } else if (counts[token] > 1) {
        attend_alone(token, ranges[token], counts[token]);
      }
      token = next;
    }
  }

  // Tokens whose keys in this span start at one index and are neighbours.
  void attend_together(std::int64_t begin, std::int64_t end, const Range (*ranges)[kSpan]) {
    const std::int64_t first = ranges[begin][0].begin;
    std::int64_t shortest = kSpan, longest = 0;
    for (std::int64_t token = begin; token < end; ++token) {
      const std::int64_t count = ranges[token][0].end - first;
      shortest = std::min(shortest, count);
      longest = std::max(longest, count);
    }
    score(begin, end, {first, first + longest}, 0);
    for (std::int64_t token = begin; token < end; ++token) normalize(token, ranges[token][0].end - first);
    add_values(begin, end, {first, first + shortest}, 0);
    for (std::int64_t token = begin; token < end; ++token) {
      add_values(token, token + 1, {first + shortest, ranges[token][0].end}, shortest);
    }
  }

  void attend_alone(std::int64_t token, const Range* ranges, int count) {
    std::int64_t keys = 0;
    for (int i = 0; i < count; ++i) {
      score(token, token + 1, ranges[i], keys);
      keys += ranges[i].end - ranges[i].begin;
    }
    normalize(token, keys);
    keys = 0;
    for (int i = 0; i < count; ++i) {
      add_values(token, token + 1, ranges[i], keys);
      keys += ranges[i].end - ranges[i].begin;
    }
  }

  // Products of the tokens' rows with keys of `range`, to the scores from `column` on.
  void score(std::int64_t begin, std::int64_t end, Range range, std::int64_t column) {
    const QueryRows queries = {queries_ + begin * group_ * padded_, padded_, (end - begin) * group_};
    while (range.begin < range.end) {
      const TokenRuns::Run run = key_runs_.at(range.begin, range.end - range.begin);
      const std::byte* values = args_.pool.data + value_runs_.at(range.begin, 1).offset;
      table_.dot(args_.keys.dtype, queries, {args_.pool.data + run.offset, args_.keys.token_stride, run.count, values},
                 args_.keys.dim, scores_ + begin * group_ * kSpan + column, kSpan);
      range.begin += run.count;
      column += run.count;
    }
  }

  void normalize(std::int64_t token, std::int64_t keys) {
    for (std::int64_t row = token * group_; row < (token + 1) * group_; ++row) {
      const float factor = table_.softmax_step(scores_ + row * kSpan, keys, scale_log2e_, maxima_ + row, sums_ + row);
      table_.scale_row(accumulators_ + row * padded_, padded_, factor);
    }
  }

  void add_values(std::int64_t begin, std::int64_t end, Range range, std::int64_t column) {
    while (range.begin < range.end) {
      const TokenRuns::Run run = value_runs_.at(range.begin, range.end - range.begin);
      CacheRun values = {args_.pool.data + run.offset, args_.values.token_stride, run.count, next_keys_};
      constexpr std::int64_t most = 4;
      const std::int64_t last = end * group_;
      for (std::int64_t row = begin * group_; row < last; row += most) {
        const float* probabilities[most];
        float* accumulators[most];
        const std::int64_t rows = std::min(most, last - row);
        for (std::int64_t r = 0; r < rows; ++r) {
          probabilities[r] = scores_ + (row + r) * kSpan + column;
          accumulators[r] = accumulators_ + (row + r) * padded_;
        }
        table_.accumulate(args_.values.dtype, probabilities, accumulators, rows, values, args_.values.dim);
        values.ahead = nullptr;
      }
      range.begin += run.count;
      column += run.count;
    }
  }

  const AttendArgs& args_;
  const KernelTable& table_;
  const TokenTile& tile_;
  std::int64_t kv_head_;
  std::int64_t group_;
  std::int64_t padded_;
  float scale_log2e_;
  TokenRuns key_runs_;
  TokenRuns value_runs_;
  KeyCursor cursors_[kMaxTokens];
  const std::byte* after_ = nullptr;
  const std::byte* next_keys_ = nullptr;  // after the present span
  float* queries_ = nullptr;
  float* accumulators_ = nullptr;
  float* scores_ = nullptr;
  float* maxima_ = nullptr;
  float* sums_ = nullptr;
};

// Where the keys of an item begin, or null if there are none.
const std::byte* first_keys(const AttendArgs& args, const std::vector<TokenTile>& tiles, std::int64_t item) {
  const TokenTile& tile = tiles[static_cast<std::size_t>(item / args.keys.heads)];
  const std::int64_t head = item % args.keys.heads;
  const KeyCursor cursor(args, tile.first, head);
  if (cursor.done()) return nullptr;
  const TokenRuns runs(args.keys, args.table.row(args.places.seat[tile.first]), head);
  return args.pool.data + runs.at(cursor.next(), 1).offset;
}

}  // namespace

std::int64_t work_of(const AttendArgs& args) {
  const std::int64_t most =
      args.blocks == nullptr ? std::numeric_limits<std::int64_t>::max() : args.topk * args.block_size;
  std::int64_t keys = 0;
  for (std::int64_t t = 0; t < args.places.count; ++t) {
    keys += std::clamp<std::int64_t>(args.places.index[t], 0, most);
  }
  // Reading a key or value costs as much as using it for eight query heads.
  return keys * std::max(args.heads, 8 * args.keys.heads) * args.keys.dim * 2;
}

void attend(const AttendArgs& args) {
  require(args);
  const KernelTable& table = kernels();
  const std::int64_t group = args.heads / args.keys.heads;
  const std::int64_t row_bytes = args.heads * args.keys.dim * size_of(args.dtype);
  for (std::int64_t t = 0; t < args.places.count; ++t) {
    if (args.places.index[t] > 0) continue;
    std::memset(static_cast<std::byte*>(args.out) + t * row_bytes, 0, static_cast<std::size_t>(row_bytes));
  }
  const std::int64_t most = std::clamp<std::int64_t>(TileAttention::kRows / group, 1, TileAttention::kMaxTokens);
  const std::vector<TokenTile> tiles = token_tiles(args.places, most);
  // The longest tiles are the last of a sequence: from the back, so that no thread is left with one at the end.
  const std::int64_t items = static_cast<std::int64_t>(tiles.size()) * args.keys.heads;
  const std::int64_t threads = ThreadPool::shared().num_threads();
  ThreadPool::shared().run(items, work_of(args), [&](std::int64_t item) {
    const std::int64_t from_back = items - 1 - item;
    const TokenTile& tile = tiles[static_cast<std::size_t>(from_back / args.keys.heads)];
    TileAttention(args, table, tile, from_back % args.keys.heads)
        .run(item + threads < items ? first_keys(args, tiles, from_back - threads) : nullptr);
  });
}

}  // namespace tandem::cpu
