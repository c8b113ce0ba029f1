// The hot path: submitting tensors and waiting for them. Written with the raw C API of Python, because a call through
// pybind11's dispatcher costs as much as the whole submission. Needs the GIL, which waiting releases.
#pragma once

#include <Python.h>

namespace perseus::python {

// Adds class Operations and OwnedBuffer to the module; false with an exception set on failure.
bool bind_operations(PyObject* module);

}  // namespace perseus::python
