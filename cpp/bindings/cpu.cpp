#include "bindings.h"

void bind_cpu(nb::module_&) {}
