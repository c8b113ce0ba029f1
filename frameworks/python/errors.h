// Turns codes of the C ABI into Python exceptions of perseus.errors. Every function needs the GIL.
#pragma once

#include <Python.h>

#include <string>

#include "perseus/perseus.h"

namespace perseus::python {

// A new reference to the message as a str. It may quote bytes of the environment, so what is no UTF-8 is replaced.
PyObject* to_str(const char* message);
// A new reference to the exception instance for `code`; NULL with an exception set when that fails.
PyObject* make_exception(perseus_code code, const char* message);
// Sets the exception for `code` with the calling thread's last message of the core. Returns NULL, for `return
// raise(…)`.
PyObject* raise(perseus_code code);
PyObject* raise(perseus_code code, const std::string& message);

}  // namespace perseus::python
