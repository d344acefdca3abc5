#include "bindings.h"

void bind_kv(nb::module_&) {}
