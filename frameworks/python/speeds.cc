// Speeds of links and codecs.
#include "speeds.h"

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
          [](const perseus_speeds& self, int codec, uint64_t bytes) {
            return perseus_speeds_estimate(&self, codec, bytes);
          },
          py::arg("codec"), py::arg("bytes"),
          "Seconds for a float32 tensor through a codec, -1 for one that auto does not choose.")
      .def(
          "choose", [](const perseus_speeds& self, uint64_t bytes) { return perseus_speeds_choose(&self, bytes); },
          py::arg("bytes"), "The codec that auto takes for a float32 tensor.");
}

}  // namespace perseus::python
