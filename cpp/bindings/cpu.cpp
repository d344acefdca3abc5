#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.h"
#include "tandem/cpu/attend.h"
#include "tandem/cpu/experts.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/linear.h"
#include "tandem/cpu/router.h"
#include "tandem/cpu/rows.h"
#include "tandem/cpu/select.h"
#include "tandem/cpu/step_tokens.h"
#include "tandem/cpu/thread_pool.h"
#include "tandem/layout/view.h"
#include "tensor_arg.h"

using namespace nb::literals;
using tandem::bindings::TensorArg;

namespace tandem::cpu {
namespace {

CacheView cache_view(const char* argument, const layout::View& view) {
  if (view.dtype != layout::ElementType::FP32 && view.dtype != layout::ElementType::BF16) {
    throw InvalidArgument(std::string(argument) + " holds " + std::string(layout::name(view.dtype)) +
                          ": the kernels read FP32 and BF16");
  }
  return {.dtype = view.dtype == layout::ElementType::FP32 ? DType::F32 : DType::BF16,
          .heads = view.heads,
          .dim = view.dim,
          .tokens_per_page = view.tokens_per_page,
          .sub_pages = view.sub_pages,
          .base_offset = view.base_offset,
          .slot_stride = view.slot_stride,
          .head_stride = view.head_stride,
          .sub_page_stride = view.sub_page_stride,
          .token_stride = view.token_stride};
}

Pool pool_of(const TensorArg& pool) {
  pool.require("pool", 1);
  return {.data = pool.bytes("pool"), .num_bytes = pool.size(0)};
}

BlockTable block_table_of(const TensorArg& table) {
  table.require("block_table", 2);
  return {.slots = table.ints("block_table"), .seats = table.size(0), .pages = table.size(1)};
}

TokenPlaces places_of(const TensorArg& seat, const char* index_name, const TensorArg& index, std::int64_t tokens) {
  seat.require("seat", 1).require_size("seat", 0, tokens);
  index.require(index_name, 1).require_size(index_name, 0, tokens);
  return {.seat = seat.ints("seat"), .index = index.ints(index_name), .count = tokens};
}

// Runs a kernel without the interpreter's lock.
template <class Body>
void release(const Body& body) {
  const nb::gil_scoped_release unlocked;
  body();
}

// --- linear and rows

void bind_linear(nb::module_& m) {
  nb::class_<PackedLinear>(m, "PackedLinear", "A weight rearranged once for `linear`; keeps a copy, not the tensor.")
      .def(
          "__init__",
          [](PackedLinear* self, const TensorArg& weight) {
            const ConstMatrix matrix = weight.matrix("weight");
            release([&] { new (self) PackedLinear(matrix); });
          },
          "weight"_a, "`weight`: float32 or bfloat16 `[N, K]`. Raises InvalidArgument for anything else.")
      .def_prop_ro("out_features", &PackedLinear::out_features, "N.")
      .def_prop_ro("in_features", &PackedLinear::in_features, "K.")
      .def_prop_ro("num_bytes", &PackedLinear::num_bytes, "Size of the packed copy.");

  m.def(
      "linear",
      [](const PackedLinear& weight, const TensorArg& x, const TensorArg& out) {
        const Matrix from = x.matrix("x"), to = out.matrix("out");
        release([&] { linear(weight, from, to); });
      },
      "weight"_a, "x"_a, "out"_a,
      "out `[T, N]` = x `[T, K]` @ weight^T, both float32 or both bfloat16.\n\n"
      "Each element is one chain of fp32 multiply-adds over ascending k, rounded once: its bits do not depend on T. "
      "Raises InvalidArgument where shapes or dtypes do not fit.");
}

struct RopeTables {
  std::vector<float> cos;
  std::vector<float> sin;
  std::int64_t positions;
  std::int64_t half;
};

struct NormRope {
  std::vector<NormRopePart> parts;
  std::unique_ptr<float[]> weights;  // of all parts, which point into it
  std::shared_ptr<const RopeTables> rope;
  float eps;
  bool one_plus;

