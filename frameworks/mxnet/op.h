// A collective as Python describes it; see perseus/mxnet/library.py. Plain data; the caller owns the memory.
#pragma once

#include <cstdint>

extern "C" {

struct perseus_mxnet_op {
  int kind;          // perseus_kind
  int grouped;       // one operation of several arrays, with its own name
  const char* name;  // without the kind's prefix; NULL: the group's next number
  int group;
  int op;  // perseus_reduce_op
  double prescale, postscale;
  int root;
  int priority;  // the engine's and the core's
  uint64_t gradient_of;
  int codec;
  double codec_argument;
  double learning_rate;  // see perseus_request
  void* const* inputs;   // NDArrays
  void* const* outputs;  // the inputs again for in place; NULL if the core allocates the results
  int count;
  void* outcome;          // NULL or an NDArray of one int32: a perseus_gradient
  const int64_t* splits;  // alltoall; NULL: equal parts
  int split_count;
};

}  // extern "C"
