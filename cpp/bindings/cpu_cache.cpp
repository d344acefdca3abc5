#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>
#include <vector>

#include "cpu_args.h"
#include "tandem/base/check.h"
#include "tandem/cpu/attend.h"
#include "tandem/cpu/buffer.h"
#include "tandem/cpu/select.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tandem::cpu {

namespace {

// Elements from a token to the next of `[T, heads, dim]`, whose rows may be part of wider ones.
std::int64_t token_stride(const TensorArg& rows) {
  return rows.size(0) > 1 ? rows.stride(0) : rows.size(1) * rows.size(2);
}

CacheSource source_of(const layout::View& view, const TensorArg& rows, std::int64_t tokens) {
  const CacheView cache = cache_view("view", view);
  const bool split = rows.ndim() == 3;
  rows.require("src", split ? 3 : 2, split ? 2 : 1).require_size("src", 0, tokens);
  if (split) {
    rows.require_size("src", 1, cache.heads);
    rows.require_size("src", 2, cache.dim);
  } else {
    rows.require_size("src", 1, cache.heads * cache.dim);
  }
  return {.view = cache,
          .data = rows.data(),
          .dtype = rows.float_dtype("src"),
          .token_stride = tokens > 1 ? rows.stride(0) : cache.heads * cache.dim};
}

}  // namespace

