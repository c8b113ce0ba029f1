// The request of one op that XLA compiles: made at compile time, kept in the program as text. Stateless.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "perseus/perseus.h"

namespace perseus::tensorflow::xla {

struct PlannedTensor {
  perseus_dtype dtype = PERSEUS_FLOAT32;
  std::vector<int64_t> shape;
  std::vector<int64_t> result;  // the result's shape, which XLA needs beforehand
};

struct Plan {
  perseus_kind kind = PERSEUS_ALLREDUCE;
  int group = 0;
  int op = PERSEUS_SUM;
  double prescale = 1.0, postscale = 1.0;
  int root = 0;
  int priority = 0;
  bool with_outcome = false;
  bool with_rate = false;  // the last input is the learning rate
  uint64_t gradient_of = 0;
  int codec = 0;
  double codec_argument = 0.0;
  std::string name;
  std::vector<PlannedTensor> tensors;
};

// Reads a node's attributes, without tensors; false if the construction has failed. construction: TensorFlow's.
bool read_plan(perseus_kind kind, void* construction, Plan* plan);

// Of letters, digits and " -./>%_" only.
std::string to_text(const Plan& plan);
Plan from_text(std::string_view text);

size_t bytes_of(perseus_dtype dtype, const std::vector<int64_t>& shape);

// Horovod's word for the op, with which errors begin.
const char* label_of(perseus_kind kind);

}  // namespace perseus::tensorflow::xla
