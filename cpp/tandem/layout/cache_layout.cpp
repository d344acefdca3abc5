#include "tandem/layout/cache_layout.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <tuple>
#include <utility>

#include "tandem/base/check.h"
#include "tandem/layout/digest.h"

namespace tandem::layout {
namespace {

std::int64_t checked_add(std::int64_t a, std::int64_t b) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw InvalidArgument("the slot of this layout would exceed 63 bits of bytes");
  }
  return sum;
}

std::int64_t checked_multiply(std::int64_t a, std::int64_t b) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw InvalidArgument("the slot of this layout would exceed 63 bits of bytes");
  }
  return product;
}

std::int64_t round_up(std::int64_t value, std::int64_t alignment) {
  return checked_add(value, alignment - 1) / alignment * alignment;
}

void require_at_least(const std::string& what, std::int64_t value, std::int64_t least) {
  if (value < least) {
    throw InvalidArgument(what + " is " + std::to_string(value) + ", must be at least " + std::to_string(least));
  }
}

bool is_scale(Role role) { return role == Role::K_SCALE || role == Role::V_SCALE; }

}  // namespace

CacheLayout::CacheLayout(std::vector<TileSpec> tiles, std::int32_t tokens_per_page, Shard shard, std::int64_t alignment)
    : tokens_per_page_(tokens_per_page), shard_(shard), alignment_(alignment) {
  std::ranges::sort(tiles, {}, [](const TileSpec& tile) { return std::tuple(tile.layer, tile.role); });
  for (const TileSpec& tile : tiles) {
    tiles_.push_back(PlacedTile{.spec = tile});
  }
  require_valid();
  place();
}

void CacheLayout::require_valid() const {
  if (tiles_.empty()) {
    throw InvalidArgument("a cache layout needs at least one tile, 0 were given");
  }
  require_at_least("tokens_per_page", tokens_per_page_, 1);
  require_at_least("shard size", shard_.size, 1);
  if (shard_.rank < 0 || shard_.rank >= shard_.size) {
    throw InvalidArgument("shard rank is " + std::to_string(shard_.rank) + ", must be from 0 to " +
                          std::to_string(shard_.size - 1));
  }
  if (alignment_ < kMinAlignment || !std::has_single_bit(static_cast<std::uint64_t>(alignment_))) {
    throw InvalidArgument("alignment is " + std::to_string(alignment_) + ", must be a power of two of at least " +
                          std::to_string(kMinAlignment));
  }
  for (std::size_t i = 0; i < tiles_.size(); ++i) {
    const TileSpec& tile = tiles_[i].spec;
    const std::string what = describe(tile);
    require_at_least("the layer of a tile", tile.layer.value(), 0);
    require_at_least(what + ": heads", tile.heads, 1);
    require_at_least(what + ": dim", tile.dim, 1);
    if (tile.dim * element_bits(tile.dtype) % 8 != 0) {
      throw InvalidArgument(what + ": dim is " + std::to_string(tile.dim) + ", must be a multiple of " +
                            std::to_string(8 / element_bits(tile.dtype)) + " for " + std::string(name(tile.dtype)));
    }
    if (i > 0 && tiles_[i - 1].spec.layer == tile.layer && tiles_[i - 1].spec.role == tile.role) {
      throw InvalidArgument(what + " is declared twice");
    }
    try {
      (void)local_heads(tile.heads, tile.replicated, shard_);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(what + ": " + error.what());
    }
    require_scales(tile);
  }
}

void CacheLayout::require_scales(const TileSpec& tile) const {
  const std::string what = describe(tile);
  if (is_scale(tile.role)) {
    const Role scaled = tile.role == Role::K_SCALE ? Role::K : Role::V;
    const PlacedTile* of = find(tile.layer, scaled);
    if (of == nullptr || of->spec.dtype != ElementType::NVFP4) {
      throw InvalidArgument(what + " scales an NVFP4 tile, but " +
                            (of == nullptr ? "the layer has no " + std::string(name(scaled))
                                           : describe(of->spec) + " is " + std::string(name(of->spec.dtype))));
    }
    return;
  }
  if (tile.dtype != ElementType::NVFP4) {
    return;
  }
  if (tile.role == Role::INDEX_K) {
    throw InvalidArgument(what + ": dtype is NVFP4, only K and V have scale tiles for it");
  }
  if (tile.dim % kNvfp4Group != 0) {
    throw InvalidArgument(what + ": dim is " + std::to_string(tile.dim) + ", must be a multiple of " +
                          std::to_string(kNvfp4Group) + " for NVFP4");
  }
  const TileSpec wanted{.layer = tile.layer,
                        .role = tile.role == Role::K ? Role::K_SCALE : Role::V_SCALE,
                        .dtype = ElementType::FP8_E4M3,
                        .heads = tile.heads,
                        .dim = tile.dim / kNvfp4Group,
                        .replicated = tile.replicated};
  const PlacedTile* scale = find(wanted.layer, wanted.role);
  if (scale == nullptr) {
    throw InvalidArgument(what + " is NVFP4 and needs a tile " + describe(wanted) + ", which is not declared");
  }
  const auto text = [](const TileSpec& t) {
    return std::string(name(t.dtype)) + " with " + std::to_string(t.heads) + " heads of " + std::to_string(t.dim) +
           (t.replicated ? ", replicated" : "");
  };
  if (scale->spec != wanted) {
    throw InvalidArgument(describe(scale->spec) + " is " + text(scale->spec) + ", must be " + text(wanted));
  }
}

