#include <nanobind/ndarray.h>
#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bindings.h"
#include "tandem/base/check.h"
#include "tandem/layout/cache_layout.h"

using namespace nb::literals;

namespace tandem::layout {
namespace {

constexpr std::int64_t kDictVersion = 1;

using Table = nb::ndarray<const std::int32_t, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<nb::numpy, std::int32_t>;

Ids flat_ids(const View& view, const Table& table, std::int64_t num_slots, std::int32_t head) {
  if (table.ndim() == 0) {
    throw InvalidArgument("a block table has at least one axis, 0 were given");
  }
  std::vector<std::size_t> shape;
  for (std::size_t axis = 0; axis < table.ndim(); ++axis) {
    shape.push_back(table.shape(axis));
  }
  shape.back() *= static_cast<std::size_t>(view.sub_pages);
  auto ids = std::make_unique<std::vector<std::int32_t>>(table.size() * static_cast<std::size_t>(view.sub_pages));
  view.flat_ids({table.data(), table.size()}, num_slots, head, *ids);
  std::int32_t* data = ids->data();
  nb::capsule owner(ids.release(), [](void* p) noexcept { delete static_cast<std::vector<std::int32_t>*>(p); });
  return Ids(data, shape.size(), shape.data(), owner);
}

// The dict form. Keys that the reader does not know are ignored; missing keys that have a default take it.

nb::object required(const nb::dict& dict, const char* key, const char* of) {
  if (!dict.contains(key)) {
    throw InvalidArgument(std::string("the dict of a ") + of + " has no \"" + key + "\"");
  }
  return dict[key];
}

template <typename T>
T value_of(const nb::handle& value, const char* key) {
  T out{};
  if (!nb::try_cast(value, out, false)) {
    throw InvalidArgument(std::string("\"") + key +
                          "\" of a layout's dict has a value of the wrong type: " + nb::repr(value).c_str());
  }
  return out;
}

template <typename T>
T value_or(const nb::dict& dict, const char* key, T fallback) {
  return dict.contains(key) ? value_of<T>(dict[key], key) : fallback;
}

template <typename Enum, std::size_t N>
Enum named(const std::array<Enum, N>& all, const std::string& text, const char* key) {
  std::string allowed;
  for (const Enum each : all) {
    if (name(each) == text) {
      return each;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(name(each));
  }
  throw InvalidArgument(std::string("\"") + key + "\" is \"" + text + "\", must be one of " + allowed);
}

nb::dict to_dict(const CacheLayout& layout) {
  nb::list tiles;
  for (const PlacedTile& tile : layout.tiles()) {
    nb::dict entry;
    entry["layer"] = tile.spec.layer.value();
    entry["role"] = std::string(name(tile.spec.role));
    entry["dtype"] = std::string(name(tile.spec.dtype));
    entry["heads"] = tile.spec.heads;
    entry["dim"] = tile.spec.dim;
    entry["replicated"] = tile.spec.replicated;
    tiles.append(entry);
  }
  nb::dict shard;
  shard["size"] = layout.shard().size;
  shard["rank"] = layout.shard().rank;
  nb::dict dict;
  dict["version"] = kDictVersion;
  dict["tiles"] = tiles;
  dict["tokens_per_page"] = layout.tokens_per_page();
  dict["shard"] = shard;
  dict["alignment"] = layout.alignment();
  return dict;
}

CacheLayout from_dict(const nb::dict& dict) {
  const auto version = value_of<std::int64_t>(required(dict, "version", "layout"), "version");
  if (version != kDictVersion) {
    throw InvalidArgument("the dict of a layout has version " + std::to_string(version) + ", must be " +
                          std::to_string(kDictVersion));
  }
  std::vector<TileSpec> tiles;
  for (const nb::handle item : value_of<nb::list>(required(dict, "tiles", "layout"), "tiles")) {
    const auto entry = value_of<nb::dict>(item, "tiles");
    const auto integer = [&](const char* key) { return value_of<std::int32_t>(required(entry, key, "tile"), key); };
    const auto text = [&](const char* key) { return value_of<std::string>(required(entry, key, "tile"), key); };
    tiles.push_back(TileSpec{.layer = LayerId{integer("layer")},
                             .role = named(kRoles, text("role"), "role"),
                             .dtype = named(kElementTypes, text("dtype"), "dtype"),
                             .heads = integer("heads"),
                             .dim = integer("dim"),
                             .replicated = value_or(entry, "replicated", false)});
  }
  Shard shard;
  if (dict.contains("shard")) {
    const auto entry = value_of<nb::dict>(dict["shard"], "shard");
    shard = {value_or(entry, "size", shard.size), value_or(entry, "rank", shard.rank)};
  }
  const auto page = value_of<std::int32_t>(required(dict, "tokens_per_page", "layout"), "tokens_per_page");
  return CacheLayout(std::move(tiles), page, shard, value_or(dict, "alignment", kMinAlignment));
}

std::string repr(const TileSpec& tile) {
  return "TileSpec(layer=" + std::to_string(tile.layer.value()) + ", role=" + std::string(name(tile.role)) +
         ", dtype=" + std::string(name(tile.dtype)) + ", heads=" + std::to_string(tile.heads) +
         ", dim=" + std::to_string(tile.dim) + ", replicated=" + (tile.replicated ? "True" : "False") + ")";
}

void bind_enums(nb::module_& m) {
  nb::enum_<ElementType>(m, "ElementType", "How one number of a tile is stored.")
      .value("BF16", ElementType::BF16, "bfloat16, 2 bytes.")
      .value("FP16", ElementType::FP16, "IEEE binary16, 2 bytes.")
      .value("FP32", ElementType::FP32, "IEEE binary32, 4 bytes.")
      .value("FP8_E4M3", ElementType::FP8_E4M3, "1 byte, finite values and NaN only.")
      .value("NVFP4", ElementType::NVFP4,
             "Two E2M1 numbers a byte; every 16 along dim share a scale, held by the tile K_SCALE or V_SCALE.");
  nb::enum_<Role>(m, "Role", "What a tile holds.")
      .value("K", Role::K, "Keys.")
      .value("V", Role::V, "Values.")
      .value("INDEX_K", Role::INDEX_K, "Index keys of block selection.")
      .value("K_SCALE", Role::K_SCALE, "FP8_E4M3 scales of an NVFP4 K tile, one per 16 numbers.")
      .value("V_SCALE", Role::V_SCALE, "FP8_E4M3 scales of an NVFP4 V tile, one per 16 numbers.");
}

void bind_specs(nb::module_& m) {
  nb::class_<TileSpec>(m, "TileSpec",
                       "One (layer, role) of the cache as a model declares it: per page and head, "
                       "`[tokens_per_page, dim]` numbers of `dtype`. Immutable; checked when a CacheLayout is built.")
      .def(
          "__init__",
          [](TileSpec* self, std::int32_t layer, Role role, ElementType dtype, std::int32_t heads, std::int32_t dim,
             bool replicated) { new (self) TileSpec{LayerId{layer}, role, dtype, heads, dim, replicated}; },
          "layer"_a, "role"_a, "dtype"_a, "heads"_a, "dim"_a, "replicated"_a = false)
      .def_prop_ro(
          "layer", [](const TileSpec& t) { return t.layer.value(); }, "Layer of the cache, from 0.")
      .def_ro("role", &TileSpec::role, "What it holds.")
      .def_ro("dtype", &TileSpec::dtype, "How a number is stored.")
      .def_ro("heads", &TileSpec::heads, "Global heads, over all ranks.")
      .def_ro("dim", &TileSpec::dim, "Numbers per token and head (of a scale tile: scales).")
      .def_ro("replicated", &TileSpec::replicated, "Whether every rank holds all heads.")
      .def_prop_ro("row_bytes", &TileSpec::row_bytes, "Bytes of one token of one head.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const TileSpec& t) { return nb::hash(nb::str(repr(t).c_str())); })
      .def("__repr__", [](const TileSpec& t) { return repr(t); });

  nb::class_<Shard>(m, "Shard",
                    "The part of the head axis that one rank holds. A section with at least `size` heads gives each "
                    "rank heads/size consecutive ones; one with fewer gives rank r head r*heads//size.")
      .def(
          "__init__", [](Shard* self, std::int32_t size, std::int32_t rank) { new (self) Shard{size, rank}; },
          "size"_a = 1, "rank"_a = 0)
      .def_ro("size", &Shard::size, "Number of ranks.")
      .def_ro("rank", &Shard::rank, "This rank, from 0.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__hash__", [](const Shard& s) { return nb::hash(nb::make_tuple(s.size, s.rank)); })
      .def("__repr__", [](const Shard& s) {
        return "Shard(size=" + std::to_string(s.size) + ", rank=" + std::to_string(s.rank) + ")";
      });
}

void bind_view(nb::module_& m) {
  nb::class_<View>(
      m, "View",
      "An affine map from (slot, local head, sub-page, token) to bytes of the pool, for one (layer, role). "
      "A page is seen as `sub_pages` pages of `tokens_per_page` tokens; page q of a sequence in these "
      "units is `(table[q // sub_pages], q % sub_pages)`. Offsets and strides are bytes.")
      .def_prop_ro(
          "layer", [](const View& v) { return v.layer.value(); }, "Layer of the cache.")
      .def_ro("role", &View::role, "What the tile holds.")
      .def_ro("dtype", &View::dtype, "How a number is stored.")
      .def_ro("heads", &View::heads, "Heads that this rank holds.")
      .def_ro("dim", &View::dim, "Numbers per token and head.")
      .def_ro("tokens_per_page", &View::tokens_per_page, "Tokens of one page of this view.")
      .def_ro("sub_pages", &View::sub_pages, "Pages of this view in one page of the layout.")
      .def_ro("base_offset", &View::base_offset, "Of slot 0, head 0, sub-page 0, token 0.")
      .def_ro("slot_stride", &View::slot_stride, "From a slot to the next.")
      .def_ro("head_stride", &View::head_stride, "From a head to the next.")
      .def_ro("sub_page_stride", &View::sub_page_stride, "From a sub-page to the next.")
      .def_ro("token_stride", &View::token_stride, "From a token to the next.")
      .def_prop_ro("row_bytes", &View::row_bytes, "Bytes of one token of one head, contiguous.")
      .def_prop_ro("sub_page_bytes", &View::sub_page_bytes, "Bytes of one sub-page of one head, contiguous.")
      .def("bound", &View::bound, "num_slots"_a,
           "First byte past all that the view addresses in a pool of `num_slots` slots. Raises InvalidArgument for a "
           "negative count.")
      .def(
          "offset",
          [](const View& v, std::int32_t slot, std::int32_t head, std::int32_t sub_page, std::int32_t token) {
            return v.offset(SlotId{slot}, head, sub_page, token);
          },
          "slot"_a, "head"_a, "sub_page"_a, "token"_a,
          "First byte of one token of one local head. Raises InvalidArgument for a coordinate out of range.")
      .def("flat_ids", &flat_ids, "table"_a.noconvert(), "num_slots"_a, "head"_a = 0,
           "Sub-page numbers for a kernel that sees the pool as one array of `sub_page_bytes` units.\n\n"
           "`table`: int32 slots `[..., pages]`, -1 where there is none. Returns int32 `[..., pages * sub_pages]` for "
           "local head `head`, -1 for -1. Raises InvalidArgument, saying why, unless the sub-page size divides the "
           "base offset and every stride, for a slot outside the pool, and for a number past 32 bits.")
      .def(nb::self == nb::self, nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const View& v) {
        return "View(layer=" + std::to_string(v.layer.value()) + ", role=" + std::string(name(v.role)) +
               ", dtype=" + std::string(name(v.dtype)) + ", heads=" + std::to_string(v.heads) +
               ", dim=" + std::to_string(v.dim) + ", tokens_per_page=" + std::to_string(v.tokens_per_page) +
               ", sub_pages=" + std::to_string(v.sub_pages) + ")";
      });
}

void bind_cache_layout(nb::module_& m) {
  nb::class_<Section>(m, "Section",
                      "The part of a slot whose tiles have the same global head count: head after head, each with all "
                      "its tiles. Replicated sections come last.")
      .def_ro("global_heads", &Section::global_heads, "Heads over all ranks.")
      .def_ro("replicated", &Section::replicated, "Whether every rank holds all of them.")
      .def_prop_ro(
          "heads", [](const Section& s) { return s.heads.count; }, "Heads that this rank holds.")
      .def_prop_ro(
          "first_head", [](const Section& s) { return s.heads.first; }, "Global number of the first of them.")
      .def_prop_ro(
          "replicas", [](const Section& s) { return s.heads.replicas; }, "Ranks that hold the same heads.")
      .def_ro("offset", &Section::offset, "Bytes from the slot's start.")
      .def_ro("head_stride", &Section::head_stride, "Bytes from a head to the next.")
      .def_prop_ro("bytes", &Section::bytes, "Bytes of the section.");

  nb::class_<CacheLayout>(
      m, "CacheLayout",
      "How every tile of a model's cache lies in a slot: sections by global head count, heads outermost in them, each "
      "tile `[tokens, dim]` and contiguous. Built once; views, sizes and bounds are derived from it.")
      .def(nb::init<std::vector<TileSpec>, std::int32_t, Shard, std::int64_t>(), "tiles"_a, "tokens_per_page"_a,
           "shard"_a = Shard{}, "alignment"_a = kMinAlignment,
           "Places `tiles` (any order) in slots of `tokens_per_page` tokens for one rank. Tile starts and the strides "
           "of heads, sections and slots are multiples of `alignment` bytes, a power of two of at least 128. Raises "
           "InvalidArgument, naming the tile, what was given and what is allowed.")
      .def_prop_ro(
          "tiles",
          [](const CacheLayout& l) {
            std::vector<TileSpec> tiles;
            for (const PlacedTile& tile : l.tiles()) {
              tiles.push_back(tile.spec);
            }
            return tiles;
          },
          "The declared tiles, ordered by (layer, role).")
      .def_prop_ro(
          "sections", [](const CacheLayout& l) { return l.sections(); }, "In the order of their offsets.")
      .def_prop_ro("tokens_per_page", &CacheLayout::tokens_per_page, "Tokens of one page.")
      .def_prop_ro(
          "shard", [](const CacheLayout& l) { return l.shard(); }, "The rank that it is for.")
      .def_prop_ro("alignment", &CacheLayout::alignment, "Bytes.")
      .def_prop_ro("slot_bytes", &CacheLayout::slot_bytes, "Bytes from a slot to the next, padding included.")
      .def_prop_ro("bytes_per_token", &CacheLayout::bytes_per_token,
                   "Bytes of one token's entries on this rank, padding not counted.")
      .def(
          "view",
          [](const CacheLayout& l, std::int32_t layer, Role role, std::optional<std::int32_t> tokens_per_page) {
            return l.view(LayerId{layer}, role, tokens_per_page);
          },
          "layer"_a, "role"_a, "tokens_per_page"_a = nb::none(),
          "The view of one tile in pages of `tokens_per_page` tokens (the layout's own where None). Raises "
          "InvalidArgument if there is no such tile or the page size does not divide the layout's.")
      .def("digest", &CacheLayout::digest,
           "32 hex digits over tiles, page size, shard and alignment. Equal digests: every byte of a slot means the "
           "same.")
      .def("content_digest", &CacheLayout::content_digest,
           "32 hex digits over what two peers must have in common to exchange pages: each tile's layer, role, dtype, "
           "global heads, dim and replication.")
      .def("to_dict", &to_dict, nb::sig("def to_dict(self) -> dict[str, object]"),
           "A dict of plain values that `from_dict` takes.")
      .def_static("from_dict", &from_dict, "described"_a,
                  nb::sig("def from_dict(described: dict[str, object]) -> CacheLayout"),
                  "The layout that a dict describes. Unknown keys are ignored; `replicated`, `shard` and `alignment` "
                  "have defaults; the version must be known. Raises InvalidArgument for a missing key or a value of "
                  "the wrong type, and names it.")
      .def("__repr__", [](const CacheLayout& l) {
        return "CacheLayout(" + std::to_string(l.tiles().size()) +
               " tiles, tokens_per_page=" + std::to_string(l.tokens_per_page()) +
               ", slot_bytes=" + std::to_string(l.slot_bytes()) + ")";
      });
}

}  // namespace
}  // namespace tandem::layout

void bind_layout(nb::module_& m) {
  tandem::layout::bind_enums(m);
  tandem::layout::bind_specs(m);
  tandem::layout::bind_view(m);
  tandem::layout::bind_cache_layout(m);
}
