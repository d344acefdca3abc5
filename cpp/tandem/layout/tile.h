#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "tandem/base/strong_id.h"
#include "tandem/layout/element_type.h"

namespace tandem::layout {

// What a tile holds. The order is that of a layer's tiles inside a slot.
enum class Role : std::uint8_t { K, V, INDEX_K, K_SCALE, V_SCALE };
inline constexpr std::array kRoles = {Role::K, Role::V, Role::INDEX_K, Role::K_SCALE, Role::V_SCALE};

[[nodiscard]] std::string_view name(Role role);

// One (layer, role) of the cache as the model declares it: per page and head, `[tokens_per_page, dim]` numbers.
struct TileSpec {
  LayerId layer;
  Role role = Role::K;
  ElementType dtype = ElementType::BF16;
  std::int32_t heads = 0;   // global, over all ranks
  std::int32_t dim = 0;     // numbers per token and head; scale tiles: scales per token and head
  bool replicated = false;  // every rank holds all heads

  // Bytes of one token of one head.
  [[nodiscard]] std::int64_t row_bytes() const { return dim * element_bits(dtype) / 8; }
  friend bool operator==(const TileSpec&, const TileSpec&) = default;
};

// "layer 3 INDEX_K"
[[nodiscard]] std::string describe(const TileSpec& tile);

// The part of the head axis that one rank holds.
struct Shard {
  std::int32_t size = 1;
  std::int32_t rank = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};

// The heads of one tile that a rank holds: `count` from global head `first` on; `replicas` ranks hold the same ones.
struct HeadRange {
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int32_t replicas = 1;
  friend bool operator==(const HeadRange&, const HeadRange&) = default;
};

// With at least `size` heads a rank holds heads/size consecutive ones; with fewer it holds head rank*heads/size, which
// size/heads ranks share; replicated tiles are whole on every rank. Throws InvalidArgument where neither divides.
[[nodiscard]] HeadRange local_heads(std::int32_t heads, bool replicated, const Shard& shard);

// One axis of a tile inside a slot.
enum class AxisName : std::uint8_t { Head, TokenGroup, Token, Dim };
struct Axis {
  AxisName name = AxisName::Head;
  std::int64_t size = 0;
  std::int64_t stride = 0;  // bytes
  friend bool operator==(const Axis&, const Axis&) = default;
};

// Head, token group, token, dim. Dim counts bytes, since numbers may be smaller than one.
using TileAxes = std::array<Axis, 4>;

}  // namespace tandem::layout
