// A call owns itself until it has told TensorFlow that the op is done. Inputs live that long, so their memory is used
// directly; outputs of equal shape take an input's memory if nothing else uses it.
#include "call.h"

#include <cstring>
#include <string>
#include <vector>

#include "../world/world.h"
#include "dtypes.h"
#include "status.h"

namespace perseus::tensorflow {
namespace {

struct TensorDeleter {
  void operator()(TF_Tensor* tensor) const { TF_DeleteTensor(tensor); }
};
using OwnedTensor = std::unique_ptr<TF_Tensor, TensorDeleter>;

std::vector<int64_t> shape_of(const TF_Tensor* tensor) {
  std::vector<int64_t> shape(static_cast<size_t>(TF_NumDims(tensor)));
  for (size_t i = 0; i < shape.size(); ++i) shape[i] = TF_Dim(tensor, static_cast<int>(i));
  return shape;
}

class Call {
 public:
  Call(const Settings& settings, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done)
      : settings_(settings), context_(context), completion_(done) {}

  // May end, and delete, the call.
  void start();

 private:
  // Where a tensor comes from and goes to.
  struct Tensor {
    int dtype = 0;
    size_t bytes = 0;
    bool in_place = false;
    std::vector<int64_t> shape;
    perseus_tensor core = {};
  };

  // Each of these is false with the op's failure stated.
  bool prepare();
  bool read(int index, Tensor* tensor);
  bool make_output(int index, Tensor* tensor);
  bool read_splits();
  bool read_rate();
  bool hand_over(perseus_handle* handle);
  void name(perseus_request* request);
  bool finish(perseus_handle handle);
  bool give_tensors(perseus_handle handle);
  bool give_tensor(perseus_handle handle, int index, const perseus_output& output);
  bool give_numbers(int index, const int32_t* numbers, int count, bool scalar);

  bool fail(int code, const std::string& what);
  bool checked() { return status_.ok() || fail(TF_GetCode(status_.get()), TF_Message(status_.get())); }
  // The request's handle is done.
  static void done(void* call, perseus_handle handle);
  // The op has failed on this rank before it began. It tells the other ranks, which would otherwise wait, and ends when
  // they know, since it may come again.
  void refuse();
  static void refused(void* call, perseus_handle handle);
  void end();

