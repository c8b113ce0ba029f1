// The core's handle with the results, and the call that keeps its world.
#include "gathered.h"

namespace perseus::mxnet {

Gathered::Gathered(const perseus_mxnet_op& op) : call_(std::make_shared<Call>(op)) {
  outcome_ = Call::push_waited(call_).get();
  if (outcome_.code != PERSEUS_OK) throw std::runtime_error(outcome_.message);
}

Gathered::~Gathered() {
  if (outcome_.handle != 0) perseus_handle_release(call_->context(), outcome_.handle);
}

perseus_output Gathered::output(int index) const {
  perseus_output output = {};
  output.struct_size = sizeof(output);
  if (perseus_handle_output(call_->context(), outcome_.handle, index, &output) != PERSEUS_OK)
    throw std::runtime_error(perseus_error_message());
  return output;
}

}  // namespace perseus::mxnet
