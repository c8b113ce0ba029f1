// A Python object that owns memory of the core (results of allgather and alltoall) and exports it through the buffer
// protocol, so that frameworks wrap it without a copy. Needs the GIL.
#pragma once

#include <Python.h>

#include <cstddef>

namespace perseus::python {

// Readies the type and returns a new reference to it; NULL with an exception set on failure.
PyObject* make_owned_buffer_type();
// Takes over `data` (freed by perseus_buffer_free, also when this fails). Returns a new reference.
PyObject* make_owned_buffer(PyTypeObject* type, void* data, size_t size);

}  // namespace perseus::python
