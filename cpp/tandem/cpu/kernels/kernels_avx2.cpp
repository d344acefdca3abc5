#include "tandem/cpu/kernels/simd_avx2.h"
#include "tandem/cpu/kernels/table.h"

namespace tandem::cpu {

extern const KernelTable avx2_kernels;
const KernelTable avx2_kernels = kernels::make_table<avx2::Simd>("avx2");

}  // namespace tandem::cpu
