// One run of a collective: from MXNet's arrays to the core's request and back, in the order of MXNet's engine.
#pragma once

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../tensorflow/world.h"
#include "mx_api.h"
#include "op.h"
#include "perseus/perseus.h"

namespace perseus::mxnet {

using perseus::tensorflow::WorldUse;

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

// What a caller who waits is given.
struct Outcome {
  perseus_code code = PERSEUS_OK;
  std::string message;
  perseus_handle handle = 0;  // with the results, to be released; 0 where there are none
  bool skipped = false;       // the engine left it out: an input has an error, which a wait for it raises
};

class Call {
 public:
  // Throws std::runtime_error with what is wrong. Not on the engine's threads.
  explicit Call(const perseus_mxnet_op& op);

  // Hands a call over to the engine: its arrays are read and written in the order in which their ops were pushed.
  static void push(std::shared_ptr<Call> call);
  // The same for someone who waits for the results, which the core makes; arrays are read only.
  static std::future<Outcome> push_waited(const std::shared_ptr<Call>& call);

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
  // Runs on the engine; ends later, on whichever thread.
  void start(const Completion& completion);
  bool read_data(std::string* wrong);
  perseus_code submit(void (*done)(void*, perseus_handle), perseus_handle* handle);
  static void done(void* call, perseus_handle handle);
  void end(Outcome outcome);

  // Called by the engine, which then drops it.
  static void run(void* run_context, void* on_complete, void* shared_call);
  static void drop(void* shared_call);
  static void push_to_engine(const std::shared_ptr<Call>& call);

  perseus_request request_ = {};
  std::string name_;
  std::vector<Tensor> tensors_;
  SharedArray gradient_outcome_;
  std::vector<int64_t> splits_;
  Completion completion_ = {};
  std::optional<WorldUse> world_;
  std::optional<std::promise<Outcome>> waited_;
};

}  // namespace perseus::mxnet
