// Where a framework's tensor lies in the memory of the host or of a GPU, read without knowing the framework: through
// the DLPack C exchange table of its type (about 20 ns), else through a Python callable of the adapter. Every function
// needs the GIL.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <vector>

#include "perseus/perseus.h"

namespace perseus::python {

// The strides that a kind of operation allows.
enum class Layout {
  kRowMajor,  // rows are cut or joined: dimension 0 must be the slowest
  kDense,     // elementwise: any order of dimensions without gaps (channels_last)
};

// Gives the stream on which a GPU's work goes now, as DLPack declares it; 0 on success.
using CurrentStream = int (*)(int32_t device_type, int32_t device, void** stream);

constexpr int kHost = -2;  // in place of a GPU's number; -1 = the core finds out

struct TensorView {
  void* data = nullptr;
  const int64_t* shape = nullptr;  // the tensor's own, or `storage`; in memory order when the layout is not row-major
  int ndim = 0;
  std::vector<int> order;  // of the dimensions in memory, the slowest first; empty = by rows
  perseus_dtype dtype = PERSEUS_FLOAT32;
  int device = kHost;
  void* stream = nullptr;                  // of the GPU, that computes the tensor
  CurrentStream current_stream = nullptr;  // where its framework tells
  std::vector<int64_t> storage;            // stays empty in the usual case
};

class TensorReader {
 public:
  // describe(tensor) -> (data pointer, shape, strides in elements, perseus dtype), for a tensor of a GPU followed by
  // the GPU's number and the address of its stream; borrowed by the owner of this reader. It raises for a tensor that
  // cannot be served.
  explicit TensorReader(PyObject* describe = nullptr) : describe_(describe) {}
  ~TensorReader();
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  // False with a Python exception set: ValueError for a dtype, layout or device that cannot be served. `view` is valid
  // while the tensor is alive and keeps its storage.
  bool read(PyObject* tensor, Layout layout, TensorView* view);

 private:
  using FromPyObject = int (*)(void* tensor, void* dl_tensor);
  struct TypeEntry {
    PyTypeObject* type = nullptr;  // strong reference
    FromPyObject from_py_object = nullptr;
    CurrentStream current_stream = nullptr;
  };

  const TypeEntry& exchange_functions(PyTypeObject* type);
  bool read_exchanged(PyObject* tensor, TensorView* view, const int64_t** strides);
  bool read_described(PyObject* tensor, TensorView* view, const int64_t** strides);

  PyObject* describe_;
  std::array<TypeEntry, 4> types_;  // Tensor, Parameter and seldom more
  size_t next_type_ = 0;
};

}  // namespace perseus::python
