#include "tandem/cpu/kernels/simd_portable.h"
#include "tandem/cpu/kernels/table.h"

namespace tandem::cpu {

extern const KernelTable portable_kernels;
const KernelTable portable_kernels = kernels::make_table<portable::Simd>("portable");

}  // namespace tandem::cpu
