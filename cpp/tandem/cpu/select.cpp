#include "tandem/cpu/select.h"

#include <algorithm>
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

constexpr std::int64_t kMaxTopk = 1024;

void require(const SelectArgs& args) {
  if (args.keys.heads != 1) {
    throw InvalidArgument("index key view of " + std::to_string(args.keys.heads) + " heads: expected 1");
  }
  if (args.topk < 1 || args.topk > kMaxTopk) {
    throw InvalidArgument("topk " + std::to_string(args.topk) + ": allowed are 1 to " + std::to_string(kMaxTopk));
  }
  if (args.num_local < 0) throw InvalidArgument("num_local " + std::to_string(args.num_local) + " is negative");
  if (args.block_size < 1)
    throw InvalidArgument("block_size " + std::to_string(args.block_size) + ": must be positive");
  const std::int64_t num_slots = args.keys.num_slots(args.pool.num_bytes);
  for (const TokenTile& tile : token_tiles(args.places, args.places.count)) {
    require_pages(args.table, args.places.seat[tile.first], tile.longest, args.keys.tokens_per_slot(), num_slots);
    const std::int64_t blocks = (tile.longest + args.block_size - 1) / args.block_size;
    if (args.scores != nullptr && blocks > args.max_blocks) {
      throw InvalidArgument("scores for " + std::to_string(args.max_blocks) + " blocks: a token sees " +
                            std::to_string(blocks));
    }
  }
}

class Selection {
 public:
  explicit Selection(const SelectArgs& args)
      : args_(args), table_(kernels()), padded_(table_.query_floats(args.keys.dim)) {}

  void run() {
    const std::int64_t most = std::max<std::int64_t>(1, 32 / args_.heads);
    std::vector<TokenTile> tiles;
    for (const TokenTile& tile : token_tiles(args_.places, most)) {
      if (scored_blocks(tile) > 0) tiles.push_back(tile);
    }
    // Batches of tiles bound the scratch: a tile's scores grow with its context.
    for (std::size_t first = 0; first < tiles.size();) {
      std::int64_t floats = 0;
      std::size_t last = first;
      offsets_.clear();
      while (last < tiles.size() && (last == first || floats + score_floats(tiles[last]) <= kBatchFloats)) {
        offsets_.push_back(floats);
        floats += score_floats(tiles[last++]);
      }
      score_batch({tiles.data() + first, last - first}, floats);
      first = last;
    }
    for (std::int64_t t = 0; t < args_.places.count; ++t) {
      if (to_score(t) > 0) continue;
      for (std::int64_t h = 0; h < args_.heads; ++h) choose(t, h, nullptr);
    }
  }

 private:
  static constexpr std::int64_t kBatchFloats = std::int64_t{4} << 20;
  struct Tiles {
    const TokenTile* data;
    std::size_t count;
  };

  [[nodiscard]] std::int64_t visible_blocks(std::int64_t t) const {
    const std::int64_t length = std::max<std::int64_t>(0, args_.places.index[t]);
    return (length + args_.block_size - 1) / args_.block_size;
  }
  [[nodiscard]] std::int64_t chosen(std::int64_t t) const { return std::min(args_.topk, visible_blocks(t)); }
  [[nodiscard]] std::int64_t forced(std::int64_t t) const { return std::min(args_.num_local, chosen(t)); }

  // Blocks [0, n) whose scores decide something, or are asked for.
  [[nodiscard]] std::int64_t to_score(std::int64_t t) const {
    const std::int64_t blocks = visible_blocks(t);
    if (args_.scores != nullptr) return blocks;
    return blocks <= args_.topk ? 0 : blocks - forced(t);
  }
  [[nodiscard]] std::int64_t scored_blocks(const TokenTile& tile) const {
    std::int64_t most = 0;
    for (std::int64_t t = tile.first; t < tile.first + tile.count; ++t) most = std::max(most, to_score(t));
    return most;
  }
  [[nodiscard]] std::int64_t score_floats(const TokenTile& tile) const {
    return tile.count * args_.heads * (padded_ + scored_blocks(tile));
  }

  // Scratch of a tile: its queries in cache order, then its scores [token][head][block].
  void score_batch(Tiles tiles, std::int64_t floats) {
    float* scratch = scratch_floats(Scratch::Scores, floats);
    struct Item {
      std::size_t tile;
      std::int64_t begin, end;
    };
    std::vector<Item> items;
    std::int64_t work = 0;
    for (std::size_t i = 0; i < tiles.count; ++i) {
      const TokenTile& tile = tiles.data[i];
      const std::int64_t blocks = scored_blocks(tile);
      const std::int64_t per_block = args_.block_size * args_.keys.dim * tile.count * args_.heads;
      const std::int64_t per_item = std::max<std::int64_t>(1, kItemWork / per_block);
      for (std::int64_t begin = 0; begin < blocks; begin += per_item) {
        items.push_back({i, begin, std::min(blocks, begin + per_item)});
      }
      work += per_block * blocks;
      prepare(tile, scratch + offsets_[i]);
    }
    ThreadPool& pool = ThreadPool::shared();
    pool.run(static_cast<std::int64_t>(items.size()), work, [&](std::int64_t index) {
      const Item& item = items[static_cast<std::size_t>(index)];
      for (std::int64_t block = item.begin; block < item.end; ++block) {
        score_block(tiles.data[item.tile], block, scratch + offsets_[item.tile]);
      }
    });
    pool.run(static_cast<std::int64_t>(tiles.count), work / 128, [&](std::int64_t index) {
      const auto i = static_cast<std::size_t>(index);
      const TokenTile& tile = tiles.data[i];
      const std::int64_t blocks = scored_blocks(tile);
      const float* scores = scratch + offsets_[i] + tile.count * args_.heads * padded_;
      for (std::int64_t row = 0; row < tile.count * args_.heads; ++row) {
        const std::int64_t t = tile.first + row / args_.heads;
        if (to_score(t) > 0) choose(t, row % args_.heads, scores + row * blocks);
      }
    });
  }

