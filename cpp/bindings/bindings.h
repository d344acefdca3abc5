#pragma once

#include <nanobind/nanobind.h>

namespace nb = nanobind;

// One registrar per library; each fills the submodule of its name.
void bind_layout(nb::module_& m);
void bind_kv(nb::module_& m);
void bind_sched(nb::module_& m);
void bind_cpu(nb::module_& m);
