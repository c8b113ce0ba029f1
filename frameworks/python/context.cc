// Context creation with Ctrl-C, properties and statistics.
#include "context.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "errors.h"
#include "submission.h"

namespace py = pybind11;

namespace perseus::python {
namespace {

// A residual's layout, the tensors' shapes and the factor are one number in Python: from bit 0, 64 and 128.
constexpr int kLayoutBits = 64;

struct Interruption {
  PyObject* ask = Py_None;  // the caller's
  bool seen = false;        // and an exception is set
};

// Called by perseus_context_create without the GIL.
int look_for_interruption(void* argument) {
  auto* interruption = static_cast<Interruption*>(argument);
  if (interruption->seen) return 1;
  const PyGILState_STATE state = PyGILState_Ensure();
  interruption->seen = PyErr_CheckSignals() != 0;
  if (!interruption->seen && interruption->ask != Py_None) {
    PyObject* answer = PyObject_CallNoArgs(interruption->ask);
    interruption->seen = answer == nullptr;
    Py_XDECREF(answer);
  }
  PyGILState_Release(state);
  return interruption->seen ? 1 : 0;
}

void check(perseus_code code) {
  if (code == PERSEUS_OK) return;
  raise(code);
  throw py::error_already_set();
}

}  // namespace

ContextOwner::ContextOwner(const ContextArguments& arguments) : api_(arguments.api) {
  std::vector<const char*> overrides;
  for (const std::string& text : arguments.overrides) overrides.push_back(text.c_str());
  overrides.push_back(nullptr);
  Interruption interruption{arguments.interrupted.ptr()};
  perseus_context_options options = {};
  options.struct_size = sizeof(options);
  options.rank = arguments.rank;
  options.size = arguments.size;
  options.local_rank = arguments.local_rank;
  options.local_size = arguments.local_size;
  options.cross_rank = arguments.cross_rank;
  options.cross_size = arguments.cross_size;
  options.store_host = arguments.store_host.empty() ? nullptr : arguments.store_host.c_str();
  options.store_port = arguments.store_port;
  options.secret = arguments.secret.data();
  options.secret_size = arguments.secret.size();
  options.job = arguments.job.c_str();
  options.epoch = arguments.epoch;
  options.overrides = overrides.data();
  options.memory_world = arguments.memory_world.empty() ? nullptr : arguments.memory_world.c_str();
  options.api = api_;
  options.interrupted = look_for_interruption;
  options.interrupted_arg = &interruption;
  perseus_code code;
  {
    py::gil_scoped_release release;
    code = perseus_context_create(&options, &raw_);
  }
  if (interruption.seen) {
    close();
    if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
    throw py::error_already_set();
  }
  if (code != PERSEUS_OK) {
    raise(code);
    throw py::error_already_set();
  }
}

ContextOwner::~ContextOwner() { close(); }

const char* ContextOwner::closed_text() const {
  return api_ == PERSEUS_API_HOROVOD ? "Horovod has been shut down. Call hvd.init() to start again."
                                     : "The process group has been destroyed. Call init_process_group() or new_group() "
                                       "to make another.";
}

perseus_context* ContextOwner::get() const {
  if (raw_ == nullptr) {
    raise(PERSEUS_ABORTED, closed_text());
    throw py::error_already_set();
  }
  return raw_;
}

void ContextOwner::shutdown() {
  if (raw_ == nullptr) return;
  const ContextUse use(*this);
  py::gil_scoped_release release;
  perseus_context_shutdown(use.context());
}

void ContextOwner::abort(const std::string& reason) {
  get();
  const ContextUse use(*this);
  perseus_code code = PERSEUS_OK;
  {
    py::gil_scoped_release release;
    code = perseus_context_abort(use.context(), reason.c_str());
  }
  check(code);
}

void ContextOwner::set_stall_limits(int check_s, int shutdown_s) const {
  check(perseus_context_set_stall_limits(get(), check_s, shutdown_s));
}

void ContextOwner::close() {
  perseus_context* context = std::exchange(raw_, nullptr);
  if (context == nullptr) return;
  if (perseus_context_forked(context) != 0) {
    // The count includes uses by the parent's other threads, which do not exist here to end them.
    perseus_context_destroy(context);
    return;
  }
  {
    py::gil_scoped_release release;
    perseus_context_shutdown(context);  // ends the waits of the threads that use it
  }
  const auto is_other = [self = std::this_thread::get_id()](std::thread::id user) { return user != self; };
  while (std::any_of(users_.begin(), users_.end(), is_other)) {
    py::gil_scoped_release release;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  if (!users_.empty()) {
    left_over_ = context;
    return;
  }
  py::gil_scoped_release release;
  perseus_context_destroy(context);
}

void ContextOwner::end_use() {
  users_.erase(std::find(users_.begin(), users_.end(), std::this_thread::get_id()));
  if (!users_.empty()) return;
  if (perseus_context* context = std::exchange(left_over_, nullptr)) {
    py::gil_scoped_release release;
    perseus_context_destroy(context);
  }
}

py::object ContextOwner::failure() const {
  const char* reason = nullptr;
  if (perseus_context_failed(get(), &reason) == 0) return py::none();
  auto text = py::reinterpret_steal<py::object>(to_str(reason == nullptr ? "" : reason));
  if (!text) throw py::error_already_set();
  return text;
}

std::map<std::string, uint64_t> ContextOwner::stats() const {
  perseus_stats stats = {};
  stats.struct_size = sizeof(stats);
  const perseus_code code = perseus_context_stats(get(), &stats);
  if (code != PERSEUS_OK) {
    raise(code);
    throw py::error_already_set();
  }
  return {{"shm_bytes_sent", stats.shm_bytes_sent},
          {"tcp_bytes_sent", stats.tcp_bytes_sent},
          {"shm_bytes_received", stats.shm_bytes_received},
          {"tcp_bytes_received", stats.tcp_bytes_received},
          {"rounds", stats.rounds},
          {"buckets", stats.buckets},
          {"operations", stats.operations},
          {"sleeps", stats.sleeps},
          {"staging_bytes", stats.staging_bytes},
          {"messages", stats.messages}};
}

perseus_speeds ContextOwner::speeds(int group) {
  get();
  perseus_speeds speeds = {};
  speeds.struct_size = sizeof(speeds);
  perseus_code code;
  {
    const ContextUse use(*this);
    py::gil_scoped_release release;
    code = perseus_group_speeds(use.context(), group, &speeds);
  }
  if (code == PERSEUS_OK) return speeds;
  raise(code);
  throw py::error_already_set();
}

std::optional<std::vector<int>> ContextOwner::group_ranks(int group) const {
  std::vector<int> ranks(static_cast<size_t>(perseus_context_size(get())));
  const int count = perseus_group_ranks(raw_, group, ranks.data(), static_cast<int>(ranks.size()));
  if (count < 0) return std::nullopt;
  ranks.resize(static_cast<size_t>(count));
  return ranks;
}

py::object ContextOwner::read_residual(uint64_t gradient_of, int group, const std::string& name) const {
  perseus_residual residual = {};
  residual.struct_size = sizeof(residual);
  residual.gradient_of = gradient_of;
  residual.group = group;
  residual.name = name.c_str();
  check(perseus_residual_read(get(), &residual));
  if (residual.count == 0) return py::none();
  auto data = py::reinterpret_steal<py::object>(
      PyByteArray_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(residual.count * sizeof(float))));
  if (!data) throw py::error_already_set();
  residual.data = reinterpret_cast<float*>(PyByteArray_AS_STRING(data.ptr()));
  check(perseus_residual_read(get(), &residual));
  uint32_t factor = 0;
  std::memcpy(&factor, &residual.factor, sizeof factor);
  const py::int_ bits(kLayoutBits), layout(residual.layout), shapes(residual.shapes), of_factor(factor);
  return py::make_tuple(layout | (shapes << bits) | (of_factor << bits << bits), data);
}

void ContextOwner::write_residual(uint64_t gradient_of, int group, const std::string& name, const py::int_& layout,
                                  const py::buffer& data) const {
  const py::buffer_info floats = data.request();
  perseus_residual residual = {};
  residual.struct_size = sizeof(residual);
  residual.gradient_of = gradient_of;
  residual.group = group;
  residual.name = name.c_str();
  residual.data = static_cast<float*>(floats.ptr);
  residual.count = static_cast<size_t>(floats.size * floats.itemsize) / sizeof(float);
  const py::int_ bits(kLayoutBits), mask(UINT64_MAX);
  residual.layout = py::object(layout & mask).cast<uint64_t>();
  residual.shapes = py::object(layout >> bits & mask).cast<uint64_t>();
  const auto factor = py::object(layout >> bits >> bits).cast<uint32_t>();
  std::memcpy(&residual.factor, &factor, sizeof factor);
  check(perseus_residual_write(get(), &residual));
}

void ContextOwner::flush_residuals() const { check(perseus_residuals_flush(get())); }

void ContextOwner::start_timeline(const std::string& path, bool mark_cycles) {
  get();
  perseus_code code;
  {
    const ContextUse use(*this);
    py::gil_scoped_release release;
    code = perseus_timeline_start(use.context(), path.c_str(), mark_cycles ? 1 : 0);
  }
  if (code == PERSEUS_OK) return;
  raise(code);
  throw py::error_already_set();
}

void ContextOwner::stop_timeline() {
  get();
  perseus_code code;
  {
    const ContextUse use(*this);
    py::gil_scoped_release release;
    code = perseus_timeline_stop(use.context());
  }
  if (code == PERSEUS_OK) return;
  raise(code);
  throw py::error_already_set();
}

void bind_context(py::module_& module) {
  const auto number = [](auto function) {
    return [function](const ContextOwner& self) { return function(self.get()); };
  };
  py::class_<ContextOwner, std::shared_ptr<ContextOwner>>(module, "Context", "One rank's membership in a world.")
      .def(py::init([](int rank, int size, int local_rank, int local_size, int cross_rank, int cross_size,
                       const std::string& store_host, int store_port, const py::bytes& secret, const std::string& job,
                       uint32_t epoch, const std::vector<std::string>& overrides, const std::string& memory_world,
                       int api, const py::object& interrupted) {
             return std::make_shared<ContextOwner>(ContextArguments{
                 rank, size, local_rank, local_size, cross_rank, cross_size, store_host, store_port,
                 std::string(secret), job, epoch, overrides, memory_world, static_cast<perseus_api>(api), interrupted});
           }),
           py::kw_only(), py::arg("rank"), py::arg("size"), py::arg("local_rank") = 0, py::arg("local_size") = 0,
           py::arg("cross_rank") = 0, py::arg("cross_size") = 0, py::arg("store_host") = "", py::arg("store_port") = 0,
           py::arg("secret") = py::bytes(), py::arg("job") = "world", py::arg("epoch") = 0,
           py::arg("overrides") = std::vector<std::string>(), py::arg("memory_world") = "",
           py::arg("api") = static_cast<int>(PERSEUS_API_HOROVOD), py::arg("interrupted") = py::none())
      .def_property_readonly("rank", number(perseus_context_rank))
      .def_property_readonly("size", number(perseus_context_size))
      .def_property_readonly("local_rank", number(perseus_context_local_rank))
      .def_property_readonly("local_size", number(perseus_context_local_size))
      .def_property_readonly("cross_rank", number(perseus_context_cross_rank))
      .def_property_readonly("cross_size", number(perseus_context_cross_size))
      .def_property_readonly("is_homogeneous",
                             [](const ContextOwner& self) { return perseus_context_is_homogeneous(self.get()) != 0; })
      .def_property_readonly(
          "address", [](const ContextOwner& self) { return reinterpret_cast<uintptr_t>(self.get()); },
          "The perseus_context, for a library that works on it through the C ABI until this is closed.")
      .def_property_readonly("closed", [](const ContextOwner& self) { return self.raw() == nullptr; })
      .def("failure", &ContextOwner::failure, "Why the world has ended, None while it has not.")
      .def(
          "failure_code", [](const ContextOwner& self) { return perseus_context_failed(self.get(), nullptr); },
          "The kind of failure as a perseus_code, 0 while the world works.")
      .def(
          "transport", [](const ContextOwner& self, int peer) { return perseus_context_transport(self.get(), peer); },
          py::arg("peer"), "How bytes reach a rank: 'none', 'mem', 'shm' or 'tcp'.")
      .def(
          "setting",
          [](const ContextOwner& self, const std::string& name) {
            return perseus_context_setting(self.get(), name.c_str());
          },
          py::arg("name"), "A variable as the core has read it: the number, 0 or 1, or the place among its choices.")
      .def(
          "forget_gradients",
          [](const ContextOwner& self, uint64_t gradient_of) {
            if (self.raw() != nullptr) perseus_gradients_forget(self.raw(), gradient_of);
          },
          py::arg("gradient_of"),
          "Drops all that is kept for one optimizer: sums, residuals, momenta, counts of steps.")
      .def(
          "forget_sums",
          [](const ContextOwner& self, uint64_t gradient_of) {
            if (self.raw() != nullptr) perseus_sums_forget(self.raw(), gradient_of);
          },
          py::arg("gradient_of"), "Drops the sums over steps of one optimizer alone.")
      .def(
          "forget_momenta",
          [](const ContextOwner& self, uint64_t gradient_of) { perseus_momenta_forget(self.get(), gradient_of); },
          py::arg("gradient_of"), "Momentum correction of one optimizer begins anew: it has not applied a step.")
      .def(
          "read_residual",
          [](const ContextOwner& self, uint64_t gradient_of, int group, const std::string& name, bool grouped) {
            return self.read_residual(gradient_of, group, allreduce_name(name, grouped));
          },
          py::arg("gradient_of"), py::arg("group"), py::arg("name"), py::arg("grouped"),
          "(layout, float32 numbers) that codecs hold back of an allreduce, None where they hold nothing.")
      .def(
          "write_residual",
          [](const ContextOwner& self, uint64_t gradient_of, int group, const std::string& name, bool grouped,
             const py::int_& layout, const py::buffer& data) {
            self.write_residual(gradient_of, group, allreduce_name(name, grouped), layout, data);
          },
          py::arg("gradient_of"), py::arg("group"), py::arg("name"), py::arg("grouped"), py::arg("layout"),
          py::arg("data"), "Takes the place of what is held back.")
      .def("flush_residuals", &ContextOwner::flush_residuals,
           "The next allreduce of every name sends all that is held back.")
      .def("stats", &ContextOwner::stats)
      .def("speeds", &ContextOwner::speeds, py::arg("group") = 0, "What auto goes by; measurement 0 = nothing yet.")
      .def("group_ranks", &ContextOwner::group_ranks, py::arg("group"), "Members in group order, None when unknown.")
      .def("start_timeline", &ContextOwner::start_timeline, py::arg("path"), py::arg("mark_cycles") = false,
           "Records into a file from here on.")
      .def("stop_timeline", &ContextOwner::stop_timeline, "Completes the file of the recording, if there is one.")
      .def("set_stall_limits", &ContextOwner::set_stall_limits, py::arg("check"), py::arg("shutdown"),
           "Seconds after which a living rank that is waited for is named, and ends the world; 0 = never.")
      .def("abort", &ContextOwner::abort, py::arg("reason"), "Ends the world on every rank at once, with a reason.")
      .def("shutdown", &ContextOwner::shutdown, "Ends the world on every rank.")
      .def("close", &ContextOwner::close, "Shuts down and frees everything.");
}

}  // namespace perseus::python
