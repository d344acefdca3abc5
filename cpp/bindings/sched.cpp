#include "bindings.h"

void bind_sched(nb::module_&) {}
