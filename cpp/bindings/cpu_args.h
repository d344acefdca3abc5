#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

#include "tandem/cpu/cache_view.h"
#include "tandem/cpu/cache_write.h"
#include "tandem/cpu/thread_pool.h"
#include "tandem/layout/view.h"
#include "tape.h"
#include "tensor_arg.h"

// What the registrars of the CPU kernels share.
namespace tandem::cpu {

void bind_linears(nanobind::module_& m);
void bind_cache(nanobind::module_& m);
void bind_steps(nanobind::module_& m);
void bind_tape(nanobind::module_& m);

using bindings::held;
using bindings::TensorArg;

inline CacheView cache_view(const char* argument, const layout::View& view) {
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

inline Pool pool_of(const TensorArg& pool) {
  pool.require("pool", 1);
  return {.data = pool.bytes("pool"), .num_bytes = pool.size(0)};
}

inline BlockTable block_table_of(const TensorArg& table) {
  table.require("block_table", 2);
  return {.slots = table.ints("block_table"), .seats = table.size(0), .pages = table.size(1)};
}

inline TokenPlaces places_of(const TensorArg& seat, const char* index_name, const TensorArg& index,
                             std::int64_t tokens) {
  seat.require("seat", 1).require_size("seat", 0, tokens);
  index.require(index_name, 1).require_size(index_name, 0, tokens);
  return {.seat = seat.ints("seat"), .index = index.ints(index_name), .count = tokens};
}

// Runs a kernel, without the interpreter's lock if its `work` (multiply-adds) is enough to share among threads. A short
// call keeps the lock: beside a busy Python thread, taking it back can cost milliseconds. A tape that records takes a
// copy of `body`: it captures by value, or references to what outlives the tape or is `held`.
template <class Body>
void run_kernel(std::int64_t work, const Body& body) {
  if (bindings::Tape* tape = bindings::Tape::recording()) tape->add(work, body);
  if (work < ThreadPool::kWorthSharing) {
    body();
    return;
  }
  const nanobind::gil_scoped_release unlocked;
  body();
}

}  // namespace tandem::cpu
