// The core's handle with the results, and the op whose call keeps its world.
#include "gathered.h"

namespace perseus::mxnet {

Gathered::Gathered(const perseus_mxnet_op& op) {
  std::vector<std::unique_ptr<Call>> calls;
  calls.push_back(std::make_unique<Call>(op));
  op_ = std::make_shared<EngineOp>(std::move(calls));
  outcome_ = EngineOp::push_waited(op_).get();
  if (outcome_.code != PERSEUS_OK) throw std::runtime_error(outcome_.message);
}

Gathered::~Gathered() {
  if (outcome_.handle != 0) perseus_handle_release(op_->call().context(), outcome_.handle);
}

perseus_output Gathered::output(int index) const {
  perseus_output output = {};
  output.struct_size = sizeof(output);
  if (perseus_handle_output(op_->call().context(), outcome_.handle, index, &output) != PERSEUS_OK)
    throw std::runtime_error(perseus_error_message());
  return output;
}

}  // namespace perseus::mxnet
