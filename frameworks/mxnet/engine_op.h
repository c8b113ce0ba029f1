// Collectives as one op of MXNet's engine, which runs it when its arrays are free, in the order of the pushes.
#pragma once

#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "call.h"
#include "mx_api.h"

namespace perseus::mxnet {

class EngineOp : public CallOwner {
 public:
  // At least one call, all of one kind; they start together, and the arrays of all are free when all have ended.
  explicit EngineOp(std::vector<std::unique_ptr<Call>> calls) : calls_(std::move(calls)) {}

  // Pushes the op. at_last: no other op is pushed for now, so this one should not wait for others. Throws
  // std::runtime_error.
  static void push(const std::shared_ptr<EngineOp>& op, bool at_last);
  // The same for one call whose results the core allocates and the caller waits for; arrays are only read.
  static std::future<Outcome> push_waited(const std::shared_ptr<EngineOp>& op);

  const Call& call() const { return *calls_.front(); }
  void ended(Outcome outcome) override;

 private:
  // Called by the engine, which then drops it.
  static void run(void* run_context, void* on_complete, void* shared_op);
  static void drop(void* shared_op);
  void start(const Completion& completion);

  const std::vector<std::unique_ptr<Call>> calls_;
  bool at_last_ = false;
  std::optional<std::promise<Outcome>> waited_;
  Completion completion_ = {};
  std::atomic<size_t> left_{0};
  std::mutex mutex_;
  std::string failure_;  // the first one's, under mutex_
};

}  // namespace perseus::mxnet
