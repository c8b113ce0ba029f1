// See request.h.
#include "request.h"

namespace perseus {

perseus_code submit(perseus_context* context, const Request& request, perseus_handle* handle) {
  const perseus_tensor tensor{request.input, request.output, request.shape.data(),
                              static_cast<int>(request.shape.size()), request.dtype};
  perseus_request submitted{};
  submitted.struct_size = sizeof submitted;
  submitted.kind = request.kind;
  submitted.name = request.name;
  submitted.tensors = &tensor;
  submitted.tensor_count = 1;
  submitted.op = request.op;
  submitted.prescale = submitted.postscale = 1.0;
  submitted.gradient_of = request.gradient_of;
  submitted.codec = request.codec;
  submitted.codec_argument = request.codec_argument;
  submitted.learning_rate = request.learning_rate;
  submitted.transient = request.kind == PERSEUS_BROADCAST;
  return perseus_request_submit(context, &submitted, handle);
}

perseus_code wait_and_release(perseus_context* context, perseus_handle handle) {
  const perseus_code code = perseus_handle_wait(context, handle, -1);
  perseus_handle_release(context, handle);
  return code;
}

}  // namespace perseus
