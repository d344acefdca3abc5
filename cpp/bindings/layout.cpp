#include "bindings.h"

void bind_layout(nb::module_&) {}
