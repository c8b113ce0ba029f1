// One collective on its way: from MXNet's arrays to the core's request and back.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "../world/world.h"
#include "mx_api.h"
#include "op.h"
#include "perseus/perseus.h"

namespace perseus::mxnet {

// An array that stays alive for as long as this does, whatever Python does with its own.
class SharedArray {
 public:
  SharedArray() = default;
  explicit SharedArray(NDArray array);
  SharedArray(SharedArray&& other) noexcept : array_(other.array_) { other.array_ = nullptr; }
  SharedArray& operator=(SharedArray&& other) noexcept;
  ~SharedArray();

  NDArray get() const { return array_; }

 private:
  NDArray array_ = nullptr;
};

struct Outcome {
  perseus_code code = PERSEUS_OK;
  std::string message;
  perseus_handle handle = 0;  // with the results, to be released; 0 = none
  bool skipped = false;       // the engine skipped it: an input has an error, which a wait for it raises
};

// The one who started a call.
class CallOwner {
 public:
  // Once, on whichever thread makes progress, or within Call::start. Must not block.
  virtual void ended(Outcome outcome) = 0;

 protected:
  ~CallOwner() = default;
};

class Call {
 public:
  // Throws std::runtime_error for an invalid call. Not on the engine's threads.
  explicit Call(const perseus_mxnet_op& op);

  perseus_kind kind() const { return request_.kind; }
  int priority() const { return request_.priority; }
  size_t bytes() const { return bytes_; }
  // The arrays that the engine keeps from other ops. One that is only read may have a layout of oneDNN if it has more
  // than one dimension.
  template <typename Function>
  void each_written(Function&& take) const;
  template <typename Function>
  void each_read(Function&& take) const;

  // Called when the arrays may be used. at_once: the call has ended on return. keep_results: they stay with the handle.
  // Returns the handle, valid for a moment; 0 if the call has already ended.
  perseus_handle start(CallOwner* owner, bool at_once, bool keep_results);
  // Alive while there is a handle with results.
  perseus_context* context() const { return world_->context(); }

 private:
  struct Tensor {
    SharedArray input, output;  // no output: in place, or made by the core
    std::vector<int64_t> shape;
    perseus_tensor core = {};
    bool in_place = false;
  };

  void add_tensor(NDArray input, NDArray output);
  bool read_data(std::string* wrong);
  perseus_code submit(void (*done)(void*, perseus_handle), perseus_handle* handle);
  static void done(void* call, perseus_handle handle);
  void end(Outcome outcome);

  perseus_request request_ = {};
  std::string name_;
  std::vector<Tensor> tensors_;
  size_t bytes_ = 0;
  SharedArray gradient_outcome_;
  std::vector<int64_t> splits_;
  CallOwner* owner_ = nullptr;
  bool keep_results_ = false;
  std::optional<WorldUse> world_;
};

template <typename Function>
void Call::each_written(Function&& take) const {
  for (const Tensor& tensor : tensors_) {
    const NDArray output = tensor.in_place ? tensor.input.get() : tensor.output.get();
    if (output != nullptr) take(output);
  }
  if (gradient_outcome_.get() != nullptr) take(gradient_outcome_.get());
}

template <typename Function>
void Call::each_read(Function&& take) const {
  for (const Tensor& tensor : tensors_)
    if (!tensor.in_place) take(tensor.input.get(), tensor.core.ndim > 1);
}

}  // namespace perseus::mxnet
