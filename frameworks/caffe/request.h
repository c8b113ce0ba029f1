// One allreduce or broadcast of one tensor, as this library submits them. Any thread.
#pragma once

#include <vector>

#include "perseus/perseus.h"

namespace perseus {

struct Request {
  perseus_kind kind;
  perseus_reduce_op op;
  const char* name;
  const void* input;
  void* output;  // may equal `input`
  std::vector<int64_t> shape;
  perseus_dtype dtype;
  uint64_t gradient_of = 0;  // 0 = not a gradient, so exact
  int codec = PERSEUS_CODEC_SETTINGS;
  double codec_argument = 0;
  double learning_rate = 0;  // see perseus_request
};

// Submits the request and returns at once. `input` must not change, nor `output` be read, until the handle is done.
perseus_code submit(perseus_context* context, const Request& request, perseus_handle* handle);
// Waits for the handle, releases it, and returns the outcome.
perseus_code wait_and_release(perseus_context* context, perseus_handle handle);

}  // namespace perseus
