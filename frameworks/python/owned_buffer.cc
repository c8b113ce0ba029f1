// The type is made from a spec (heap type), writable, one-dimensional, of bytes.
#include "owned_buffer.h"

#include "perseus/perseus.h"

namespace perseus::python {
namespace {

struct OwnedBuffer {
  PyObject_HEAD void* data;
  size_t size;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  auto* buffer = reinterpret_cast<OwnedBuffer*>(self);
  return PyBuffer_FillInfo(view, self, buffer->data, static_cast<Py_ssize_t>(buffer->size), 0, flags);
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  perseus_buffer_free(reinterpret_cast<OwnedBuffer*>(self)->data);
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace

PyObject* make_owned_buffer_type() {
  static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                                {Py_tp_doc, const_cast<char*>("Memory of the core; freed with the last reference.")},
                                {0, nullptr}};
  static PyType_Spec spec = {"perseus._core.OwnedBuffer", sizeof(OwnedBuffer), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  return PyType_FromSpec(&spec);
}

PyObject* make_owned_buffer(PyTypeObject* type, void* data, size_t size) {
  auto* buffer = PyObject_New(OwnedBuffer, type);
  if (buffer == nullptr) {
    perseus_buffer_free(data);
    return nullptr;
  }
  buffer->data = data;
  buffer->size = size;
  return reinterpret_cast<PyObject*>(buffer);
}

}  // namespace perseus::python
