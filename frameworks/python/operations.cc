// Class Operations: the handles of one context. A handle keeps its tensors alive until it is synchronised; when the
// object goes away before that, the context is closed first, so that no thread still uses them.
#include "operations.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "context.h"
#include "errors.h"
#include "handle_table.h"
#include "owned_buffer.h"
#include "submission.h"
#include "tensor_view.h"

namespace py = pybind11;

namespace perseus::python {
namespace {

constexpr int kSliceMs = 100;  // longest time between two checks of Python's signals
constexpr double kLongestWaitSeconds = 1e9;

struct State {
  State(std::shared_ptr<ContextOwner> context, PyObject* wrap_output, PyObject* describe, int64_t number)
      : owner(std::move(context)),
        wrap(Py_NewRef(wrap_output)),
        described_by(Py_NewRef(describe)),
        reader(describe),
        last_number(number) {}
  ~State() {
    Py_DECREF(wrap);
    Py_DECREF(described_by);
    Py_XDECREF(buffer_type);
  }

  std::shared_ptr<ContextOwner> owner;
  PyObject* wrap;
  PyObject* described_by;
  PyObject* buffer_type = nullptr;
  TensorReader reader;
  HandleTable handles;
  int64_t last_number;
  int64_t being_kept = 0;  // the handle that close() has taken out of the table, to put it back with its outcome
  std::thread::id keeper;  // the thread that does so
};

struct OperationsObject {
  PyObject_HEAD State* state;
};

State& state_of(PyObject* self) { return *reinterpret_cast<OperationsObject*>(self)->state; }

void drop(Pending* pending) {
  Py_CLEAR(pending->input);
  Py_CLEAR(pending->result);
  Py_CLEAR(pending->error);
}

PyObject* unknown_handle(PyObject* handle) {
  return PyErr_Format(PyExc_ValueError, "Handle %S was not created or has been cleared.", handle);
}

// ---- results that the core owns -----------------------------------------------------------------------------------

PyObject* to_tuple(const int64_t* values, int count) {
  PyObject* tuple = PyTuple_New(count);
  for (int i = 0; tuple != nullptr && i < count; ++i) {
    PyObject* value = PyLong_FromLongLong(values[i]);
    if (value == nullptr) Py_CLEAR(tuple);
    else PyTuple_SET_ITEM(tuple, i, value);
  }
  return tuple;
}

// wrap(buffer, shape, like, received splits or None): the adapter makes a tensor of it.
PyObject* take_output(State& state, perseus_context* context, const Pending& pending, int index, PyObject* like) {
  perseus_output output = {};
  output.struct_size = sizeof(output);
  const perseus_code code = perseus_handle_output(context, pending.handle, index, &output);
  if (code != PERSEUS_OK) return raise(code);
  PyObject* shape = to_tuple(output.shape, output.ndim);
  PyObject* splits =
      pending.with_splits ? to_tuple(output.received_splits, output.received_split_count) : Py_NewRef(Py_None);
  PyObject* buffer = nullptr;
  if (shape != nullptr && splits != nullptr)
    buffer = make_owned_buffer(reinterpret_cast<PyTypeObject*>(state.buffer_type),
                               perseus_handle_take_output(context, pending.handle, index), output.size);
  PyObject* wrapped = nullptr;
  if (buffer != nullptr) wrapped = PyObject_CallFunctionObjArgs(state.wrap, buffer, shape, like, splits, nullptr);
  Py_XDECREF(buffer);
  Py_XDECREF(splits);
  Py_XDECREF(shape);
  return wrapped;
}

PyObject* take_result(State& state, perseus_context* context, const Pending& pending) {
  if (pending.kind == PERSEUS_SEND) return Py_NewRef(Py_None);
  if (pending.kind == PERSEUS_ADD_GROUP || pending.kind == PERSEUS_JOIN ||
      pending.kind == PERSEUS_RECEIVE) {  // a number
    perseus_output output = {};
    output.struct_size = sizeof(output);
    const perseus_code code = perseus_handle_output(context, pending.handle, 0, &output);
    return code == PERSEUS_OK ? PyLong_FromSize_t(output.size) : raise(code);
  }
  if (pending.input == nullptr) return Py_NewRef(Py_None);
  if (!PyTuple_Check(pending.input)) return take_output(state, context, pending, 0, pending.input);
  const Py_ssize_t count = PyTuple_GET_SIZE(pending.input);
  PyObject* results = PyTuple_New(count);
  for (Py_ssize_t i = 0; results != nullptr && i < count; ++i) {
    PyObject* item = take_output(state, context, pending, static_cast<int>(i), PyTuple_GET_ITEM(pending.input, i));
    if (item == nullptr) Py_CLEAR(results);
    else PyTuple_SET_ITEM(results, i, item);
  }
  return results;
}

// Is the result where the caller wanted it? Not so if ranks had tensors of different sizes.
bool is_in_place(perseus_context* context, const Pending& pending) {
  if (pending.kind != PERSEUS_ALLGATHER || PyTuple_Check(pending.input)) return true;
  perseus_output output = {};
  output.struct_size = sizeof(output);
  return perseus_handle_output(context, pending.handle, 0, &output) != PERSEUS_OK || output.data == nullptr;
}

using Clock = std::chrono::steady_clock;

enum class Wait {
  kOver,    // the core is done with the handle
  kLate,    // the deadline came first
  kGone,    // there is no such handle (any more); with an exception set, what a signal's handler raised
  kClosed,  // its context has been closed
};

// NULL if there is no such handle (any more).
Pending* find(State& state, int64_t number) {
  while (number != 0 && number == state.being_kept && state.keeper != std::this_thread::get_id()) {
    PyThreadState* saved = PyEval_SaveThread();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    PyEval_RestoreThread(saved);
  }
  return state.handles.find(number);
}

Wait wait_until(State& state, int64_t number, Clock::time_point deadline, perseus_code* code) {
  Pending* pending = find(state, number);
  if (pending == nullptr) return Wait::kGone;
  *code = PERSEUS_OK;
  if (pending->handle == 0) return Wait::kOver;
  if (state.owner->raw() == nullptr) return Wait::kClosed;
  *code = perseus_handle_wait(state.owner->raw(), pending->handle, 0);
  while (*code == PERSEUS_IN_PROGRESS) {
    int64_t slice = kSliceMs;
    if (deadline != Clock::time_point::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      if (left <= 0) return Wait::kLate;
      slice = std::min<int64_t>(slice, left);
    }
    const perseus_handle handle = pending->handle;
    {
      const ContextUse use(*state.owner);
      PyThreadState* saved = PyEval_SaveThread();
      *code = perseus_handle_wait(use.context(), handle, static_cast<int>(slice));
      PyEval_RestoreThread(saved);
    }
    if (*code == PERSEUS_IN_PROGRESS && PyErr_CheckSignals() != 0) return Wait::kGone;
    // Another thread may have been first, or may have closed the context.
    pending = find(state, number);
    if (pending == nullptr) return Wait::kGone;
    if (pending->handle == 0) return Wait::kOver;
    if (state.owner->raw() == nullptr) return Wait::kClosed;
  }
  return Wait::kOver;
}

// Waits until the core is done with the handle, and takes it out of the table. False without an exception when there is
// no such handle (any more).
bool wait_and_extract(State& state, int64_t number, Pending* extracted, perseus_code* code) {
  const Wait wait = wait_until(state, number, Clock::time_point::max(), code);
  if (wait == Wait::kClosed) raise(PERSEUS_ABORTED, state.owner->closed_text());
  if (wait != Wait::kOver) return false;
  *extracted = *state.handles.find(number);
  state.handles.erase(number);
  return true;
}

// Results on a GPU: the stream on which its framework works now waits until they are written.
perseus_code join(perseus_context* context, const Pending& pending) {
  void* stream = pending.stream;
  constexpr int32_t kDlCuda = 2;
  if (pending.current_stream != nullptr && pending.current_stream(kDlCuda, pending.device, &stream) != 0) {
    PyErr_Clear();
    stream = pending.stream;
  }
  return perseus_handle_join(context, pending.handle, stream);
}

// Turns the outcome into a result or an error inside `pending`, which no table holds now, and releases the core's
// handle. The context must not have been closed since the handle was found.
void settle(State& state, perseus_code code, Pending* pending) {
  if (pending->handle == 0) return;
  const ContextUse use(*state.owner);  // wrapping a result runs Python
  const bool on_gpu = pending->device != kHost;
  if (code == PERSEUS_OK && on_gpu) code = join(use.context(), *pending);
  if (code != PERSEUS_OK) {
    pending->error = make_exception(code, perseus_error_message());
    if (on_gpu) join(use.context(), *pending);  // parts of the result may be on their way
  } else if (pending->result == nullptr || !is_in_place(use.context(), *pending)) {
    Py_XSETREF(pending->result, take_result(state, use.context(), *pending));
  }
  if (pending->error == nullptr && pending->result == nullptr) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    pending->error = value;
    Py_XDECREF(type);
    Py_XDECREF(traceback);
  }
  // What is no reduction is not handed out as one.
  if (pending->gradient_of != 0 && pending->error == nullptr &&
      perseus_handle_gradient(use.context(), pending->handle) != PERSEUS_GRADIENT_REDUCED)
    Py_SETREF(pending->result, Py_NewRef(Py_None));
  perseus_handle_release(use.context(), pending->handle);
  pending->handle = 0;
}

// ---- methods ------------------------------------------------------------------------------------------------------

PyObject* submit(PyObject* self, PyObject* const* given, Py_ssize_t positional, PyObject* names) {
  State& state = state_of(self);
  SubmitArguments read_arguments;
  if (!read_arguments.read(given, positional, names)) return nullptr;
  PyObject* const* arguments = read_arguments.all();
  const int64_t number = ++state.last_number;
  if (state.owner->raw() == nullptr) return raise(PERSEUS_ABORTED, state.owner->closed_text());
  const ContextUse use(*state.owner);  // arguments may run Python
  perseus_context* context = use.context();
  // Ranks must agree on the numbers in names, so only unnamed requests count, refused ones included.
  int64_t unnamed = 0;
  if (arguments[kName] == Py_None && arguments[kGroup] != Py_None && !is_point_to_point(arguments[kKind])) {
    const long group = PyLong_AsLong(arguments[kGroup]);
    if (group == -1 && PyErr_Occurred()) return nullptr;
    unnamed = perseus_group_next_number(context, static_cast<int>(group));
  }
  Pending pending;
  pending.number = number;
  GradientArguments gradient;
  gradient.gradient_of = PyLong_AsUnsignedLongLong(arguments[kGradientOf]);
  gradient.codec = static_cast<int>(PyLong_AsLong(arguments[kCodec]));
  gradient.codec_argument = PyFloat_AsDouble(arguments[kCodecArgument]);
  gradient.learning_rate = PyFloat_AsDouble(arguments[kLearningRate]);
  gradient.momentum = PyFloat_AsDouble(arguments[kMomentum]);
  if (PyErr_Occurred()) return nullptr;
  const bool submitted = PyTuple_Check(arguments[kInput])
                             ? submit_group(context, &state.reader, arguments, unnamed, gradient, &pending)
                             : submit_one(context, &state.reader, arguments, unnamed, gradient, &pending);
  if (!submitted) return nullptr;
  state.handles.insert(pending);
  return PyLong_FromLongLong(number);
}

PyObject* poll(PyObject* self, PyObject* handle) {
  State& state = state_of(self);
  const int64_t number = PyLong_AsLongLong(handle);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  const Pending* pending = find(state, number);
  if (pending == nullptr) return unknown_handle(handle);
  if (pending->handle == 0 || state.owner->raw() == nullptr) Py_RETURN_TRUE;
  const ContextUse use(*state.owner);
  const perseus_handle core_handle = pending->handle;
  PyThreadState* saved = PyEval_SaveThread();
  const int done = perseus_handle_poll(use.context(), core_handle);
  PyEval_RestoreThread(saved);
  return PyBool_FromLong(done != 0);
}

PyObject* wait(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  State& state = state_of(self);
  if (count != 2) return PyErr_Format(PyExc_TypeError, "wait takes a handle and seconds, got %zd arguments", count);
  const int64_t number = PyLong_AsLongLong(arguments[0]);
  const double seconds = PyFloat_AsDouble(arguments[1]);
  if (PyErr_Occurred()) return nullptr;
  const auto time = std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongestWaitSeconds));
  perseus_code code;
  const Wait wait = wait_until(state, number, Clock::now() + std::chrono::duration_cast<Clock::duration>(time), &code);
  return PyErr_Occurred() ? nullptr : PyBool_FromLong(wait != Wait::kLate);
}

