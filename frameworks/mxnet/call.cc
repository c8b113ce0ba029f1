// The engine keeps a call alive until it was told that the op is done; inputs and outputs live that long, so their
// memory is used as it is.
#include "call.h"

#include <algorithm>
#include <utility>

namespace perseus::mxnet {
namespace {

struct Words {
  const char* plain;
  const char* grouped;
  const char* op;  // in MXNet's profiler
};

// By kind. The prefixes are those of the other adapters.
constexpr Words kWords[] = {
    {"allreduce.", "grouped_allreduce.", "PerseusAllreduce"},
    {"allgather.", "grouped_allgather.", "PerseusAllgather"},
    {"broadcast.", "grouped_broadcast.", "PerseusBroadcast"},
    {"alltoall.", "grouped_alltoall.", "PerseusAlltoall"},
    {"reducescatter.", "grouped_reducescatter.", "PerseusReducescatter"},
};

constexpr Device kCpu;

void check(int status) {
  if (status != 0) throw std::runtime_error(api().last_error());
}

perseus_dtype core_dtype(int dtype) {
  switch (dtype) {
    case kFloat32:
      return PERSEUS_FLOAT32;
    case kFloat64:
      return PERSEUS_FLOAT64;
    case kFloat16:
      return PERSEUS_FLOAT16;
    case kUint8:
      return PERSEUS_UINT8;
    case kInt32:
      return PERSEUS_INT32;
    case kInt8:
      return PERSEUS_INT8;
    case kInt64:
      return PERSEUS_INT64;
    case kBool:
      return PERSEUS_BOOL;
    case kBfloat16:
      return PERSEUS_BFLOAT16;
    default:
      throw std::runtime_error("[mxnet] MXNet's data type " + std::to_string(dtype) + " is not supported");
  }
}

// The engine wants each variable once, and views of one array share theirs.
bool is_new(NDArray array, std::vector<void*>* seen) {
  void* const chunk = chunk_of(array);
  if (std::find(seen->begin(), seen->end(), chunk) != seen->end()) return false;
  seen->push_back(chunk);
  return true;
}

void reorder_to_default(void*, void* array) { api().reorder(chunk_of(*static_cast<NDArray*>(array))); }

void free_shared_array(void* array) {
  auto* const shared = static_cast<NDArray*>(array);
  api().free_array(*shared);
  delete shared;
}

// Where an op that is run by the push itself says what went wrong; null outside of a push. The engine that does so
// (NaiveEngine) knows no errors of asynchronous ops, and wants them done on return.
thread_local std::string* failure_within_push = nullptr;

// An array that an op only reads must not change under others that read it: an op of its own does what is to be done.
void push_reorder(NDArray array, int priority) {
  auto* const shared = new NDArray(nullptr);
  check(api().shallow_copy(array, shared));
  check(api().push_sync(reorder_to_default, shared, free_shared_array, &kCpu, nullptr, 0, &array, 1, &kPrioritized,
                        priority, "PerseusReorder"));
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
  name_ = op.grouped != 0 ? kWords[kind].grouped : kWords[kind].plain;
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
  if (op.name != nullptr) {
    name_ += op.name;
  } else {
    // Drawn in the order of the calls, which is the same on all ranks; the engine's need not be.
    const WorldUse world;
    if (world.context() == nullptr) throw std::runtime_error(perseus::tensorflow::kNotInitialized);
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
  tensor.core.dtype = core_dtype(dtype);
  tensor.core.shape = tensor.shape.data();
  tensor.core.ndim = static_cast<int>(tensor.shape.size());
  tensor.input = SharedArray(input);
  tensor.in_place = output == input;
  if (output != nullptr && !tensor.in_place) tensor.output = SharedArray(output);
}

void Call::push(std::shared_ptr<Call> call) { push_to_engine(call); }

std::future<Outcome> Call::push_waited(const std::shared_ptr<Call>& call) {
  std::future<Outcome> outcome = call->waited_.emplace().get_future();
  push_to_engine(call);
  return outcome;
}

void Call::push_to_engine(const std::shared_ptr<Call>& call) {
  std::vector<NDArray> read, written;
  std::vector<void*> seen;
  for (const Tensor& tensor : call->tensors_) {
    const NDArray output = tensor.in_place ? tensor.input.get() : tensor.output.get();
    if (output != nullptr && is_new(output, &seen)) written.push_back(output);
  }
  const NDArray gradient_outcome = call->gradient_outcome_.get();
  if (gradient_outcome != nullptr && is_new(gradient_outcome, &seen)) written.push_back(gradient_outcome);
  for (const Tensor& tensor : call->tensors_) {
    if (tensor.in_place || !is_new(tensor.input.get(), &seen)) continue;
    read.push_back(tensor.input.get());
    // With one dimension there is only one layout.
    if (tensor.core.ndim > 1) push_reorder(tensor.input.get(), call->request_.priority);
  }
  std::string failure;
  failure_within_push = &failure;
  const int status = api().push_async(run, new std::shared_ptr<Call>(call), drop, &kCpu, read.data(),
                                      static_cast<int>(read.size()), written.data(), static_cast<int>(written.size()),
                                      &kPrioritized, call->request_.priority, kWords[call->request_.kind].op, false);
  failure_within_push = nullptr;
  check(status);
  if (!failure.empty()) throw std::runtime_error(failure);
}

void Call::run(void*, void* on_complete, void* shared_call) {
  (*static_cast<std::shared_ptr<Call>*>(shared_call))->start(*static_cast<const Completion*>(on_complete));
}

void Call::drop(void* shared_call) {
  auto* const call = static_cast<std::shared_ptr<Call>*>(shared_call);
  if ((*call)->waited_ && (*call)->completion_.callback == nullptr) {
    Outcome outcome;
    outcome.skipped = true;
    (*call)->waited_->set_value(outcome);
  }
  delete call;
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

void Call::start(const Completion& completion) {
  completion_ = completion;
  const bool at_once = failure_within_push != nullptr;
  world_.emplace();
  Outcome outcome;
  if (world_->context() == nullptr) {
    outcome.code = PERSEUS_ABORTED;
    outcome.message = perseus::tensorflow::kNotInitialized;
  } else if (!read_data(&outcome.message)) {
    outcome.code = PERSEUS_INTERNAL;
  } else {
    // Once it is handed over, this may have ended already; but not where it is to be waited for.
    perseus_handle handle = 0;
    outcome.code = submit(at_once ? nullptr : &Call::done, &handle);
    if (outcome.code == PERSEUS_OK && at_once) {
      perseus_handle_wait(world_->context(), handle, -1);
      return done(this, handle);
    }
    if (outcome.code == PERSEUS_OK) return;
    outcome.message = perseus_error_message();
  }
  end(std::move(outcome));
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
  if (call->waited_ && outcome.code == PERSEUS_OK) outcome.handle = handle;
  else perseus_handle_release(core, handle);
  call->end(std::move(outcome));
}

void Call::end(Outcome outcome) {
  const Completion completion = completion_;
  if (outcome.handle == 0) world_.reset();  // the world may end before MXNet goes on
  if (waited_) {
    // Whoever waits may let go of this call then; the engine still holds it.
    waited_->set_value(std::move(outcome));
    return completion.run(nullptr);
  }
  if (outcome.code == PERSEUS_OK) return completion.run(nullptr);
  if (failure_within_push != nullptr) {
    *failure_within_push = outcome.message;
    return completion.run(nullptr);
  }
  const std::runtime_error error(outcome.message);
  completion.run(&error);
}

}  // namespace perseus::mxnet
