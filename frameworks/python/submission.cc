// Names are built on the stack and shapes point into the tensors: a plain submission allocates nothing.
#include "submission.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "errors.h"

namespace perseus::python {
namespace {

// Prefix of the core's names by kind: the same tensor may be broadcast and reduced at once under one name.
constexpr const char* kPlainPrefix[] = {"allreduce.", "allgather.", "broadcast.", "alltoall.", "reducescatter.", "",
                                        "group.",     "group.",     "",           "send.",     "receive."};
constexpr const char* kGroupedPrefix[] = {"grouped_allreduce.",
                                          "grouped_allgather.",
                                          "grouped_broadcast.",
                                          "grouped_alltoall.",
                                          "grouped_reducescatter.",
                                          "",
                                          "",
                                          "",
                                          "",
                                          "grouped_send.",
                                          "grouped_receive."};
constexpr int kKinds = 11;
constexpr int kReductions = 6;
constexpr const char* kExpectedOp = "op: expected hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max or hvd.Product";
constexpr const char* kExpectedRoot = "root_rank: expected the number of a rank";

Layout layout_for(perseus_kind kind) {
  return kind == PERSEUS_ALLREDUCE || kind == PERSEUS_BROADCAST ? Layout::kDense : Layout::kRowMajor;
}

class RequestName {
 public:
  // False with an exception set.
  bool build(const char* prefix, PyObject* name, int64_t unnamed, perseus_request* request) {
    const size_t prefix_size = std::strlen(prefix);
    std::memcpy(buffer_.data(), prefix, prefix_size + 1);
    request->name = buffer_.data();
    if (name == Py_None) {
      constexpr char kUnnamed[] = "noname.";
      char* at = buffer_.data() + prefix_size;
      std::memcpy(at, kUnnamed, sizeof kUnnamed);
      *std::to_chars(at + sizeof kUnnamed - 1, buffer_.data() + buffer_.size() - 1, unnamed).ptr = '\0';
      request->transient = 1;
      return true;
    }
    if (!PyUnicode_Check(name)) {
      PyErr_Format(PyExc_TypeError, "[python] name=%R: expected a str", name);
      return false;
    }
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(name, &size);
    if (text == nullptr) return false;
    if (std::memchr(text, 0, static_cast<size_t>(size)) != nullptr) {
      PyErr_SetString(PyExc_ValueError, "[python] a tensor's name must not contain a NUL character");
      return false;
    }
    if (prefix_size + static_cast<size_t>(size) < buffer_.size()) {
      std::memcpy(buffer_.data() + prefix_size, text, static_cast<size_t>(size) + 1);
    } else {
      long_name_ = prefix;
      long_name_.append(text, static_cast<size_t>(size));
      request->name = long_name_.c_str();
    }
    return true;
  }

 private:
  std::array<char, 256> buffer_;
  std::string long_name_;
};

// Reads an integer argument; `what` names it in messages. True on success.
bool read_int(PyObject* value, const char* expected, int* number) {
  const long read = PyLong_AsLong(value);
  if (read == -1 && PyErr_Occurred()) {
    if (PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Format(PyExc_TypeError, "[python] %s, got %R", expected, value);
    return false;
  }
  if (read != static_cast<int>(read)) {
    PyErr_SetString(PyExc_OverflowError, "[python] the number does not fit 32 bits");
    return false;
  }
  *number = static_cast<int>(read);
  return true;
}

// The id of a process set, which is None while that is not registered.
bool read_group(PyObject* value, int* group) {
  if (value != Py_None) return read_int(value, "expected the number of a process set", group);
  PyErr_SetString(PyExc_ValueError, "Process set provided does not exist, or has not been registered.");
  return false;
}

bool read_double(PyObject* value, double* number) {
  if (PyFloat_CheckExact(value)) {
    *number = PyFloat_AS_DOUBLE(value);
    return true;
  }
  *number = PyFloat_AsDouble(value);
  return !(*number == -1.0 && PyErr_Occurred());
}

template <typename Number>
bool read_numbers(PyObject* sequence, std::vector<Number>* numbers) {
  PyObject* items = PySequence_Fast(sequence, "[python] expected a sequence of integers");
  if (items == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items) && !PyErr_Occurred(); ++i)
    numbers->push_back(static_cast<Number>(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items, i))));
  Py_DECREF(items);
  return !PyErr_Occurred();
}