void bind_cache(nb::module_& m) {
  m.def(
      "prefer_huge_pages",
      [](const TensorArg& pool) {
        const Pool bytes = pool_of(pool);
        prefer_huge_pages(bytes.data, bytes.num_bytes);
      },
      "pool"_a,
      "Asks the system to back a pool uint8 `[bytes]` with huge pages from its next first use on: an advice.");

  m.def(
      "write_kv",
      [](const TensorArg& pool, const layout::View& view, const TensorArg& src, const TensorArg& seat,
         const TensorArg& index, const TensorArg& block_table) {
        const std::int64_t tokens = src.ndim() > 0 ? src.size(0) : 0;
        const std::vector<CacheSource> sources = {source_of(view, src, tokens)};
        const TokenPlaces places = places_of(seat, "index", index, tokens);
        const Pool bytes = pool_of(pool);
        const BlockTable table = block_table_of(block_table);
        run_kernel(work_of(sources, places), [=] { write_cache(bytes, sources, places, table); });
      },
      "pool"_a, "view"_a, "src"_a, "seat"_a, "index"_a, "block_table"_a,
      "Writes src `[T, heads, dim]` or `[T, heads * dim]` (rows may be strided) at token index[t] of seat[t].\n\n"
      "index -1 writes nothing. Raises InvalidArgument before any byte changes if a seat, index or slot is out of "
      "range.");
  m.def(
      "write_kv",
      [](const TensorArg& pool, const std::vector<std::pair<const layout::View*, TensorArg>>& parts,
         const TensorArg& seat, const TensorArg& index, const TensorArg& block_table) {
        const std::int64_t tokens = seat.ndim() > 0 ? seat.size(0) : 0;
        std::vector<CacheSource> sources;
        for (const auto& [view, src] : parts) sources.push_back(source_of(*view, src, tokens));
        const TokenPlaces places = places_of(seat, "index", index, tokens);
        const Pool bytes = pool_of(pool);
        const BlockTable table = block_table_of(block_table);
        run_kernel(work_of(sources, places), [=] { write_cache(bytes, sources, places, table); });
      },
      "pool"_a, "parts"_a, "seat"_a, "index"_a, "block_table"_a,
      "The same for several (view, src) pairs in one call, all or nothing.");

  m.def(
      "select_blocks",
      [](const TensorArg& index_q, const TensorArg& pool, const layout::View& view, const TensorArg& block_table,
         const TensorArg& seat, const TensorArg& kv_len, std::int64_t topk, std::int64_t num_local,
         const TensorArg& out, std::optional<std::int64_t> block_size, const std::optional<TensorArg>& scores) {
        SelectArgs args;
        index_q.require("index_q", 3, 2).require_size("index_q", 2, view.dim);
        const std::int64_t tokens = index_q.size(0);
        args.queries = index_q.data();
        args.query_stride = token_stride(index_q);
        args.dtype = index_q.float_dtype("index_q");
        args.heads = index_q.size(1);
        args.pool = pool_of(pool);
        args.keys = cache_view("view", view);
        args.table = block_table_of(block_table);
        args.places = places_of(seat, "kv_len", kv_len, tokens);
        args.block_size = block_size.value_or(args.keys.tokens_per_slot());
        args.topk = topk;
        args.num_local = num_local;
        out.require("out", 3).require_size("out", 0, tokens);
        out.require_size("out", 1, args.heads);
        out.require_size("out", 2, topk);
        args.out = out.ints("out");
        if (scores) {
          scores->require("scores", 3).require_size("scores", 0, tokens);
          scores->require_size("scores", 1, args.heads);
          args.scores = scores->floats("scores");
          args.max_blocks = scores->size(2);
        }
        run_kernel(work_of(args), [=] { select_blocks(args); });
      },
      "index_q"_a, "pool"_a, "view"_a, "block_table"_a, "seat"_a, "kv_len"_a, "topk"_a, "num_local"_a, "out"_a,
      "block_size"_a = nb::none(), "scores"_a = nb::none(),
      "Chooses exactly min(topk, visible) blocks per token and index head into out int32 `[T, Hi, topk]`, ids "
      "ascending, then -1.\n\n"
      "index_q `[T, Hi, D]` (rows may be strided); the newest `num_local` blocks always, then by the largest raw dot "
      "product with a visible "
      "key, ties to the lower id. kv_len[t] keys are visible to token t, 0 for padding. `block_size` is the layout's "
      "page by default. `scores` float32 `[T, Hi, B]`, for tests, receives every visible block's score and -inf "
      "elsewhere.");

  m.def(
      "attend",
      [](const TensorArg& q, const TensorArg& pool, const layout::View& k_view, const layout::View& v_view,
         const TensorArg& block_table, const TensorArg& seat, const TensorArg& kv_len,
         const std::optional<TensorArg>& blocks, float scale, std::int64_t first_index_attended, const TensorArg& out,
         std::optional<std::int64_t> block_size) {
        AttendArgs args;
        q.require("q", 3, 2).require_size("q", 2, k_view.dim);
        const std::int64_t tokens = q.size(0);
        args.queries = q.data();
        args.query_stride = token_stride(q);
        args.dtype = q.float_dtype("q");
        args.heads = q.size(1);
        args.pool = pool_of(pool);
        args.keys = cache_view("k_view", k_view);
        args.values = cache_view("v_view", v_view);
        args.table = block_table_of(block_table);
        args.places = places_of(seat, "kv_len", kv_len, tokens);
        if (blocks) {
          blocks->require("blocks", 3).require_size("blocks", 0, tokens);
          blocks->require_size("blocks", 1, args.keys.heads);
          args.blocks = blocks->ints("blocks");
          args.topk = blocks->size(2);
          args.block_size = block_size.value_or(args.keys.tokens_per_slot());
        }
        args.scale = scale;
        args.first_index = first_index_attended;
        out.require("out", 3).require_size("out", 0, tokens);
        out.require_size("out", 1, args.heads);
        out.require_size("out", 2, args.keys.dim);
        if (out.float_dtype("out") != args.dtype) {
          throw InvalidArgument("out is " + out.describe() + ": expected q's " + name_of(args.dtype));
        }
        args.out = out.data();
        run_kernel(work_of(args), [=] { attend(args); });
      },
      "q"_a, "pool"_a, "k_view"_a, "v_view"_a, "block_table"_a, "seat"_a, "kv_len"_a, "blocks"_a.none(), "scale"_a,
      "first_index_attended"_a, "out"_a, "block_size"_a = nb::none(),
      "Softmax attention of q `[T, Hq, D]` (rows may be strided) over the cache into out `[T, Hq, D]` of q's dtype.\n\n"
      "Token t sees keys [first_index_attended, kv_len[t]) of seat[t]; with blocks int32 `[T, Hk, topk]` (ascending, "
      "then -1) only those of them in the blocks of its group's KV head. A token without a key gives zeros. "
      "`block_size` is the layout's page by default; it divides 128 or is a multiple of it.");
}

}  // namespace tandem::cpu
