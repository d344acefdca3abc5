#include "bindings.h"
#include "tandem/base/check.h"

NB_MODULE(_core, m) {
  m.doc() = "Tandem's C++ runtime: one submodule per library.";
  nb::exception<tandem::InvalidArgument>(m, "InvalidArgument", PyExc_ValueError);

  nb::module_ layout = m.def_submodule("layout", "Tiles, shards, slots and views.");
  nb::module_ kv = m.def_submodule("kv", "Page pool, prefix tree and sequence pages.");
  nb::module_ sched = m.def_submodule("sched", "Requests, admission, step plans and step results.");
  nb::module_ cpu = m.def_submodule("cpu", "Kernels of the embedded CPU backend.");
  bind_layout(layout);
  bind_kv(kv);
  bind_sched(sched);
  bind_cpu(cpu);
}
