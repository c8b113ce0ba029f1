// The core's measured speeds and its cost model, for Python. Needs the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace perseus::python {

// Registers class Speeds.
void bind_speeds(pybind11::module_& module);

}  // namespace perseus::python