PyObject* synchronize(PyObject* self, PyObject* handle) {
  State& state = state_of(self);
  const int64_t number = PyLong_AsLongLong(handle);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  Pending pending;
  perseus_code code;
  if (!wait_and_extract(state, number, &pending, &code)) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
  }
  settle(state, code, &pending);
  PyObject* result = std::exchange(pending.result, nullptr);
  if (pending.error != nullptr) {
    Py_CLEAR(result);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(pending.error)), pending.error);
  }
  drop(&pending);
  return result;
}

// After the context was shut down and before it is closed: waits for every open handle and keeps its outcome.
PyObject* close(PyObject* self, PyObject*) {
  State& state = state_of(self);
  for (const int64_t number : state.handles.numbers()) {
    Pending pending;
    perseus_code code;
    if (wait_and_extract(state, number, &pending, &code)) {
      state.being_kept = number;
      state.keeper = std::this_thread::get_id();
      settle(state, code, &pending);
      state.being_kept = 0;
      state.handles.insert(pending);
    } else if (PyErr_Occurred()) {
      return nullptr;
    }
  }
  Py_RETURN_NONE;
}

PyObject* open_handles(PyObject* self, PyObject*) { return PyLong_FromSize_t(state_of(self).handles.size()); }

PyObject* create(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  static const char* names[] = {"context", "wrap", "describe", "last_handle", nullptr};
  PyObject *context, *wrap, *describe = Py_None;
  long long last_handle = 0;
  if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO|OL", const_cast<char**>(names), &context, &wrap, &describe,
                                   &last_handle))
    return nullptr;
  try {
    auto state = std::make_unique<State>(py::cast<std::shared_ptr<ContextOwner>>(py::handle(context)), wrap, describe,
                                         last_handle);
    state->buffer_type = make_owned_buffer_type();
    if (state->buffer_type == nullptr) return nullptr;
    PyObject* self = type->tp_alloc(type, 0);
    if (self != nullptr) reinterpret_cast<OperationsObject*>(self)->state = state.release();
    return self;
  } catch (const py::cast_error&) {
    return PyErr_Format(PyExc_TypeError, "expected a perseus._core.Context, got %s", Py_TYPE(context)->tp_name);
  }
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  if (State* state = std::exchange(reinterpret_cast<OperationsObject*>(self)->state, nullptr)) {
    if (state->handles.size() != 0) state->owner->close();
    for (const int64_t number : state->handles.numbers()) {
      Pending pending = *state->handles.find(number);
      state->handles.erase(number);
      drop(&pending);
    }
    delete state;
  }
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef kMethods[] = {
    {"submit", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(submit)), METH_FASTCALL | METH_KEYWORDS,
     "submit($self, kind, name, input, output=None, /, *, op=0, prescale=1.0, postscale=1.0, root=0,\n"
     "       splits=None, group=0, gradient_of=0, codec=0, codec_argument=0.0, tag=0,\n"
     "       learning_rate=0.0, momentum=0.0, transient=False)\n--\n\n"
     "Hands tensors to the core; returns the handle. input and output are tensors, tuples of tensors, or None.\n"
     "An allgather of one tensor writes to output if that has room for as many bytes of each rank as input has.\n"
     "A receive writes to input; the other rank of a send or receive is root, -1 for a receive from any.\n"
     "transient: the name is not used again, like those that are made for None."},
    {"poll", poll, METH_O, "poll($self, handle, /)\n--\n\nWhether synchronize would return at once."},
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait)), METH_FASTCALL,
     "wait($self, handle, seconds, /)\n--\n\nWhether synchronize would return at once, after at most so many seconds."},
    {"synchronize", synchronize, METH_O,
     "synchronize($self, handle, /)\n--\n\nWaits for the handle; returns its output, None for an unknown one and\n"
     "for a gradient that is not to be applied, because it was added to a sum or has a NaN. Of a receive it returns\n"
     "the sender's rank, of a send None."},
    {"close", close, METH_NOARGS,
     "close($self, /)\n--\n\nKeeps every open handle's outcome, after Context.shutdown() and before Context.close()."},
    {"open_handles", open_handles, METH_NOARGS, "open_handles($self, /)\n--\n\nHow many await synchronize."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool bind_operations(PyObject* module) {
  static PyType_Slot slots[] = {
      {Py_tp_new, reinterpret_cast<void*>(create)},
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
      {Py_tp_methods, kMethods},
      {Py_tp_doc, const_cast<char*>("Operations(context, wrap, describe=None, last_handle=0)\n"
                                    "--\n\n"
                                    "Submits tensors to a context and waits for them.\n"
                                    "Handles count up from last_handle + 1.")},
      {0, nullptr}};
  static PyType_Spec spec = {"perseus._core.Operations", sizeof(OperationsObject), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || !SubmitArguments::prepare()) return false;
  const bool added = PyModule_AddObjectRef(module, "Operations", type) == 0;
  Py_DECREF(type);
  return added;
}

}  // namespace perseus::python