// The data that plain and grouped requests share; lives until the submission is over.
struct Parsed {
  perseus_request request = {};
  RequestName name;
  std::vector<int64_t> splits;
  std::vector<int> ranks;

  bool parse(PyObject* const* arguments, bool grouped, int64_t unnamed) {
    request.struct_size = sizeof(request);
    int kind = 0, op = 0;
    if (!read_int(arguments[kKind], "expected a kind of operation", &kind) ||
        !read_int(arguments[kOp], kExpectedOp, &op) || !read_double(arguments[kPrescale], &request.prescale) ||
        !read_double(arguments[kPostscale], &request.postscale) ||
        !read_int(arguments[kRoot], kExpectedRoot, &request.root) || !read_group(arguments[kGroup], &request.group))
      return false;
    if (kind < 0 || kind >= kKinds) {
      PyErr_SetString(PyExc_ValueError, "[python] unknown kind of operation");
      return false;
    }
    if (op < 0 || op >= kReductions) {
      PyErr_Format(PyExc_ValueError, "[python] %s, got %R", kExpectedOp, arguments[kOp]);
      return false;
    }
    request.kind = static_cast<perseus_kind>(kind);
    request.op = static_cast<perseus_reduce_op>(op);
    request.transient = PyObject_IsTrue(arguments[kTransient]);
    if (request.transient < 0) return false;
    if (arguments[kSplits] != Py_None && !parse_splits(arguments[kSplits])) return false;
    if (kind >= PERSEUS_SEND) {
      request.tag = PyLong_AsLongLong(arguments[kTag]);
      if (request.tag == -1 && PyErr_Occurred()) return false;
      if (arguments[kName] == Py_None) return true;  // the core makes one of rank and tag
    }
    return name.build((grouped ? kGroupedPrefix : kPlainPrefix)[kind], arguments[kName], unnamed, &request);
  }

 private:
  bool parse_splits(PyObject* values) {
    if (request.kind == PERSEUS_ADD_GROUP || request.kind == PERSEUS_REMOVE_GROUP) {
      if (!read_numbers(values, &ranks)) return false;
      request.ranks = ranks.data();
      request.rank_count = static_cast<int>(ranks.size());
      return true;
    }
    if (!read_numbers(values, &splits)) return false;
    splits.reserve(1);  // an empty list is not "no splits"
    request.splits = splits.data();
    request.split_count = static_cast<int>(splits.size());
    return true;
  }
};

size_t width_of(perseus_dtype dtype) {
  constexpr size_t kWidths[] = {2, 2, 4, 8, 1, 1, 2, 4, 8, 1};
  return kWidths[dtype];
}

// Is every element of the result where its own input is, or where no input is? A view in memory order has no gaps.
bool elementwise(const TensorView& input, const TensorView& output) {
  if (output.ndim != input.ndim || !std::equal(input.shape, input.shape + input.ndim, output.shape) ||
      output.order != input.order)
    return false;
  size_t bytes = width_of(input.dtype);
  for (int i = 0; i < input.ndim; ++i) bytes *= static_cast<size_t>(input.shape[i]);
  const auto from = reinterpret_cast<uintptr_t>(input.data), to = reinterpret_cast<uintptr_t>(output.data);
  return from == to || (from < to ? to - from : from - to) >= bytes;
}