const PlacedTile* CacheLayout::find(LayerId layer, Role role) const {
  const auto key = std::tuple(layer, role);
  const auto it = std::ranges::lower_bound(
      tiles_, key, {}, [](const PlacedTile& tile) { return std::tuple(tile.spec.layer, tile.spec.role); });
  return it != tiles_.end() && it->spec.layer == layer && it->spec.role == role ? &*it : nullptr;
}

std::int32_t CacheLayout::section_of(const TileSpec& tile) {
  const auto it = std::ranges::find_if(sections_, [&](const Section& section) {
    return section.global_heads == tile.heads && section.replicated == tile.replicated;
  });
  if (it == sections_.end()) {
    sections_.push_back(Section{.global_heads = tile.heads,
                                .replicated = tile.replicated,
                                .heads = local_heads(tile.heads, tile.replicated, shard_)});
    return static_cast<std::int32_t>(sections_.size() - 1);
  }
  return static_cast<std::int32_t>(it - sections_.begin());
}

void CacheLayout::place() {
  // Split sections in the order of their first tile, then the replicated ones.
  for (const bool replicated : {false, true}) {
    for (PlacedTile& tile : tiles_) {
      if (tile.spec.replicated == replicated) {
        tile.section = section_of(tile.spec);
      }
    }
  }
  // Tiles inside their head: `head_stride` grows as they are appended.
  for (PlacedTile& tile : tiles_) {
    Section& section = sections_[static_cast<std::size_t>(tile.section)];
    tile.offset = section.head_stride;
    const std::int64_t bytes = checked_multiply(tile.spec.row_bytes(), tokens_per_page_);
    section.head_stride = round_up(checked_add(section.head_stride, bytes), alignment_);
    bytes_per_token_ = checked_add(bytes_per_token_, checked_multiply(section.heads.count, tile.spec.row_bytes()));
  }
  for (Section& section : sections_) {
    section.offset = slot_bytes_;
    slot_bytes_ = checked_add(slot_bytes_, checked_multiply(section.heads.count, section.head_stride));
  }
  for (PlacedTile& tile : tiles_) {
    const Section& section = sections_[static_cast<std::size_t>(tile.section)];
    const std::int64_t row_bytes = tile.spec.row_bytes();
    tile.offset += section.offset;
    tile.axes = {Axis{AxisName::Head, section.heads.count, section.head_stride},
                 Axis{AxisName::TokenGroup, 1, tokens_per_page_ * row_bytes},
                 Axis{AxisName::Token, tokens_per_page_, row_bytes}, Axis{AxisName::Dim, row_bytes, 1}};
  }
}

View CacheLayout::view(LayerId layer, Role role, std::optional<std::int32_t> tokens_per_page) const {
  const PlacedTile* tile = find(layer, role);
  if (tile == nullptr) {
    std::string has;
    for (const PlacedTile& other : tiles_) {
      if (other.spec.layer == layer) {
        has += (has.empty() ? "" : ", ") + std::string(name(other.spec.role));
      }
    }
    throw InvalidArgument("the layout has no tile layer " + std::to_string(layer.value()) + " " +
                          std::string(name(role)) + "; that layer has " + (has.empty() ? "none" : has));
  }
  const std::int32_t page = tokens_per_page.value_or(tokens_per_page_);
  if (page < 1 || tokens_per_page_ % page != 0) {
    throw InvalidArgument("a view's tokens_per_page is " + std::to_string(page) + ", must divide the layout's " +
                          std::to_string(tokens_per_page_));
  }
  const auto& [head, group, token, dim] = tile->axes;
  TANDEM_CHECK(group.size == 1, "a view of a tile whose tokens are split into groups");
  return View{.layer = layer,
              .role = role,
              .dtype = tile->spec.dtype,
              .heads = static_cast<std::int32_t>(head.size),
              .dim = tile->spec.dim,
              .tokens_per_page = page,
              .sub_pages = tokens_per_page_ / page,
              .base_offset = tile->offset,
              .slot_stride = slot_bytes_,
              .head_stride = head.stride,
              .sub_page_stride = page * token.stride,
              .token_stride = token.stride};
}

std::string CacheLayout::describe_content() const {
  std::string text = "tandem cache content 1\n";
  for (const PlacedTile& tile : tiles_) {
    const TileSpec& spec = tile.spec;
    text += describe(spec) + ' ' + std::string(name(spec.dtype)) + ' ' + std::to_string(spec.heads) + ' ' +
            std::to_string(spec.dim) + (spec.replicated ? " replicated\n" : " split\n");
  }
  return text;
}

std::string CacheLayout::content_digest() const { return digest_of(describe_content()); }

std::string CacheLayout::digest() const {
  return digest_of(describe_content() + "page " + std::to_string(tokens_per_page_) + " shard " +
                   std::to_string(shard_.rank) + '/' + std::to_string(shard_.size) + " alignment " +
                   std::to_string(alignment_) + '\n');
}

}  // namespace tandem::layout
