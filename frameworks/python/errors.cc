// One table from codes to the classes of perseus.errors, looked up when an error happens.
#include "errors.h"

namespace perseus::python {
namespace {

const char* class_name(perseus_code code) {
  switch (code) {
    case PERSEUS_INVALID_ARGUMENT:
      return "InvalidArgumentError";
    case PERSEUS_MISMATCH:
      return "MismatchError";
    case PERSEUS_IO:
      return "TransportError";
    case PERSEUS_TIMEOUT:
      return "DeadlineError";
    case PERSEUS_ABORTED:
      return "AbortedError";
    case PERSEUS_NAN:
      return "NanGradientError";
    default:
      return "HorovodInternalError";
  }
}

}  // namespace

PyObject* to_str(const char* message) {
  return PyUnicode_DecodeUTF8(message, static_cast<Py_ssize_t>(std::char_traits<char>::length(message)), "replace");
}

PyObject* make_exception(perseus_code code, const char* message) {
  PyObject* module = PyImport_ImportModule("perseus.errors");
  if (module == nullptr) return nullptr;
  PyObject* text = to_str(message);
  PyObject* type = text == nullptr ? nullptr : PyObject_GetAttrString(module, class_name(code));
  PyObject* exception = type == nullptr ? nullptr : PyObject_CallOneArg(type, text);
  Py_XDECREF(type);
  Py_XDECREF(text);
  Py_DECREF(module);
  return exception;
}

PyObject* raise(perseus_code code) { return raise(code, perseus_error_message()); }

PyObject* raise(perseus_code code, const std::string& message) {
  if (PyObject* exception = make_exception(code, message.c_str())) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception)), exception);
    Py_DECREF(exception);
  }
  return nullptr;
}

}  // namespace perseus::python
