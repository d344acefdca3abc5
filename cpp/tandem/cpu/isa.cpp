#include "tandem/cpu/isa.h"

#include <atomic>

#include "tandem/base/check.h"

namespace tandem::cpu {

extern const KernelTable portable_kernels;
#ifdef TANDEM_CPU_X86
extern const KernelTable avx2_kernels;
extern const KernelTable avx512_kernels;
#endif

namespace {

std::vector<const KernelTable*> supported_tables() {
  std::vector<const KernelTable*> tables = {&portable_kernels};
#ifdef TANDEM_CPU_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) tables.push_back(&avx2_kernels);
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    tables.push_back(&avx512_kernels);
  }
#endif
  return tables;
}

std::atomic<const KernelTable*>& current() {
  static std::atomic<const KernelTable*> table = supported_tables().back();
  return table;
}

}  // namespace

const KernelTable& kernels() { return *current().load(std::memory_order_acquire); }

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const KernelTable* table : supported_tables()) names.emplace_back(table->name);
  return names;
}

void set_isa(std::string_view name) {
  std::string allowed;
  for (const KernelTable* table : supported_tables()) {
    if (name == table->name) {
      current().store(table, std::memory_order_release);
      return;
    }
    allowed += allowed.empty() ? table->name : std::string(", ") + table->name;
  }
  throw InvalidArgument("isa '" + std::string(name) + "': this machine and build have " + allowed);
}

}  // namespace tandem::cpu