  void prepare(const TokenTile& tile, float* queries) const {
    for (std::int64_t row = 0; row < tile.count * args_.heads; ++row) {
      const std::int64_t from =
          (tile.first + row / args_.heads) * args_.query_stride + row % args_.heads * args_.keys.dim;
      table_.prepare_query(args_.dtype, static_cast<const std::byte*>(args_.queries) + from * size_of(args_.dtype),
                           args_.keys.dim, args_.keys.dtype, queries + row * padded_);
    }
  }

  void score_block(const TokenTile& tile, std::int64_t block, float* scratch) const {
    const std::int64_t heads = args_.heads, blocks = scored_blocks(tile), first_key = block * args_.block_size;
    const TokenRuns runs(args_.keys, args_.table.row(args_.places.seat[tile.first]), 0);
    float* scores = scratch + tile.count * heads * padded_ + block;
    const auto keys_of = [&](std::int64_t token) {
      return std::clamp<std::int64_t>(args_.places.index[tile.first + token] - first_key, 0, args_.block_size);
    };
    for (std::int64_t token = 0; token < tile.count;) {
      const std::int64_t keys = keys_of(token);
      std::int64_t next = token + 1;
      while (next < tile.count && keys_of(next) == keys) ++next;
      const std::int64_t rows = (next - token) * heads;
      float* maxima = scratch_floats(Scratch::Tile, rows);
      std::fill(maxima, maxima + rows, -std::numeric_limits<float>::infinity());
      for (std::int64_t key = 0; key < keys;) {
        const TokenRuns::Run run = runs.at(first_key + key, keys - key);
        key += run.count;
        const std::int64_t after = first_key + key;
        const std::byte* ahead = after < tile.longest ? args_.pool.data + runs.at(after, 1).offset : nullptr;
        table_.dot_max(args_.keys.dtype, {scratch + token * heads * padded_, padded_, rows},
                       {args_.pool.data + run.offset, args_.keys.token_stride, run.count, ahead}, args_.keys.dim,
                       maxima);
      }
      for (std::int64_t row = 0; row < rows; ++row) scores[(token * heads + row) * blocks] = maxima[row];
      token = next;
    }
  }

  // Scores of blocks [0, to_score(t)), or null where all visible blocks are chosen.
  void choose(std::int64_t t, std::int64_t head, const float* scores) const {
    const std::int64_t blocks = visible_blocks(t), count = chosen(t), local = forced(t);
    std::int32_t* out = args_.out + (t * args_.heads + head) * args_.topk;
    if (count == blocks) {
      for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<std::int32_t>(i);
    } else {
      best(scores, blocks - local, count - local, out);
      for (std::int64_t i = 0; i < local; ++i) {
        out[count - local + i] = static_cast<std::int32_t>(blocks - local + i);
      }
    }
    std::fill(out + count, out + args_.topk, -1);
    if (args_.scores == nullptr) return;
    float* to = args_.scores + (t * args_.heads + head) * args_.max_blocks;
    if (scores != nullptr) std::copy_n(scores, blocks, to);
    std::fill(to + blocks, to + args_.max_blocks, -std::numeric_limits<float>::infinity());
  }

  // Ids of the `count` best of n scores, ascending.
  void best(const float* scores, std::int64_t n, std::int64_t count, std::int32_t* ids) const {
    if (count == 0) return;
    float kept[kMaxTopk];  // descending; equal ones by ascending id
    std::int64_t size = 0;
    for (std::int64_t block = 0; block < n;) {
      std::int64_t place = size < count ? size++ : count - 1;
      for (; place > 0 && scores[block] > kept[place - 1]; --place) {
        kept[place] = kept[place - 1];
        ids[place] = ids[place - 1];
      }
      kept[place] = scores[block];
      ids[place] = static_cast<std::int32_t>(block);
      ++block;
      if (size == count) block = table_.find_above(scores, block, n, kept[count - 1]);
    }
    std::sort(ids, ids + count);
  }

  static constexpr std::int64_t kItemWork = 500'000;  // multiply-adds
  const SelectArgs& args_;
  const KernelTable& table_;
  std::int64_t padded_;
  std::vector<std::int64_t> offsets_;
};

}  // namespace

std::int64_t work_of(const SelectArgs& args) {
  std::int64_t keys = 0;
  for (std::int64_t t = 0; t < args.places.count; ++t) {
    const std::int64_t visible = std::max<std::int64_t>(0, args.places.index[t]);
    if (visible > args.topk * args.block_size || args.scores != nullptr) keys += visible;
  }
  // Reading a key costs as much as using it for eight index heads.
  return keys * std::max<std::int64_t>(args.heads, 8) * args.keys.dim;
}

void select_blocks(const SelectArgs& args) {
  require(args);
  Selection(args).run();
}

}  // namespace tandem::cpu
