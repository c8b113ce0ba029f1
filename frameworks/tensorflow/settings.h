// The settings of one kernel, read from its node's attributes when TensorFlow creates it. Constant afterwards.
#pragma once

#include <cstdint>
#include <string>

#include "perseus/perseus.h"
#include "tf_c_api.h"

namespace perseus::tensorflow {

struct Settings {
  perseus_kind kind = PERSEUS_ALLREDUCE;
  const char* label = "";  // Horovod's word for the op, with which its errors begin
  std::string prefix;      // of the core's names
  std::string name;        // the core's; empty for an op that is numbered when it runs
  bool eager = false;      // the thread that runs the op waits for it
  int group = 0;
  perseus_reduce_op op = PERSEUS_SUM;
  double prescale = 1.0, postscale = 1.0;
  int root = 0;
  int priority = 0;
  bool with_splits = false;
  bool with_outcome = false;  // the last output is the gradient's outcome
  bool with_rate = false;     // the last input is the learning rate
  uint64_t gradient_of = 0;
  int codec = 0;
  double codec_argument = 0.0;
};

// Null if the construction has failed.
Settings* read_settings(perseus_kind kind, TF_OpKernelConstruction* construction);

}  // namespace perseus::tensorflow
