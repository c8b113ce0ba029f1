// The owner of a call keeps it until it has ended. Inputs and outputs live that long, so their memory is used directly.
#include "call.h"

#include <utility>

namespace perseus::mxnet {
namespace {

struct Prefixes {
  const char* plain;
  const char* grouped;
};

// By kind; the same as in the other adapters.
constexpr Prefixes kPrefixes[] = {
    {"allreduce.", "grouped_allreduce."},         {"allgather.", "grouped_allgather."},
    {"broadcast.", "grouped_broadcast."},         {"alltoall.", "grouped_alltoall."},
    {"reducescatter.", "grouped_reducescatter."},
};

void check(int status) {
  if (status != 0) throw std::runtime_error(api().last_error());
}

struct CoreDtype {
  perseus_dtype dtype;
  size_t size;
};

CoreDtype core_dtype(int dtype) {
  switch (dtype) {
    case kFloat32:
      return {PERSEUS_FLOAT32, 4};
    case kFloat64:
      return {PERSEUS_FLOAT64, 8};
    case kFloat16:
      return {PERSEUS_FLOAT16, 2};
    case kUint8:
      return {PERSEUS_UINT8, 1};
    case kInt32:
      return {PERSEUS_INT32, 4};
    case kInt8:
      return {PERSEUS_INT8, 1};
    case kInt64:
      return {PERSEUS_INT64, 8};
    case kBool:
      return {PERSEUS_BOOL, 1};
    case kBfloat16:
      return {PERSEUS_BFLOAT16, 2};
    default:
      throw std::runtime_error("[mxnet] MXNet's data type " + std::to_string(dtype) + " is not supported");
  }
}

}  // namespace

SharedArray::SharedArray(NDArray array) { check(api().shallow_copy(array, &array_)); }

SharedArray& SharedArray::operator=(SharedArray&& other) noexcept {
  std::swap(array_, other.array_);
  return *this;
}

SharedArray::~SharedArray() {
  if (array_ != nullptr) api().free_array(array_);
}

Call::Call(const perseus_mxnet_op& op) {
  const auto kind = static_cast<perseus_kind>(op.kind);
  name_ = op.grouped != 0 ? kPrefixes[kind].grouped : kPrefixes[kind].plain;
  request_.struct_size = sizeof(request_);
  request_.kind = kind;
  request_.group = op.group;
  request_.op = static_cast<perseus_reduce_op>(op.op);
  request_.prescale = op.prescale;
  request_.postscale = op.postscale;
  request_.root = op.root;
  request_.priority = op.priority;
  request_.gradient_of = op.gradient_of;
  request_.codec = op.codec;
  request_.codec_argument = op.codec_argument;
  request_.learning_rate = op.learning_rate;
  if (op.name != nullptr) {
    name_ += op.name;
  } else {
    // Taken in the order of the calls, which is the same on all ranks; the engine's order may differ.
    const WorldUse world;
    if (world.context() == nullptr) throw std::runtime_error(kNotInitialized);
    name_ += "noname." + std::to_string(perseus_group_next_number(world.context(), op.group));
    request_.transient = 1;
  }
  if (op.splits != nullptr) {
    splits_.reserve(1);  // an empty list is not "no splits"
    splits_.assign(op.splits, op.splits + op.split_count);
    request_.splits = splits_.data();
    request_.split_count = op.split_count;
  }
  tensors_.reserve(static_cast<size_t>(op.count));
  for (int i = 0; i < op.count; ++i) add_tensor(op.inputs[i], op.outputs == nullptr ? nullptr : op.outputs[i]);
  if (op.outcome != nullptr) gradient_outcome_ = SharedArray(op.outcome);
}

void Call::add_tensor(NDArray input, NDArray output) {
  Tensor& tensor = tensors_.emplace_back();
  int dims = 0, dtype = 0;
  const int64_t* shape = nullptr;
  check(api().shape(input, &dims, &shape));
  if (dims > 0) tensor.shape.assign(shape, shape + dims);
  check(api().dtype(input, &dtype));
  const CoreDtype core = core_dtype(dtype);
  tensor.core.dtype = core.dtype;
  tensor.core.shape = tensor.shape.data();
  tensor.core.ndim = static_cast<int>(tensor.shape.size());
  size_t bytes = core.size;
  for (const int64_t extent : tensor.shape) bytes *= static_cast<size_t>(extent);
  bytes_ += bytes;
  tensor.input = SharedArray(input);
  tensor.in_place = output == input;
  if (output != nullptr && !tensor.in_place) tensor.output = SharedArray(output);
}

bool Call::read_data(std::string* wrong) {
  for (Tensor& tensor : tensors_) {
    void* data = nullptr;
    api().reorder(chunk_of(tensor.input.get()));
    int status = api().data(tensor.input.get(), &data);
    tensor.core.input = data;
    if (tensor.in_place) {
      tensor.core.output = data;
    } else if (tensor.output.get() != nullptr && status == 0) {
      api().reorder(chunk_of(tensor.output.get()));
      status = api().data(tensor.output.get(), &tensor.core.output);
    }
    if (status != 0) {
      *wrong = api().last_error();
      return false;
    }
  }
  return true;
}

perseus_handle Call::start(CallOwner* owner, bool at_once, bool keep_results) {
  owner_ = owner;
  keep_results_ = keep_results;
  world_.emplace();
  Outcome outcome;
  if (world_->context() == nullptr) {
    outcome.code = PERSEUS_ABORTED;
    outcome.message = kNotInitialized;
  } else if (!read_data(&outcome.message)) {
    outcome.code = PERSEUS_INTERNAL;
  } else {
    perseus_handle handle = 0;
    outcome.code = submit(at_once ? nullptr : &Call::done, &handle);
    if (outcome.code == PERSEUS_OK) {
      // Do not touch the call from here on: it may have ended, unless only this thread can end it.
      if (!at_once) return handle;
      perseus_handle_wait(world_->context(), handle, -1);
      done(this, handle);
      return 0;
    }
    outcome.message = perseus_error_message();
  }
  end(std::move(outcome));
  return 0;
}

perseus_code Call::submit(void (*done)(void*, perseus_handle), perseus_handle* handle) {
  std::vector<perseus_tensor> tensors;
  tensors.reserve(tensors_.size());
  for (const Tensor& tensor : tensors_) tensors.push_back(tensor.core);
  request_.name = name_.c_str();
  request_.tensors = tensors.data();
  request_.tensor_count = static_cast<int>(tensors.size());
  request_.done = done;
  request_.done_arg = this;
  return perseus_request_submit(world_->context(), &request_, handle);
}

void Call::done(void* self, perseus_handle handle) {
  auto* const call = static_cast<Call*>(self);
  perseus_context* const core = call->world_->context();
  Outcome outcome;
  outcome.code = perseus_handle_wait(core, handle, 0);
  if (outcome.code != PERSEUS_OK) outcome.message = perseus_error_message();
  void* gradient = nullptr;
  if (call->gradient_outcome_.get() != nullptr && api().data(call->gradient_outcome_.get(), &gradient) == 0)
    *static_cast<int32_t*>(gradient) = perseus_handle_gradient(core, handle);
  if (call->keep_results_ && outcome.code == PERSEUS_OK) outcome.handle = handle;
  else perseus_handle_release(core, handle);
  call->end(std::move(outcome));
}

void Call::end(Outcome outcome) {
  if (outcome.handle == 0) world_.reset();  // the world may end before MXNet goes on
  owner_->ended(std::move(outcome));
}

}  // namespace perseus::mxnet
