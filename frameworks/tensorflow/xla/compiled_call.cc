// The core's thread fills in results and failure before it marks the call as done, under the lock.
#include "compiled_call.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#include "status.h"

namespace perseus::tensorflow::xla {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

void CompiledCall::Buffer::operator()(void* memory) const { std::free(memory); }

CompiledCall::~CompiledCall() {
  for (void* data : gathered_) perseus_buffer_free(data);
}

void CompiledCall::fail(int code, const std::string& what) {
  failure_ = Failure{code, std::string(label_of(plan_.kind)) + ": " + what};
}

CompiledCall* CompiledCall::start(Plan plan, const void* const* inputs, Failure* failure) {
  auto* call = new CompiledCall(std::move(plan));
  if (call->submit(inputs, failure)) return call;
  delete call;
  return nullptr;
}

// False when there is no memory for a tensor.
bool CompiledCall::prepare(const void* const* inputs, std::vector<perseus_tensor>* tensors) {
  const auto allocate = [](std::vector<Memory>* list, size_t bytes) {
    list->emplace_back(std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment));
    return list->back().get();
  };
  for (size_t i = 0; i < plan_.tensors.size(); ++i) {
    const PlannedTensor& planned = plan_.tensors[i];
    const size_t bytes = bytes_of(planned.dtype, planned.shape);
    void* const input = allocate(&inputs_, bytes);
    void* output = plan_.kind == PERSEUS_ALLGATHER ? nullptr : input;
    if (plan_.kind == PERSEUS_REDUCESCATTER) output = allocate(&results_, bytes_of(planned.dtype, planned.result));
    if (input == nullptr || (output == nullptr && plan_.kind != PERSEUS_ALLGATHER)) return false;
    if (bytes != 0) std::memcpy(input, inputs[i], bytes);
    tensors->push_back({input, output, planned.shape.data(), static_cast<int>(planned.shape.size()), planned.dtype});
  }
  return true;
}

bool CompiledCall::submit(const void* const* inputs, Failure* failure) {
  world_.emplace();
  perseus_context* const core = world_->context();
  if (core == nullptr) {
    *failure = {TF_FAILED_PRECONDITION, std::string(label_of(plan_.kind)) + ": " + kNotInitialized};
    return false;
  }
  perseus_request request = {};
  request.struct_size = sizeof(request);
  request.kind = plan_.kind;
  request.group = plan_.group;
  request.name = plan_.name.c_str();
  request.op = static_cast<perseus_reduce_op>(plan_.op);
  request.prescale = plan_.prescale;
  request.postscale = plan_.postscale;
  request.root = plan_.root;
  request.priority = plan_.priority;
  request.gradient_of = plan_.gradient_of;
  request.codec = plan_.codec;
  request.codec_argument = plan_.codec_argument;
  if (plan_.with_rate) std::memcpy(&request.learning_rate, inputs[plan_.tensors.size()], sizeof(double));
  request.done = &CompiledCall::done;
  request.done_arg = this;
  perseus_handle handle = 0;
  std::vector<perseus_tensor> tensors;
  std::string refusal;
  if (prepare(inputs, &tensors)) {
    request.tensors = tensors.data();
    request.tensor_count = static_cast<int>(tensors.size());
    const perseus_code code = perseus_request_submit(core, &request, &handle);
    if (code == PERSEUS_OK) return true;
    refusal = perseus_error_message();
    fail(tf_code(code), refusal);
  } else {
    refusal = "out of memory for '" + plan_.name + "': make batches or the model smaller";
    fail(TF_RESOURCE_EXHAUSTED, refusal);
  }
  // The call tells the other ranks, which would otherwise wait, and fails when they know, since it may come again.
  request.refusal = refusal.c_str();
  if (perseus_request_submit(core, &request, &handle) == PERSEUS_OK) return true;
  *failure = *failure_;
  return false;
}

void CompiledCall::done(void* self, perseus_handle handle) {
  auto* call = static_cast<CompiledCall*>(self);
  call->finish(handle);
  perseus_handle_release(call->world_->context(), handle);
  call->world_.reset();
  std::function<void(const Failure*)> ready;
  {
    const std::lock_guard<std::mutex> lock(call->mutex_);
    call->done_ = true;
    ready = std::move(call->ready_);
  }
  // A waiter that takes the lock later sees done_; without a waiter the call is no longer ours.
  if (ready) call->report(ready);
}

void CompiledCall::finish(perseus_handle handle) {
  if (failure_) return;  // refused by this rank
  perseus_context* core = world_->context();
  const perseus_code code = perseus_handle_wait(core, handle, 0);
  if (code != PERSEUS_OK) return fail(tf_code(code), perseus_error_message());
  if (plan_.kind == PERSEUS_ALLGATHER && !take_gathered(handle)) return;
  outcome_ = perseus_handle_gradient(core, handle);
  // A gradient that was held has no result; no garbage in its place.
  if (plan_.with_outcome && outcome_ == PERSEUS_GRADIENT_HELD)
    for (size_t i = 0; i < plan_.tensors.size(); ++i)
      std::memset(inputs_[i].get(), 0, bytes_of(plan_.tensors[i].dtype, plan_.tensors[i].shape));
}

bool CompiledCall::take_gathered(perseus_handle handle) {
  for (size_t i = 0; i < plan_.tensors.size(); ++i) {
    perseus_output output = {};
    output.struct_size = sizeof(output);
    const perseus_code code = perseus_handle_output(world_->context(), handle, static_cast<int>(i), &output);
    if (code != PERSEUS_OK) {
      fail(tf_code(code), perseus_error_message());
      return false;
    }
    if (output.size != bytes_of(plan_.tensors[i].dtype, plan_.tensors[i].result)) {
      fail(TF_INVALID_ARGUMENT,
           "ranks gave different numbers of rows, which a program of XLA cannot take: pass jit_compile=False");
      return false;
    }
    gathered_.push_back(output.size == 0 ? nullptr
                                         : perseus_handle_take_output(world_->context(), handle, static_cast<int>(i)));
  }
  return true;
}

void CompiledCall::when_done(std::function<void(const Failure*)> ready) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!done_) {
      ready_ = std::move(ready);
      return;
    }
  }
  report(ready);
}

void CompiledCall::report(const std::function<void(const Failure*)>& ready) {
  if (!failure_) return ready(nullptr);
  const Failure failure = *failure_;
  delete this;
  ready(&failure);
}

void CompiledCall::take(void* const* outputs) {
  for (size_t i = 0; i < plan_.tensors.size(); ++i) {
    const void* from = inputs_[i].get();
    if (plan_.kind == PERSEUS_ALLGATHER) from = gathered_[i];
    if (plan_.kind == PERSEUS_REDUCESCATTER) from = results_[i].get();
    const size_t bytes = bytes_of(plan_.tensors[i].dtype, plan_.tensors[i].result);
    if (bytes != 0) std::memcpy(outputs[i], from, bytes);
  }
  if (plan_.with_outcome) std::memcpy(outputs[plan_.tensors.size()], &outcome_, sizeof(outcome_));
  delete this;
}

}  // namespace perseus::tensorflow::xla
