#pragma once

#include "tandem/cpu/kernels/attention_kernels.h"
#include "tandem/cpu/kernels/linear_kernels.h"
#include "tandem/cpu/kernels/row_kernels.h"

namespace tandem::cpu::kernels {

template <class S>
constexpr KernelTable make_table(const char* name) {
  return {
      .name = name,
      .max_rows = S::max_rows,
      .max_panels = max_panels<S>,
      .linear_tile = linear_tile<S>,
      .interleave_rows = interleave_rows<S>,
      .store_row = store_row<S>,
      .add_row = add_row<S>,
      .rms_norm_row = rms_norm_row<S>,
      .norm_rope_head = norm_rope_head<S>,
      .swiglu_oai_row = swiglu_oai_row<S>,
      .silu_mul_row = silu_mul_row<S>,
      .add_scaled = add_scaled<S>,
      .query_floats = query_floats<S>,
      .prepare_query = prepare_query<S>,
      .dot = dot<S>,
      .dot_max = dot_max<S>,
      .softmax_step = softmax_step<S>,
      .scale_row = scale_row<S>,
      .accumulate = accumulate<S>,
      .finish_row = finish_row<S>,
      .find_above = find_above<S>,
  };
}

}  // namespace tandem::cpu::kernels
