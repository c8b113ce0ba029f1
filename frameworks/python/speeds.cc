// Speeds of links and codecs.
#include "speeds.h"

#include <pybind11/stl.h>

#include <vector>

#include "perseus/perseus.h"

namespace py = pybind11;

namespace perseus::python {

void bind_speeds(py::module_& module) {
  py::class_<perseus_speeds>(module, "Speeds", "What a group's links and the codecs were measured to cost.")
      .def_readonly("measurement", &perseus_speeds::measurement)
      .def_readonly("groups", &perseus_speeds::groups)
      .def_readonly("shards", &perseus_speeds::shards)
      .def_readonly("latency_s", &perseus_speeds::latency_s)
      .def_readonly("seconds_per_byte", &perseus_speeds::seconds_per_byte)
      .def(
          "estimate",
          [](const perseus_speeds& self, int codec, uint64_t bytes, uint64_t narrow) {
            return perseus_speeds_estimate(&self, codec, bytes, narrow);
          },
          py::arg("codec"), py::arg("bytes"), py::arg("narrow") = 0,
          "Seconds for a float32 tensor through a codec, -1 for one that auto does not choose.")
      .def(
          "narrow",
          [](const perseus_speeds& self, const std::vector<int64_t>& shape) {
            return perseus_speeds_narrow(&self, shape.data(), static_cast<int>(shape.size()));
          },
          py::arg("shape"), "The bytes that PowerSGD sends for a tensor, 0 if it does not serve it.")
      .def(
          "choose",
          [](const perseus_speeds& self, const std::vector<int64_t>& shape) {
            return perseus_speeds_choose(&self, shape.data(), static_cast<int>(shape.size()));
          },
          py::arg("shape"), "The codec that auto takes for a float32 tensor, after the warm-up.");
}

}  // namespace perseus::python
