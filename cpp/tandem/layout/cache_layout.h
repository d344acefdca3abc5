#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tandem/layout/tile.h"
#include "tandem/layout/view.h"

namespace tandem::layout {

// The part of a slot whose tiles have the same global head count: head after head, each with all its tiles.
struct Section {
  std::int32_t global_heads = 0;
  bool replicated = false;
  HeadRange heads;               // those that this rank holds
  std::int64_t offset = 0;       // bytes from the slot's start
  std::int64_t head_stride = 0;  // bytes

  [[nodiscard]] std::int64_t bytes() const { return heads.count * head_stride; }
};

// A declared tile and where it lies.
struct PlacedTile {
  TileSpec spec;
  std::int32_t section = 0;  // index into sections()
  std::int64_t offset = 0;   // of the first local head, bytes from the slot's start
  TileAxes axes{};           // from there: head, token group, token, dim
};

inline constexpr std::int64_t kMinAlignment = 128;

// How every tile of a model's cache lies in a slot, built once from the declared tiles. Inside a slot, sections follow
// one another: split ones in the order of their first tile, replicated ones last. Inside a section, heads; inside a
// head, tiles by (layer, role), each `[tokens, dim]` and contiguous. Tile starts and the strides of heads, sections and
// slots are multiples of `alignment`.
class CacheLayout {
 public:
  // The order of `tiles` does not matter. Throws InvalidArgument, naming the tile, what was given and what is allowed:
  // no tiles; two with one (layer, role); a head count, dim, layer or page below its minimum; rows that are no whole
  // bytes; NVFP4 tiles without their scale tiles (FP8_E4M3, same heads, dim / 16) or scale tiles without NVFP4;
  // a shard that fits no way of splitting the heads; an alignment that is no power of two or under 128; sizes past 63
  // bits.
  CacheLayout(std::vector<TileSpec> tiles, std::int32_t tokens_per_page, Shard shard = {},
              std::int64_t alignment = kMinAlignment);

  [[nodiscard]] const std::vector<PlacedTile>& tiles() const { return tiles_; }
  [[nodiscard]] const std::vector<Section>& sections() const { return sections_; }
  [[nodiscard]] std::int32_t tokens_per_page() const { return tokens_per_page_; }
  [[nodiscard]] const Shard& shard() const { return shard_; }
  [[nodiscard]] std::int64_t alignment() const { return alignment_; }

  // Bytes from one slot to the next.
  [[nodiscard]] std::int64_t slot_bytes() const { return slot_bytes_; }
  // Bytes that one token's entries take on this rank, padding not counted.
  [[nodiscard]] std::int64_t bytes_per_token() const { return bytes_per_token_; }

  // The view of one tile in pages of `tokens_per_page` tokens, the layout's own where not given. Throws InvalidArgument
  // if there is no such tile or the page size does not divide the layout's.
  [[nodiscard]] View view(LayerId layer, Role role, std::optional<std::int32_t> tokens_per_page = std::nullopt) const;

  // Digest of what two peers must have in common to exchange pages: each tile's layer, role, dtype, global heads, dim
  // and replication.
  [[nodiscard]] std::string content_digest() const;
  // Digest of the content and of what places it: page size, shard and alignment. Equal digests: every byte of a slot
  // means the same.
  [[nodiscard]] std::string digest() const;

 private:
  void require_valid() const;
  void require_scales(const TileSpec& tile) const;
  [[nodiscard]] const PlacedTile* find(LayerId layer, Role role) const;
  [[nodiscard]] std::int32_t section_of(const TileSpec& tile);
  void place();
  [[nodiscard]] std::string describe_content() const;

  std::vector<PlacedTile> tiles_;  // by (layer, role)
  std::vector<Section> sections_;
  std::int32_t tokens_per_page_;
  Shard shard_;
  std::int64_t alignment_;
  std::int64_t slot_bytes_ = 0;
  std::int64_t bytes_per_token_ = 0;
};

}  // namespace tandem::layout
