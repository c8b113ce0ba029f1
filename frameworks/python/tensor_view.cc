// The DLPack declarations below follow the published specification (dlpack.h 1.3); only what is read is named.
#include "tensor_view.h"

#include <algorithm>
#include <numeric>

namespace perseus::python {
namespace {

struct DlTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t dtype_code;
  uint8_t dtype_bits;
  uint16_t dtype_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; may be NULL for row-major data of producers before 1.2
  uint64_t byte_offset;
};

struct DlExchangeTable {
  uint32_t major;
  uint32_t minor;
  DlExchangeTable* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*tensor_from_py_object)(void* py_object, void* out);
  CurrentStream current_work_stream;
};

constexpr int kDlCpu = 1;
constexpr int kDlCuda = 2;
constexpr int kDlCudaHost = 3;  // pinned host memory

bool to_dtype(const DlTensor& tensor, perseus_dtype* dtype) {
  if (tensor.dtype_lanes != 1) return false;
  constexpr struct {
    uint8_t code, bits;
    perseus_dtype dtype;
  } kRows[] = {{2, 32, PERSEUS_FLOAT32}, {2, 16, PERSEUS_FLOAT16}, {4, 16, PERSEUS_BFLOAT16}, {2, 64, PERSEUS_FLOAT64},
               {0, 64, PERSEUS_INT64},   {0, 32, PERSEUS_INT32},   {0, 16, PERSEUS_INT16},    {0, 8, PERSEUS_INT8},
               {1, 8, PERSEUS_UINT8},    {6, 8, PERSEUS_BOOL}};
  for (const auto& row : kRows)
    if (row.code == tensor.dtype_code && row.bits == tensor.dtype_bits) {
      *dtype = row.dtype;
      return true;
    }
  return false;
}

bool row_major(const TensorView& view, const int64_t* strides) {
  int64_t expected = 1;
  bool matches = true;
  for (int i = view.ndim - 1; i >= 0; --i) {
    const int64_t extent = view.shape[i];
    if (extent == 0) return true;
    if (extent != 1 && strides[i] != expected) matches = false;
    expected *= extent;
  }
  return matches;
}

// Sorts the dimensions by stride; false when the elements are not densely packed. Shape and order go into the request,
// so that ranks whose layouts differ get a mismatch instead of shuffled numbers. The stride of a dimension of one
// element means nothing and may differ between ranks: such dimensions come last.
bool to_memory_order(TensorView* view, const int64_t* strides) {
  std::vector<int> order(view->ndim);
  std::iota(order.begin(), order.end(), 0);
  const auto ones = std::stable_partition(order.begin(), order.end(), [&](int i) { return view->shape[i] != 1; });
  std::stable_sort(order.begin(), ones, [&](int a, int b) { return strides[a] > strides[b]; });
  std::vector<int64_t> shape;
  for (int i : order) shape.push_back(view->shape[i]);
  int64_t expected = 1;
  for (int i = view->ndim - 1; i >= 0; --i) {
    if (shape[i] != 1 && strides[order[i]] != expected) return false;
    expected *= shape[i];
  }
  view->storage = std::move(shape);
  view->shape = view->storage.data();
  view->order = std::move(order);
  return true;
}

bool read_sequence(PyObject* sequence, std::vector<int64_t>* values) {
  PyObject* items = PySequence_Fast(sequence, "[python] a shape must be a sequence of integers");
  if (items == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items); ++i)
    values->push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items, i)));
  Py_DECREF(items);
  return !PyErr_Occurred();
}

}  // namespace

TensorReader::~TensorReader() {
  for (TypeEntry& entry : types_) Py_XDECREF(entry.type);
}

const TensorReader::TypeEntry& TensorReader::exchange_functions(PyTypeObject* type) {
  for (const TypeEntry& entry : types_)
    if (entry.type == type) return entry;
  TypeEntry found;
  if (PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__")) {
    auto* table = static_cast<DlExchangeTable*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    while (table != nullptr && table->major != 1) table = table->previous;
    if (table != nullptr) found = {type, table->tensor_from_py_object, table->current_work_stream};
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  Py_INCREF(type);
  TypeEntry& entry = types_[next_type_++ % types_.size()];
  Py_XDECREF(entry.type);
  entry = found;
  entry.type = type;
  return entry;
}

bool TensorReader::read_described(PyObject* tensor, TensorView* view, const int64_t** strides) {
  if (describe_ == nullptr || describe_ == Py_None) {
    PyErr_Format(PyExc_ValueError, "[python] %s is not a dense tensor of a supported type in host memory",
                 Py_TYPE(tensor)->tp_name);
    return false;
  }
  PyObject* description = PyObject_CallOneArg(describe_, tensor);
  if (description == nullptr) return false;
  unsigned long long data = 0, stream = 0;
  PyObject* shape = nullptr;
  PyObject* stride_values = nullptr;
  int dtype = 0;
  bool ok =
      PyArg_ParseTuple(description, "KOOi|iK", &data, &shape, &stride_values, &dtype, &view->device, &stream) != 0 &&
      read_sequence(shape, &view->storage);
  if (ok) {
    view->stream = reinterpret_cast<void*>(static_cast<uintptr_t>(stream));
    view->data = reinterpret_cast<void*>(static_cast<uintptr_t>(data));
    view->dtype = static_cast<perseus_dtype>(dtype);
    view->ndim = static_cast<int>(view->storage.size());
    // Shape and strides share one allocation.
    ok = read_sequence(stride_values, &view->storage) && static_cast<int>(view->storage.size()) == 2 * view->ndim;
    if (!ok && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "[python] shape and strides differ in length");
    view->shape = view->storage.data();
    *strides = view->shape + view->ndim;
  }
  Py_DECREF(description);
  return ok;
}

// False if the table does not apply; then the description decides, or raises the reason.
bool TensorReader::read_exchanged(PyObject* tensor, TensorView* view, const int64_t** strides) {
  const TypeEntry& functions = exchange_functions(Py_TYPE(tensor));
  if (functions.from_py_object == nullptr) return false;
  DlTensor described;
  if (functions.from_py_object(tensor, &described) != 0) {
    PyErr_Clear();
    return false;
  }
  const bool on_gpu = described.device_type == kDlCuda && functions.current_stream != nullptr;
  if (!on_gpu && described.device_type != kDlCpu && described.device_type != kDlCudaHost) return false;
  if (!to_dtype(described, &view->dtype)) return false;
  if (on_gpu) {
    if (functions.current_stream(kDlCuda, described.device_id, &view->stream) != 0) {
      PyErr_Clear();
      return false;
    }
    view->device = described.device_id;
    view->current_stream = functions.current_stream;
  }
  view->data = static_cast<char*>(described.data) + described.byte_offset;
  view->shape = described.shape;
  view->ndim = described.ndim;
  *strides = described.strides;
  return true;
}

bool TensorReader::read(PyObject* tensor, Layout layout, TensorView* view) {
  const int64_t* strides = nullptr;
  if (!read_exchanged(tensor, view, &strides) && !read_described(tensor, view, &strides)) return false;
  if (strides == nullptr || row_major(*view, strides)) return true;
  if (layout == Layout::kDense && to_memory_order(view, strides)) return true;
  PyErr_SetString(PyExc_ValueError, "Tensor is required to be contiguous.");
  return false;
}

}  // namespace perseus::python