  const Settings& settings_;
  TF_OpKernelContext* const context_;
  Completion completion_;
  WorldUse world_;
  OwnedStatus status_;
  std::string failure_;
  std::string number_;  // the name of an unnamed op
  std::vector<Tensor> tensors_;
  std::vector<int64_t> splits_;
  double learning_rate_ = 0.0;
};

bool Call::fail(int code, const std::string& what) {
  failure_ = what;
  const OwnedStatus failure(code, std::string(settings_.label) + ": " + what);
  TF_OpKernelContext_Failure(context_, failure.get());
  return false;
}

void Call::end() {
  Completion completion = std::move(completion_);
  delete this;  // the world may end before TensorFlow goes on
  completion.run();
}

void Call::start() {
  if (!prepare()) return refuse();
  const bool eager = settings_.eager;
  perseus_context* const core = world_.context();
  perseus_handle handle = 0;
  if (!hand_over(&handle)) return refuse();
  // Do not touch the call from here on, except in eager mode: there this thread waits, and makes progress itself, which
  // is faster than being notified. In a graph it has other ops to run.
  if (!eager) return;
  perseus_handle_wait(core, handle, -1);
  done(this, handle);
}

bool Call::read(int index, Tensor* tensor) {
  TF_Tensor* raw = nullptr;
  TF_GetInput(context_, index, &raw, status_.get());
  if (!checked()) return false;
  const OwnedTensor input(raw);
  tensor->dtype = TF_TensorType(raw);
  tensor->bytes = TF_TensorByteSize(raw);
  tensor->shape = shape_of(raw);
  perseus_dtype dtype;
  if (!core_dtype(tensor->dtype, settings_.kind, &dtype))
    return fail(TF_INVALID_ARGUMENT, "TensorFlow's data type " + std::to_string(tensor->dtype) + " is not supported.");
  tensor->core = {TF_TensorData(raw), nullptr, tensor->shape.data(), static_cast<int>(tensor->shape.size()), dtype};
  return true;
}

bool Call::make_output(int index, Tensor* tensor) {
  const std::vector<int64_t>& shape = tensor->shape;
  const auto dims = static_cast<int>(shape.size());
  if (settings_.kind == PERSEUS_ALLREDUCE || settings_.kind == PERSEUS_BROADCAST) {
    int forwarded = -1;
    const OwnedTensor output(
        TF_ForwardInputOrAllocateOutput(context_, &index, 1, index, shape.data(), dims, &forwarded, status_.get()));
    if (!checked()) return false;
    tensor->core.output = TF_TensorData(output.get());
    tensor->in_place = forwarded == index;
  } else if (settings_.kind == PERSEUS_REDUCESCATTER) {
    if (shape.empty()) return true;  // refused on every rank in one message, by the core
    std::vector<int> ranks(static_cast<size_t>(perseus_context_size(world_.context())));
    const int size =
        perseus_group_ranks(world_.context(), settings_.group, ranks.data(), static_cast<int>(ranks.size()));
    if (size <= 0) return true;  // the core reports the error
    const int self = perseus_context_rank(world_.context());
    int rank = 0;
    while (rank < size - 1 && ranks[static_cast<size_t>(rank)] != self) ++rank;
    std::vector<int64_t> part = shape;
    part[0] = shape[0] / size + (rank < shape[0] % size ? 1 : 0);
    const size_t bytes =
        shape[0] == 0 ? 0 : tensor->bytes / static_cast<size_t>(shape[0]) * static_cast<size_t>(part[0]);
    const OwnedTensor output(
        TF_AllocateOutput(context_, index, tensor->dtype, part.data(), dims, bytes, status_.get()));
    if (!checked()) return false;
    tensor->core.output = TF_TensorData(output.get());
  }
  return true;
}

bool Call::read_splits() {
  TF_Tensor* raw = nullptr;
  TF_GetInput(context_, 1, &raw, status_.get());
  if (!checked()) return false;
  const OwnedTensor splits(raw);
  if (TF_NumDims(raw) != 1) return fail(TF_INVALID_ARGUMENT, "alltoall expects a 1D splits tensor");
  const auto* values = static_cast<const int32_t*>(TF_TensorData(raw));
  splits_.assign(values, values + TF_Dim(raw, 0));
  return true;
}

bool Call::read_rate() {
  TF_Tensor* raw = nullptr;
  TF_GetInput(context_, static_cast<int>(tensors_.size()), &raw, status_.get());
  if (!checked()) return false;
  const OwnedTensor rate(raw);
  if (TF_NumDims(raw) != 0) return fail(TF_INVALID_ARGUMENT, "the learning rate must be a scalar");
  learning_rate_ = *static_cast<const double*>(TF_TensorData(raw));
  return true;
}

bool Call::prepare() {
  if (world_.context() == nullptr) return fail(TF_FAILED_PRECONDITION, kNotInitialized);
  if (settings_.kind == PERSEUS_REDUCESCATTER && settings_.op != PERSEUS_AVERAGE && settings_.op != PERSEUS_SUM)
    return fail(TF_ABORTED, "Reducescatter only supports AVERAGE and SUM");
  const int inputs = TF_NumInputs(context_) - (settings_.with_rate ? 1 : 0);
  tensors_.resize(static_cast<size_t>(settings_.kind == PERSEUS_ALLTOALL ? 1 : inputs));
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (!read(static_cast<int>(i), &tensors_[i]) || !make_output(static_cast<int>(i), &tensors_[i])) return false;
  return (!settings_.with_splits || read_splits()) && (!settings_.with_rate || read_rate());
}

void Call::name(perseus_request* request) {
  request->name = settings_.name.c_str();
  if (!settings_.name.empty()) return;
  if (number_.empty()) {
    // -1 outside of the group, which the core refuses.
    const auto number = static_cast<long long>(perseus_group_next_number(world_.context(), settings_.group));
    number_ = settings_.prefix + "noname." + std::to_string(number);
  }
  request->name = number_.c_str();
  request->transient = 1;
}

bool Call::hand_over(perseus_handle* handle) {
  perseus_request request = {};
  request.struct_size = sizeof(request);
  request.kind = settings_.kind;
  request.group = settings_.group;
  name(&request);
  std::vector<perseus_tensor> tensors;
  tensors.reserve(tensors_.size());
  for (const Tensor& tensor : tensors_) tensors.push_back(tensor.core);
  request.tensors = tensors.data();
  request.tensor_count = static_cast<int>(tensors.size());
  request.op = settings_.op;
  request.prescale = settings_.prescale;
  request.postscale = settings_.postscale;
  request.root = settings_.root;
  if (settings_.with_splits) {
    splits_.reserve(1);  // an empty list is not "no splits"
    request.splits = splits_.data();
    request.split_count = static_cast<int>(splits_.size());
  }
  request.priority = settings_.priority;
  request.gradient_of = settings_.gradient_of;
  request.codec = settings_.codec;
  request.codec_argument = settings_.codec_argument;
  request.learning_rate = learning_rate_;
  if (!settings_.eager) {
    request.done = &Call::done;
    request.done_arg = this;
  }
  const perseus_code code = perseus_request_submit(world_.context(), &request, handle);
  return code == PERSEUS_OK || fail(tf_code(code), perseus_error_message());
}

void Call::done(void* self, perseus_handle handle) {
  auto* call = static_cast<Call*>(self);
  call->finish(handle);
  perseus_handle_release(call->world_.context(), handle);
  call->end();
}

void Call::refuse() {
  perseus_context* const core = world_.context();
  if (core == nullptr) return end();
  const bool eager = settings_.eager;
  perseus_request request = {};
  request.struct_size = sizeof(request);
  request.kind = settings_.kind;
  request.group = settings_.group;
  name(&request);
  request.refusal = failure_.c_str();
  if (!eager) {
    request.done = &Call::refused;
    request.done_arg = this;
  }
  perseus_handle handle = 0;
  if (perseus_request_submit(core, &request, &handle) != PERSEUS_OK) return end();
  if (!eager) return;
  perseus_handle_wait(core, handle, -1);
  refused(this, handle);
}

void Call::refused(void* self, perseus_handle handle) {
  auto* call = static_cast<Call*>(self);
  perseus_handle_release(call->world_.context(), handle);
  call->end();
}

bool Call::finish(perseus_handle handle) {
  perseus_context* core = world_.context();
  const perseus_code code = perseus_handle_wait(core, handle, 0);
  if (code != PERSEUS_OK) return fail(tf_code(code), perseus_error_message());
  if (!give_tensors(handle)) return false;
  if (!settings_.with_outcome) return true;
  const int32_t outcome = perseus_handle_gradient(core, handle);
  for (const Tensor& tensor : tensors_)  // a gradient that was held has no result; no garbage in its place
    if (outcome == PERSEUS_GRADIENT_HELD && !tensor.in_place && tensor.bytes != 0)
      std::memset(tensor.core.output, 0, tensor.bytes);
  return give_numbers(static_cast<int>(tensors_.size()), &outcome, 1, true);
}

bool Call::give_tensors(perseus_handle handle) {
  if (settings_.kind != PERSEUS_ALLGATHER && settings_.kind != PERSEUS_ALLTOALL && settings_.kind != PERSEUS_JOIN)
    return true;
  const int count = settings_.kind == PERSEUS_JOIN ? 1 : static_cast<int>(tensors_.size());
  for (int i = 0; i < count; ++i) {
    perseus_output output = {};
    output.struct_size = sizeof(output);
    const perseus_code code = perseus_handle_output(world_.context(), handle, i, &output);
    if (code != PERSEUS_OK) return fail(tf_code(code), perseus_error_message());
    if (settings_.kind == PERSEUS_JOIN) {
      const auto last = static_cast<int32_t>(output.size);
      return give_numbers(0, &last, 1, true);
    }
    const std::vector<int32_t> received(output.received_splits, output.received_splits + output.received_split_count);
    if (!give_tensor(handle, i, output)) return false;
    if (settings_.kind == PERSEUS_ALLTOALL)
      return give_numbers(1, received.data(), static_cast<int>(received.size()), false);
  }
  return true;
}

bool Call::give_tensor(perseus_handle handle, int index, const perseus_output& output) {
  const int dtype = tensors_[static_cast<size_t>(index)].dtype;
  const std::vector<int64_t> shape(output.shape, output.shape + output.ndim);
  const size_t bytes = output.size;
  OwnedTensor tensor;
  if (bytes == 0) {
    tensor.reset(TF_AllocateTensor(dtype, shape.data(), output.ndim, 0));
  } else {
    void* data = perseus_handle_take_output(world_.context(), handle, index);
    tensor.reset(TF_NewTensor(
        dtype, shape.data(), static_cast<int>(shape.size()), data, bytes,
        [](void* memory, size_t, void*) { perseus_buffer_free(memory); }, nullptr));
  }
  TF_SetOutput(context_, index, tensor.get(), status_.get());
  return checked();
}

bool Call::give_numbers(int index, const int32_t* numbers, int count, bool scalar) {
  const int64_t length = count;
  const size_t bytes = static_cast<size_t>(count) * sizeof(int32_t);
  const OwnedTensor output(TF_AllocateOutput(context_, index, TF_INT32, &length, scalar ? 0 : 1, bytes, status_.get()));
  if (!checked()) return false;
  if (bytes != 0) std::memcpy(TF_TensorData(output.get()), numbers, bytes);
  return true;
}

}  // namespace

void start_call(const Settings& settings, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  if (const char* doubt = convention_doubt(done)) {
    const OwnedStatus failure(TF_INTERNAL, doubt);
    TF_OpKernelContext_Failure(context, failure.get());
    TF_RunAsyncOpKernelDoneCallback(done);  // within the call it is right under every convention
    return;
  }
  (new Call(settings, context, done))->start();
}

}  // namespace perseus::tensorflow
