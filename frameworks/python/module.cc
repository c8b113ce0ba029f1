// The module perseus._core: the C ABI for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "context.h"
#include "errors.h"
#include "operations.h"
#include "perseus/perseus.h"
#include "speeds.h"

namespace py = pybind11;

namespace perseus::python {
namespace {

void check(perseus_code code) {
  if (code == PERSEUS_OK) return;
  raise(code);
  throw py::error_already_set();
}

// The rendezvous server of a job; lives until closed.
class StoreServer {
 public:
  StoreServer(const std::string& host, int port, bool next_free, const py::bytes& secret) {
    const std::string key = secret;
    check(perseus_store_server_create(host.c_str(), port, next_free ? 1 : 0, key.data(), key.size(), &raw_));
    port_ = perseus_store_server_port(raw_);
  }
  ~StoreServer() { close(); }
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  int port() const { return port_; }
  void abandon(const std::string& job, unsigned epoch, int rank, const std::string& why) {
    if (raw_ == nullptr) throw py::value_error("the store is closed");
    perseus_code code = PERSEUS_OK;
    {
      py::gil_scoped_release release;
      code = perseus_store_server_abandon(raw_, job.c_str(), epoch, rank, why.c_str());
    }
    check(code);
  }
  void close() {
    perseus_store_server* server = std::exchange(raw_, nullptr);
    if (server == nullptr) return;
    py::gil_scoped_release release;
    perseus_store_server_destroy(server);
  }

 private:
  perseus_store_server* raw_ = nullptr;
  int port_ = 0;
};

// NAME=VALUE, instead of this process's environment.
class Variables {
 public:
  explicit Variables(const std::optional<std::vector<std::string>>& texts) {
    if (!texts) return;
    for (const std::string& text : *texts) texts_.push_back(text.c_str());
    texts_.push_back(nullptr);
  }
  const char* const* get() const { return texts_.empty() ? nullptr : texts_.data(); }

 private:
  std::vector<const char*> texts_;
};

py::tuple launched_store(const std::optional<std::vector<std::string>>& environment) {
  const Variables variables(environment);
  perseus_store_place place = {};
  perseus_code code = PERSEUS_OK;
  {
    py::gil_scoped_release release;
    code = perseus_launched_store(variables.get(), &place);
  }
  check(code);
  return py::make_tuple(place.host, place.port, py::bytes(static_cast<const char*>(place.secret), place.secret_size));
}

py::tuple launched_identity(const std::optional<std::vector<std::string>>& environment) {
  perseus_launched_identity found = {};
  found.struct_size = sizeof(found);
  check(perseus_launched_identity_read(Variables(environment).get(), &found));
  return py::make_tuple(found.rank, found.size, found.local_rank, found.local_size, found.cross_rank, found.cross_size,
                        found.launcher);
}

uint64_t hash_bytes(const py::buffer& data) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  uint64_t result = 0;
  {
    py::gil_scoped_release release;
    result = perseus_hash(view.buf, static_cast<uint64_t>(view.len));
  }
  PyBuffer_Release(&view);
  return result;
}

py::bytes hash_blocks(const py::buffer& data, uint64_t block) {
  if (block == 0) throw py::value_error("[hash] blocks of 0 bytes");
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  const uint64_t bytes = static_cast<uint64_t>(view.len);
  std::vector<uint64_t> hashes(2 * (bytes / block + (bytes % block != 0)));
  {
    py::gil_scoped_release release;
    perseus_hash_blocks(view.buf, bytes, block, hashes.data());
  }
  PyBuffer_Release(&view);
  return py::bytes(reinterpret_cast<const char*>(hashes.data()), hashes.size() * sizeof(uint64_t));
}

py::list config_table() {
  py::list rows;
  for (int i = 0; i < perseus_config_count(); ++i) {
    perseus_config_variable variable = {};
    variable.struct_size = sizeof(variable);
    check(perseus_config_describe(i, &variable));
    py::dict row;
    row["name"] = variable.name;
    row["aliases"] = variable.aliases;
    row["type"] = variable.type;
    row["default"] = variable.default_value;
    row["allowed"] = variable.allowed;
    row["help"] = variable.help;
    rows.append(row);
  }
  return rows;
}

}  // namespace
}  // namespace perseus::python

PYBIND11_MODULE(_core, module) {
  using namespace perseus::python;
  module.doc() = "Binding of the C ABI of Perseus (perseus/perseus.h).";
  module.def("version", &perseus_version);
  module.def(
      "find_cuda",
      [](bool count_devices) {
        perseus_cuda found = {};
        found.struct_size = sizeof(found);
        check(perseus_cuda_find(count_devices ? 1 : 0, &found));
        return py::make_tuple(found.version, found.devices);
      },
      py::arg("count_devices") = false,
      "(version, GPUs) of NVIDIA's driver: 12040 for CUDA 12.4; -1 GPUs unless they are counted, which keeps "
      "processes\n"
      "that are forked later from using them. Raises where there is no driver.");
  module.def(
      "find_nccl",
      [] {
        perseus_nccl found = {};
        found.struct_size = sizeof(found);
        check(perseus_nccl_find(&found));
        return py::make_tuple(found.version, std::string(found.path));
      },
      "(version, path) of NCCL, which is opened: 22304 for 2.23.4. Raises where there is none that can be used.");
  module.def(
      "inspection_signal", [](bool chain) { return perseus_inspection_signal(chain ? 1 : 0); },
      py::arg("chain") = false,
      "The signal at which this process logs what it waits for, once it has had a context; 0 = none. With chain, the "
      "core's handler comes back and calls the one that is there now.");
  module.def("leave_after_failure", &perseus_leave_after_failure,
             "An exception ends this process: MPI, if the core uses it, waits only seconds for the other ranks.");
  module.def("kernel_variant", &perseus_kernel_variant, "The instruction set the kernels use on this processor.");
  module.def("hash_bytes", &hash_bytes, "The 64-bit hash of a contiguous buffer, equal for equal bits on every rank.");
  module.def("hash_blocks", &hash_blocks, py::arg("data"), py::arg("block"),
             "16 bytes for every `block` bytes of a contiguous buffer, equal for equal bits on every rank.");
  module.def("config_table", &config_table, "Every configuration variable: dicts of texts.");
  module.def(
      "config_check", [] { check(perseus_config_check()); },
      "Checks the environment; raises InvalidArgumentError naming variable and value.");
  py::class_<StoreServer>(module, "StoreServer", "The key-value server through which ranks find each other.")
      .def(py::init<const std::string&, int, bool, const py::bytes&>(), py::arg("host") = "", py::arg("port") = 0,
           py::arg("next_free") = false, py::arg("secret") = py::bytes())
      .def_property_readonly("port", &StoreServer::port)
      .def("abandon", &StoreServer::abandon, py::arg("job"), py::arg("epoch"), py::arg("rank"), py::arg("why"),
           "Ends the start of a world for all ranks that still wait for one that will not come.")
      .def("close", &StoreServer::close);
  module.def(
      "launched_store", &launched_store, py::arg("environment") = py::none(),
      "Host, port and secret of the store of the job that this process was launched in, agreed on with all ranks.");
  module.def("launched_identity", &launched_identity, py::arg("environment") = py::none(),
             "Rank, size, local rank, local size, cross rank, cross size and launcher, by the launcher's variables.");
  bind_speeds(module);
  bind_context(module);
  if (!bind_operations(module.ptr())) throw py::error_already_set();
}