// Reads one tensor and where its result goes.
bool read_tensor(TensorReader* reader, PyObject* input, PyObject* output, Layout layout, TensorView* view,
                 perseus_tensor* tensor) {
  if (!reader->read(input, layout, view)) return false;
  *tensor = {view->data, nullptr, view->shape, view->ndim, view->dtype};
  if (output == input) {
    tensor->output = view->data;
  } else if (output != Py_None) {
    TensorView target;
    if (!reader->read(output, layout, &target)) return false;
    if (target.device != view->device || target.stream != view->stream) {
      PyErr_SetString(PyExc_ValueError, "[python] input and output are not on the same device and stream");
      return false;
    }
    if (target.dtype != view->dtype) {
      PyErr_SetString(PyExc_ValueError, "[python] input and output are not of the same dtype");
      return false;
    }
    if (layout == Layout::kDense && !elementwise(*view, target)) {
      PyErr_SetString(PyExc_ValueError,
                      "[python] input and output differ in shape or memory order, or overlap: pass an output that is "
                      "like the input and has memory of its own, as empty_like makes it");
      return false;
    }
    tensor->output = target.data;
  }
  return true;
}

// Says in which order the tensors' dimensions lie in memory, unless all are by rows.
void state_orders(const TensorView* views, size_t count, std::vector<int>* orders, perseus_request* request) {
  if (std::all_of(views, views + count, [](const TensorView& view) { return view.order.empty(); })) return;
  for (size_t i = 0; i < count; ++i) {
    const size_t before = orders->size();
    orders->resize(before + static_cast<size_t>(views[i].ndim));
    if (views[i].order.empty()) std::iota(orders->begin() + before, orders->end(), 0);
    else std::copy(views[i].order.begin(), views[i].order.end(), orders->begin() + before);
  }
  request->ranks = orders->data();
  request->rank_count = static_cast<int>(orders->size());
}

// Says where the tensors are, and notes how their results can be waited for.
void place(const TensorView& view, perseus_request* request, Pending* pending) {
  if (view.device == kHost) return;
  request->memory = PERSEUS_CUDA;
  request->device = pending->device = view.device;
  request->stream = pending->stream = view.stream;
  pending->current_stream = view.current_stream;
}

bool submit_request(perseus_context* context, PyObject* const* arguments, const perseus_request& request,
                    Pending* pending) {
  const perseus_code code = perseus_request_submit(context, &request, &pending->handle);
  if (code != PERSEUS_OK) {
    raise(code);
    return false;
  }
  pending->kind = request.kind;
  pending->with_splits = request.kind == PERSEUS_ALLTOALL && arguments[kSplits] != Py_None;
  if (arguments[kInput] != Py_None) pending->input = Py_NewRef(arguments[kInput]);
  if (arguments[kOutput] != Py_None) pending->result = Py_NewRef(arguments[kOutput]);
  return true;
}

void state(const GradientArguments& gradient, perseus_request* request, Pending* pending) {
  pending->gradient_of = request->gradient_of = gradient.gradient_of;
  request->codec = gradient.codec;
  request->codec_argument = gradient.codec_argument;
  request->learning_rate = gradient.learning_rate;
  request->momentum = gradient.momentum;
}

// Interned, so that a caller's keyword is mostly found by its address. They live as long as the process.
std::array<PyObject*, kSubmitArguments> g_keywords;
std::array<PyObject*, kSubmitArguments> g_defaults;

// Which argument a keyword names; kSubmitArguments for none, -1 with an exception set.
int position_of(PyObject* keyword) {
  for (int i = kPositional; i < kSubmitArguments; ++i)
    if (keyword == g_keywords[i]) return i;
  for (int i = kPositional; i < kSubmitArguments; ++i) {
    const int equal = PyObject_RichCompareBool(keyword, g_keywords[i], Py_EQ);
    if (equal != 0) return equal < 0 ? -1 : i;
  }
  return kSubmitArguments;
}

}  // namespace

bool SubmitArguments::prepare() {
  constexpr const char* kKeywords[] = {"op",          "prescale", "postscale",      "root", "splits",        "group",
                                       "gradient_of", "codec",    "codec_argument", "tag",  "learning_rate", "momentum",
                                       "transient"};
  PyObject* zero = PyLong_FromLong(0);
  PyObject* one = PyFloat_FromDouble(1.0);
  if (zero == nullptr || one == nullptr) return false;
  g_defaults.fill(zero);
  g_defaults[kOutput] = g_defaults[kSplits] = Py_None;
  g_defaults[kPrescale] = g_defaults[kPostscale] = one;
  for (int i = kPositional; i < kSubmitArguments; ++i) {
    g_keywords[i] = PyUnicode_InternFromString(kKeywords[i - kPositional]);
    if (g_keywords[i] == nullptr) return false;
  }
  return true;
}

