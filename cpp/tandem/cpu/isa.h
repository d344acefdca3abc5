#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tandem/cpu/kernel_table.h"

namespace tandem::cpu {

// Kernels of the best instruction set that the machine has, unless `set_isa` chose another.
[[nodiscard]] const KernelTable& kernels();

// Names of the instruction sets that this build has and this machine can run, slowest first.
[[nodiscard]] std::vector<std::string> supported_isas();

// Chooses by name for the whole process, for tests and comparisons; not to be called while kernels run.
// InvalidArgument if the name is unknown or the machine lacks it.
void set_isa(std::string_view name);

}  // namespace tandem::cpu