  [[nodiscard]] RopeTable table() const {
    if (rope == nullptr) return {};
    return {rope->cos.data(), rope->sin.data(), rope->positions, rope->half};
  }
};

using PartTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::optional<TensorArg>>;

void bind_rows(nb::module_& m) {
  m.def(
      "rms_norm",
      [](const TensorArg& x, const TensorArg& weight, float eps, bool one_plus, const TensorArg& out) {
        const Matrix from = x.matrix("x"), to = out.matrix("out");
        weight.require("weight", 1).require_size("weight", 0, from.cols);
        const float* gain = weight.floats("weight");
        release([&] { rms_norm(from, gain, eps, one_plus, to); });
      },
      "x"_a, "weight"_a, "eps"_a, "one_plus"_a, "out"_a,
      "out = x * rsqrt(mean(x^2) + eps) * (weight + one_plus), per row of x `[T, H]`.\n\n"
      "weight float32 `[H]`; fp32 inside, rounded once. out may be x.");

  m.def(
      "add_rms_norm",
      [](const TensorArg& x, const TensorArg& residual, const TensorArg& weight, float eps, bool one_plus,
         const TensorArg& out) {
        const Matrix from = x.matrix("x"), sum = residual.matrix("residual"), to = out.matrix("out");
        weight.require("weight", 1).require_size("weight", 0, from.cols);
        const float* gain = weight.floats("weight");
        release([&] { add_rms_norm(from, sum, gain, eps, one_plus, to); });
      },
      "x"_a, "residual"_a, "weight"_a, "eps"_a, "one_plus"_a, "out"_a,
      "residual += x (rounded to its dtype), then out = rms_norm(residual).");

  nb::class_<RopeTables>(m, "RopeTable", "Cosines and sines by position, shared by the NormRope of all layers.")
      .def(
          "__init__",
          [](RopeTables* self, const TensorArg& cos, const TensorArg& sin) {
            cos.require("cos", 2);
            sin.require("sin", 2).require_size("sin", 0, cos.size(0));
            sin.require_size("sin", 1, cos.size(1));
            const std::int64_t count = cos.size(0) * cos.size(1);
            const float *c = cos.floats("cos"), *s = sin.floats("sin");
            new (self) RopeTables{{c, c + count}, {s, s + count}, cos.size(0), cos.size(1)};
          },
          "cos"_a, "sin"_a, "float32 `[positions, rotary_dim / 2]` each; copied.");

  nb::class_<NormRope>(m, "NormRope", "What `norm_rope` does to the heads of one fused projection row.")
      .def(
          "__init__",
          [](NormRope* self, const std::vector<PartTuple>& parts, std::shared_ptr<RopeTables> rope, float eps,
             bool one_plus) {
            std::int64_t floats = 0;
            for (const auto& [offset, heads, dim, rotary_dim, weight] : parts) {
              if (!weight) continue;
              weight->require("weight", 1).require_size("weight", 0, dim);
              floats += dim;
            }
            NormRope plan{
                {}, std::make_unique<float[]>(static_cast<std::size_t>(floats)), std::move(rope), eps, one_plus};
            float* next = plan.weights.get();
            for (const auto& [offset, heads, dim, rotary_dim, weight] : parts) {
              plan.parts.push_back({offset, heads, dim, rotary_dim, weight ? next : nullptr});
              if (weight) next = std::copy_n(weight->floats("weight"), dim, next);
            }
            new (self) NormRope(std::move(plan));
          },
          "parts"_a, "rope"_a.none(), "eps"_a, "one_plus"_a,
          "`parts`: (first column, heads, head dim, rotary dim, norm weight float32 `[dim]` or None) each; weights are "
          "copied. rotary dim is 0 (no rotation) or twice the table's columns.");

  m.def(
      "norm_rope",
      [](const NormRope& plan, const TensorArg& rows, const TensorArg& positions) {
        const Matrix matrix = rows.matrix("rows");
        positions.require("positions", 1).require_size("positions", 0, matrix.rows);
        const std::int32_t* at = positions.ints("positions");
        release([&] { norm_rope(matrix, plan.parts, plan.table(), at, plan.eps, plan.one_plus); });
      },
      "plan"_a, "rows"_a, "positions"_a,
      "In place on rows `[T, C]` (float32 or bfloat16): per head RMS norm, then half-split rotation by positions int32 "
      "`[T]`, both in fp32, then one rounding. Rows with a negative position are padding and stay as they are.");

  m.def(
      "swiglu_oai",
      [](const TensorArg& gate_up, float alpha, float limit, const TensorArg& out) {
        const Matrix from = gate_up.matrix("gate_up"), to = out.matrix("out");
        release([&] { swiglu_oai(from, alpha, limit, to); });
      },
      "gate_up"_a, "alpha"_a, "limit"_a, "out"_a,
      "gate_up `[T, 2I]` (gates first) -> out `[T, I]`: g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), "
      "u = clamp(up, -limit, limit).");

  m.def(
      "silu_mul",
      [](const TensorArg& gate_up, const TensorArg& out) {
        const Matrix from = gate_up.matrix("gate_up"), to = out.matrix("out");
        release([&] { silu_mul(from, to); });
      },
      "gate_up"_a, "out"_a, "gate_up `[T, 2I]` (gates first) -> out `[T, I]`: gate * sigmoid(gate) * up.");
}

// --- cache

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

void bind_cache(nb::module_& m) {
  m.def(
      "write_kv",
      [](const TensorArg& pool, const layout::View& view, const TensorArg& src, const TensorArg& seat,
         const TensorArg& index, const TensorArg& block_table) {
        const std::int64_t tokens = src.ndim() > 0 ? src.size(0) : 0;
        const std::vector<CacheSource> sources = {source_of(view, src, tokens)};
        const TokenPlaces places = places_of(seat, "index", index, tokens);
        const Pool bytes = pool_of(pool);
        const BlockTable table = block_table_of(block_table);
        release([&] { write_cache(bytes, sources, places, table); });
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
        release([&] { write_cache(bytes, sources, places, table); });
      },
      "pool"_a, "parts"_a, "seat"_a, "index"_a, "block_table"_a,
      "The same for several (view, src) pairs in one call, all or nothing.");

  m.def(
      "select_blocks",
      [](const TensorArg& index_q, const TensorArg& pool, const layout::View& view, const TensorArg& block_table,
         const TensorArg& seat, const TensorArg& kv_len, std::int64_t topk, std::int64_t num_local,
         const TensorArg& out, std::optional<std::int64_t> block_size, const std::optional<TensorArg>& scores) {
        SelectArgs args;
        index_q.require("index_q", 3).require_size("index_q", 2, view.dim);
        const std::int64_t tokens = index_q.size(0);
        args.queries = index_q.data();
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
        release([&] { select_blocks(args); });
      },
      "index_q"_a, "pool"_a, "view"_a, "block_table"_a, "seat"_a, "kv_len"_a, "topk"_a, "num_local"_a, "out"_a,
      "block_size"_a = nb::none(), "scores"_a = nb::none(),
      "Chooses exactly min(topk, visible) blocks per token and index head into out int32 `[T, Hi, topk]`, ids "
      "ascending, then -1.\n\n"
      "index_q `[T, Hi, D]`; the newest `num_local` blocks always, then by the largest raw dot product with a visible "
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
        q.require("q", 3).require_size("q", 2, k_view.dim);
        const std::int64_t tokens = q.size(0);
        args.queries = q.data();
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
        release([&] { attend(args); });
      },
      "q"_a, "pool"_a, "k_view"_a, "v_view"_a, "block_table"_a, "seat"_a, "kv_len"_a, "blocks"_a.none(), "scale"_a,
      "first_index_attended"_a, "out"_a, "block_size"_a = nb::none(),
      "Softmax attention of q `[T, Hq, D]` over the cache into out `[T, Hq, D]` of q's dtype.\n\n"
      "Token t sees keys [first_index_attended, kv_len[t]) of seat[t]; with blocks int32 `[T, Hk, topk]` (ascending, "
      "then -1) only those of them in the blocks of its group's KV head. A token without a key gives zeros. "
      "`block_size` is the layout's page by default; it divides 128 or is a multiple of it.");
}

// --- a step's metadata

void bind_step_tokens(nb::module_& m) {
  m.def(
      "derive_step",
      [](const TensorArg& length, const TensorArg& seat_tokens, const TensorArg& row_seat, const TensorArg& row_first,
         const TensorArg& row_floor, const TensorArg& row_ceiling, const TensorArg& row_write_from,
         const TensorArg& token_row, const TensorArg& token_end, const TensorArg& token_max_length,
         const TensorArg& token_source, const TensorArg& token_from_seat, const TensorArg& token_plan_id,
         std::int32_t tokens_per_page, const TensorArg& row_length, const TensorArg& token_ids,
         const TensorArg& position, const TensorArg& write_index, const TensorArg& kv_len,
         const TensorArg& num_valid_blocks, const TensorArg& overrun) {
        const std::int64_t num_rows = row_seat.require("row_seat", 1).size(0);
        const std::int64_t num_tokens = token_row.require("token_row", 1).size(0);
        const auto of_rows = [&](const char* name, const TensorArg& arg) {
          arg.require(name, 1).require_size(name, 0, num_rows);
          return arg.ints(name);
        };
        const auto of_tokens = [&](const char* name, const TensorArg& arg) {
          arg.require(name, 1).require_size(name, 0, num_tokens);
          return arg.ints(name);
        };
        length.require("length", 1);
        seat_tokens.require("seat_tokens", 2);
        overrun.require("overrun", 0);
        const Seats seats{length.ints("length"), seat_tokens.ints("seat_tokens"), length.size(0),
                          seat_tokens.size(0) * seat_tokens.size(1)};
        const StepRows rows{.count = num_rows,
                            .seat = row_seat.ints("row_seat"),
                            .first = of_rows("row_first", row_first),
                            .floor = of_rows("row_floor", row_floor),
                            .ceiling = of_rows("row_ceiling", row_ceiling),
                            .write_from = of_rows("row_write_from", row_write_from),
                            .length = of_rows("row_length", row_length)};
        const StepTokens tokens{.count = num_tokens,
                                .row = token_row.ints("token_row"),
                                .end = of_tokens("token_end", token_end),
                                .max_length = of_tokens("token_max_length", token_max_length),
                                .source = of_tokens("token_source", token_source),
                                .from_seat = of_tokens("token_from_seat", token_from_seat),
                                .plan_id = of_tokens("token_plan_id", token_plan_id),
                                .id = of_tokens("token_ids", token_ids),
                                .position = of_tokens("position", position),
                                .write_index = of_tokens("write_index", write_index),
                                .kv_len = of_tokens("kv_len", kv_len),
                                .num_valid_blocks = of_tokens("num_valid_blocks", num_valid_blocks)};
        derive_step(seats, rows, tokens, tokens_per_page, overrun.ints("overrun"));
      },
      "length"_a, "seat_tokens"_a, "row_seat"_a, "row_first"_a, "row_floor"_a, "row_ceiling"_a, "row_write_from"_a,
      "token_row"_a, "token_end"_a, "token_max_length"_a, "token_source"_a, "token_from_seat"_a, "token_plan_id"_a,
      "tokens_per_page"_a, "row_length"_a, "token_ids"_a, "position"_a, "write_index"_a, "kv_len"_a,
      "num_valid_blocks"_a, "overrun"_a,
      "What a step's tokens follow from its plan and the seats: `tandem.msa.StepMetadata.rederive` in one call.\n\n"
      "All int32: `length` `[S]`, `seat_tokens` `[S, 1+K]`, `overrun` `[]`, the others `[R]` or `[T]`; outputs from "
      "`row_length` on. Raises InvalidArgument before anything is written for a seat, row or source out of range.");
}

void bind_advance(nb::module_& m) {
  m.def(
      "advance_seats",
      [](const TensorArg& length, const TensorArg& seat_tokens, const TensorArg& row_seat, const TensorArg& row_length,
         const TensorArg& row_advance, const TensorArg& row_max_length, const TensorArg& sample_row,
         const TensorArg& sample_seat, const TensorArg& sample_drafts, const TensorArg& tokens,
         const std::optional<TensorArg>& num_accepted) {
        const auto of_size = [](const char* name, const TensorArg& arg, std::int64_t count) {
          arg.require(name, 1).require_size(name, 0, count);
          return arg.ints(name);
        };
        length.require("length", 1);
        seat_tokens.require("seat_tokens", 2).require_size("seat_tokens", 0, length.size(0));
        const std::int64_t num_rows = row_seat.require("row_seat", 1).size(0);
        const std::int64_t num_samples = sample_row.require("sample_row", 1).size(0);
        const AdvancedRows rows{.count = num_rows,
                                .seat = row_seat.ints("row_seat"),
                                .length = of_size("row_length", row_length, num_rows),
                                .advance = of_size("row_advance", row_advance, num_rows),
                                .max_length = of_size("row_max_length", row_max_length, num_rows)};
        const SampledRows sampled{
            .count = num_samples,
            .row = sample_row.ints("sample_row"),
            .seat = of_size("sample_seat", sample_seat, num_samples),
            .token = of_size("tokens", tokens, num_samples),
            .num_drafts = of_size("sample_drafts", sample_drafts, num_samples),
            .num_accepted = num_accepted ? of_size("num_accepted", *num_accepted, num_samples) : nullptr};
        advance_seats(rows, sampled, length.size(0), seat_tokens.size(1), length.ints("length"),
                      seat_tokens.ints("seat_tokens"));
      },
      "length"_a, "seat_tokens"_a, "row_seat"_a, "row_length"_a, "row_advance"_a, "row_max_length"_a, "sample_row"_a,
      "sample_seat"_a, "sample_drafts"_a, "tokens"_a, "num_accepted"_a = nb::none(),
      "What verifying a step does to the seats: `tandem.msa.advance` in one call.\n\n"
      "All int32: `length` `[S]` and `seat_tokens` `[S, 1+K]` change in place; the others are `[R]`, from `sample_row` "
      "on `[N]`. Raises InvalidArgument before anything is written for a seat or row out of range.");
}

// --- router and experts

using TensorPair = std::pair<TensorArg, TensorArg>;

void bind_experts(nb::module_& m) {
  m.def(
      "route",
      [](const TensorArg& x, const TensorArg& gate, const TensorArg& bias, std::int64_t topk, float scale,
         const TensorArg& ids, const TensorArg& weights) {
        const Matrix rows = x.matrix("x"), experts = gate.matrix("gate");
        bias.require("bias", 1).require_size("bias", 0, experts.rows);
        ids.require("ids", 2).require_size("ids", 0, rows.rows);
        ids.require_size("ids", 1, topk);
        weights.require("weights", 2).require_size("weights", 0, rows.rows);
        weights.require_size("weights", 1, topk);
        const float* offsets = bias.floats("bias");
        std::int32_t* chosen = ids.ints("ids");
        float* shares = weights.floats("weights");
        release([&] { route(rows, experts, offsets, topk, scale, chosen, shares); });
      },
      "x"_a, "gate"_a, "bias"_a, "topk"_a, "scale"_a, "ids"_a, "weights"_a,
      "Experts of x `[T, H]`: p = sigmoid(gate @ x) in fp32; ids int32 `[T, topk]` by p + bias, descending, ties to "
      "the "
      "lower id; weights float32 `[T, topk]` = p / sum of the chosen p * scale. gate float32 `[E, H]`, bias `[E]`.");

  nb::class_<PackedExperts>(m, "PackedExperts", "Gated MLPs rearranged once for `moe`; keeps copies.")
      .def(
          "__init__",
          [](PackedExperts* self, const std::vector<TensorArg>& gate_up, const std::vector<TensorArg>& down,
             const std::optional<TensorPair>& shared) {
            if (gate_up.size() != down.size()) {
              throw InvalidArgument(std::to_string(gate_up.size()) + " gate_up and " + std::to_string(down.size()) +
                                    " down weights: expected as many");
            }
            std::vector<std::pair<ConstMatrix, ConstMatrix>> weights;
            for (std::size_t i = 0; i < gate_up.size(); ++i) {
              weights.emplace_back(gate_up[i].matrix("gate_up"), down[i].matrix("down"));
            }
            std::optional<std::pair<ConstMatrix, ConstMatrix>> always;
            if (shared) always.emplace(shared->first.matrix("shared gate_up"), shared->second.matrix("shared down"));
            release([&] {
              std::vector<PackedMlp> routed;
              for (const auto& [in, out] : weights) routed.emplace_back(in, out);
              std::optional<PackedMlp> common;
              if (always) common.emplace(always->first, always->second);
              new (self) PackedExperts(std::move(routed), std::move(common));
            });
          },
          "gate_up"_a, "down"_a, "shared"_a = nb::none(),
          "`gate_up` `[2I, H]` (gates first) and `down` `[H, I]` per routed expert, float32 or bfloat16; `shared`: one "
          "such "
          "pair that every token takes, of any I.")
      .def_prop_ro("num_routed", &PackedExperts::num_routed, "Routed experts.")
      .def_prop_ro("has_shared", &PackedExperts::has_shared, "Whether there is a shared one.")
      .def_prop_ro("hidden_size", &PackedExperts::hidden_size, "H.");

  const auto activated = [](const PackedExperts& experts, const TensorArg& x, const std::optional<TensorArg>& ids,
                            const std::optional<TensorArg>& weights, const GatedActivation& activation,
                            const TensorArg& out) {
    const Matrix from = x.matrix("x"), to = out.matrix("out");
    std::int64_t topk = 0;
    const std::int32_t* chosen = nullptr;
    const float* shares = nullptr;
    if (ids.has_value() != weights.has_value()) throw InvalidArgument("ids and weights: expected both or neither");
    if (ids) {
      ids->require("ids", 2).require_size("ids", 0, from.rows);
      topk = ids->size(1);
      weights->require("weights", 2).require_size("weights", 0, from.rows);
      weights->require_size("weights", 1, topk);
      chosen = ids->ints("ids");
      shares = weights->floats("weights");
    }
    release([&] { mixture(experts, from, chosen, shares, topk, activation, to); });
  };

  m.def(
      "moe",
      [activated](const PackedExperts& experts, const TensorArg& x, const std::optional<TensorArg>& ids,
                  const std::optional<TensorArg>& weights, float limit, float alpha, const TensorArg& out) {
        activated(experts, x, ids, weights, {GatedActivation::Kind::SwigluOai, alpha, limit}, out);
      },
      "experts"_a, "x"_a, "ids"_a.none(), "weights"_a.none(), "limit"_a, "alpha"_a, "out"_a,
      "out `[T, H]` = sum over slots of weights[t, i] * mlp[ids[t, i]](x[t]), slots ascending, plus the shared MLP.\n\n"
      "ids int32 and weights float32 `[T, topk]`, id -1 an empty slot; both None where there are only shared weights. "
      "SwiGLU-OAI inside; fp32 from x to the single rounding at the end.");
  m.def(
      "moe_silu",
      [activated](const PackedExperts& experts, const TensorArg& x, const std::optional<TensorArg>& ids,
                  const std::optional<TensorArg>& weights, const TensorArg& out) {
        activated(experts, x, ids, weights, {GatedActivation::Kind::Silu, 0.0f, 0.0f}, out);
      },
      "experts"_a, "x"_a, "ids"_a.none(), "weights"_a.none(), "out"_a, "`moe` with gate * sigmoid(gate) * up inside.");
}

void bind_machine(nb::module_& m) {
  m.def("isa", [] { return std::string(kernels().name); }, "Name of the instruction set in use.");
  m.def("supported_isas", &supported_isas, "Names that `set_isa` takes on this machine, slowest first.");
  m.def(
      "set_isa", [](const std::string& name) { set_isa(name); }, "name"_a,
      "Chooses an instruction set, for tests. Raises InvalidArgument for one that the machine lacks.");
  m.def("num_threads", [] { return ThreadPool::shared().num_threads(); }, "Threads that share a kernel's work.");
  m.def(
      "set_num_threads", [](int count) { release([&] { ThreadPool::shared().set_num_threads(count); }); }, "count"_a,
      "1 to 256. Results do not depend on it.");
}

}  // namespace
}  // namespace tandem::cpu

void bind_cpu(nb::module_& m) {
  tandem::cpu::bind_machine(m);
  tandem::cpu::bind_linear(m);
  tandem::cpu::bind_rows(m);
  tandem::cpu::bind_cache(m);
  tandem::cpu::bind_step_tokens(m);
  tandem::cpu::bind_advance(m);
  tandem::cpu::bind_experts(m);
}
