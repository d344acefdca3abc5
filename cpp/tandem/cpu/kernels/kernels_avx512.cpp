#include "tandem/cpu/kernels/simd_avx512.h"
#include "tandem/cpu/kernels/table.h"

namespace tandem::cpu {

extern const KernelTable avx512_kernels;
const KernelTable avx512_kernels = kernels::make_table<avx512::Simd>("avx512");

}  // namespace tandem::cpu
