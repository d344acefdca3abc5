#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "bindings.h"
#include "cpu_args.h"
#include "tandem/cpu/isa.h"
#include "tandem/cpu/thread_pool.h"

using namespace nb::literals;

namespace tandem::cpu {
namespace {

void bind_machine(nb::module_& m) {
  m.def("isa", [] { return std::string(kernels().name); }, "Name of the instruction set in use.");
  m.def("supported_isas", &supported_isas, "Names that `set_isa` takes on this machine, slowest first.");
  m.def(
      "set_isa", [](const std::string& name) { set_isa(name); }, "name"_a,
      "Chooses an instruction set, for tests. Raises InvalidArgument for one that the machine lacks.");
  m.def("num_threads", [] { return ThreadPool::shared().num_threads(); }, "Threads that share a kernel's work.");
  m.def(
      "set_num_threads",
      [](int count) {
        const nb::gil_scoped_release unlocked;
        ThreadPool::shared().set_num_threads(count);
      },
      "count"_a, "1 to 256. Results do not depend on it.");
}

}  // namespace
}  // namespace tandem::cpu

void bind_cpu(nb::module_& m) {
  tandem::cpu::bind_machine(m);
  tandem::cpu::bind_linears(m);
  tandem::cpu::bind_cache(m);
  tandem::cpu::bind_steps(m);
  tandem::cpu::bind_tape(m);
}
