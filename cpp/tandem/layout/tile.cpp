#include "tandem/layout/tile.h"

#include "tandem/base/check.h"

namespace tandem::layout {

std::string_view name(Role role) {
  switch (role) {
    case Role::K:
      return "K";
    case Role::V:
      return "V";
    case Role::INDEX_K:
      return "INDEX_K";
    case Role::K_SCALE:
      return "K_SCALE";
    case Role::V_SCALE:
      return "V_SCALE";
  }
  TANDEM_CHECK(false, "a role without a name");
}

std::string describe(const TileSpec& tile) {
  return "layer " + std::to_string(tile.layer.value()) + " " + std::string(name(tile.role));
}

HeadRange local_heads(std::int32_t heads, bool replicated, const Shard& shard) {
  if (replicated) {
    return {0, heads, shard.size};
  }
  if (heads >= shard.size) {
    if (heads % shard.size != 0) {
      throw InvalidArgument("shard size is " + std::to_string(shard.size) + ", must divide the " +
                            std::to_string(heads) + " heads");
    }
    const std::int32_t count = heads / shard.size;
    return {shard.rank * count, count, 1};
  }
  if (shard.size % heads != 0) {
    throw InvalidArgument("shard size is " + std::to_string(shard.size) + ", must be a multiple of the " +
                          std::to_string(heads) + " heads that are fewer");
  }
  const std::int32_t replicas = shard.size / heads;
  return {shard.rank / replicas, 1, replicas};
}

}  // namespace tandem::layout