bool SubmitArguments::read(PyObject* const* arguments, Py_ssize_t positional, PyObject* names) {
  if (positional < kOutput || positional > kPositional) {
    PyErr_Format(PyExc_TypeError, "submit takes 3 or 4 positional arguments, got %zd", positional);
    return false;
  }
  values_ = g_defaults;
  std::copy(arguments, arguments + positional, values_.begin());
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const int position = position_of(PyTuple_GET_ITEM(names, i));
    if (position < 0) return false;
    if (position == kSubmitArguments) {
      PyErr_Format(PyExc_TypeError, "submit got an unexpected keyword argument %R", PyTuple_GET_ITEM(names, i));
      return false;
    }
    values_[position] = arguments[positional + i];
  }
  return true;
}

bool submit_one(perseus_context* context, TensorReader* reader, PyObject* const* arguments, int64_t unnamed,
                const GradientArguments& gradient, Pending* pending) {
  Parsed parsed;
  if (!parsed.parse(arguments, false, unnamed)) return false;
  TensorView view;
  perseus_tensor tensor = {};
  if (arguments[kInput] != Py_None) {
    if (!read_tensor(reader, arguments[kInput], arguments[kOutput], layout_for(parsed.request.kind), &view, &tensor))
      return false;
    if (parsed.request.kind == PERSEUS_RECEIVE) tensor.output = view.data;
    parsed.request.tensors = &tensor;
    parsed.request.tensor_count = 1;
    state_orders(&view, 1, &parsed.ranks, &parsed.request);
    place(view, &parsed.request, pending);
    state(gradient, &parsed.request, pending);
  }
  return submit_request(context, arguments, parsed.request, pending);
}

bool submit_group(perseus_context* context, TensorReader* reader, PyObject* const* arguments, int64_t unnamed,
                  const GradientArguments& gradient, Pending* pending) {
  Parsed parsed;
  if (!parsed.parse(arguments, true, unnamed)) return false;
  PyObject* inputs = arguments[kInput];
  PyObject* outputs = arguments[kOutput];
  const Py_ssize_t count = PyTuple_GET_SIZE(inputs);
  if (outputs != Py_None && (!PyTuple_Check(outputs) || PyTuple_GET_SIZE(outputs) != count)) {
    PyErr_SetString(PyExc_ValueError, "[python] a group needs as many outputs as inputs");
    return false;
  }
  std::vector<TensorView> views(static_cast<size_t>(count));
  std::vector<perseus_tensor> tensors(static_cast<size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!read_tensor(reader, PyTuple_GET_ITEM(inputs, i), outputs == Py_None ? Py_None : PyTuple_GET_ITEM(outputs, i),
                     layout_for(parsed.request.kind), &views[i], &tensors[i]))
      return false;
  for (const TensorView& view : views)
    if (view.device != views[0].device || view.stream != views[0].stream) {
      PyErr_SetString(PyExc_ValueError,
                      "[python] the tensors of a group are not on one device and stream: make a group for each");
      return false;
    }
  parsed.request.tensors = tensors.data();
  parsed.request.tensor_count = static_cast<int>(count);
  state_orders(views.data(), views.size(), &parsed.ranks, &parsed.request);
  if (count > 0) place(views[0], &parsed.request, pending);
  state(gradient, &parsed.request, pending);
  return submit_request(context, arguments, parsed.request, pending);
}

bool is_point_to_point(PyObject* kind) {
  const long number = PyLong_Check(kind) ? PyLong_AsLong(kind) : -1;
  return number == PERSEUS_SEND || number == PERSEUS_RECEIVE;
}

std::string allreduce_name(const std::string& name, bool grouped) {
  return (grouped ? kGroupedPrefix : kPlainPrefix)[PERSEUS_ALLREDUCE] + name;
}

}  // namespace perseus::python
