// The engine keeps an op until the op reports that it is done.
#include "engine_op.h"

#include <algorithm>
#include <utility>

namespace perseus::mxnet {
namespace {

// By kind, in MXNet's profiler.
constexpr const char* kNames[] = {"PerseusAllreduce", "PerseusAllgather", "PerseusBroadcast", "PerseusAlltoall",
                                  "PerseusReducescatter"};

constexpr Device kCpu;

void check(int status) {
  if (status != 0) throw std::runtime_error(api().last_error());
}

// The engine wants each variable once, and views of one array share theirs.
bool is_new(NDArray array, std::vector<void*>* seen) {
  void* const chunk = chunk_of(array);
  if (std::find(seen->begin(), seen->end(), chunk) != seen->end()) return false;
  seen->push_back(chunk);
  return true;
}

void reorder_to_default(void*, void* array) { api().reorder(chunk_of(static_cast<SharedArray*>(array)->get())); }

// An array that an op only reads must not change while other ops read it, so a separate op changes it.
void push_reorder(NDArray array, int priority) {
  check(api().push_sync(
      reorder_to_default, new SharedArray(array), [](void* shared) { delete static_cast<SharedArray*>(shared); }, &kCpu,
      nullptr, 0, &array, 1, &kPrioritized, priority, "PerseusReorder"));
}

// Receives the error of an op that the push itself runs; null outside of a push. An engine that does so (NaiveEngine)
// knows no errors of asynchronous ops, and needs them done on return.
thread_local std::string* failure_within_push = nullptr;

}  // namespace

std::future<Outcome> EngineOp::push_waited(const std::shared_ptr<EngineOp>& op) {
  std::future<Outcome> outcome = op->waited_.emplace().get_future();
  push(op, true);
  return outcome;
}

void EngineOp::push(const std::shared_ptr<EngineOp>& op, bool at_last) {
  op->at_last_ = at_last;
  const int priority = op->call().priority();
  std::vector<NDArray> read, written;
  std::vector<void*> seen;
  for (const auto& call : op->calls_)
    call->each_written([&](NDArray array) {
      if (is_new(array, &seen)) written.push_back(array);
    });
  for (const auto& call : op->calls_)
    call->each_read([&](NDArray array, bool may_have_layout) {
      if (!is_new(array, &seen)) return;
      read.push_back(array);
      if (may_have_layout) push_reorder(array, priority);
    });
  std::string failure;
  failure_within_push = &failure;
  const int status = api().push_async(run, new std::shared_ptr<EngineOp>(op), drop, &kCpu, read.data(),
                                      static_cast<int>(read.size()), written.data(), static_cast<int>(written.size()),
                                      &kPrioritized, priority, kNames[op->call().kind()], false);
  failure_within_push = nullptr;
  check(status);
  if (!failure.empty()) throw std::runtime_error(failure);
}

void EngineOp::run(void*, void* on_complete, void* shared_op) {
  // A copy: the op may be done, and dropped, before start() returns.
  const std::shared_ptr<EngineOp> op = *static_cast<std::shared_ptr<EngineOp>*>(shared_op);
  op->start(*static_cast<const Completion*>(on_complete));
}

void EngineOp::drop(void* shared_op) {
  auto* const op = static_cast<std::shared_ptr<EngineOp>*>(shared_op);
  if ((*op)->waited_ && (*op)->completion_.callback == nullptr) {
    Outcome outcome;
    outcome.skipped = true;
    (*op)->waited_->set_value(outcome);
  }
  delete op;
}

void EngineOp::start(const Completion& completion) {
  completion_ = completion;
  left_ = calls_.size() + 1;  // one is this function
  perseus_handle handle = 0;
  for (const auto& call : calls_) handle = call->start(this, failure_within_push != nullptr, waited_.has_value());
  if (at_last_ && handle != 0) {
    // Makes progress: the core does not know who waits for the arrays, and its own thread collects submissions.
    const WorldUse world;
    if (world.context() != nullptr) perseus_handle_poll(world.context(), handle);
  }
  if (!waited_) ended({});
}

void EngineOp::ended(Outcome outcome) {
  if (waited_) {
    // The waiting thread may release this then; the engine still holds it.
    const Completion completion = completion_;
    waited_->set_value(std::move(outcome));
    return completion.run(nullptr);
  }
  if (outcome.code != PERSEUS_OK) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = std::move(outcome.message);
  }
  if (left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;  // pairs with itself: the last one sees the failure
  if (failure_.empty()) return completion_.run(nullptr);
  if (failure_within_push != nullptr) {
    *failure_within_push = failure_;
    return completion_.run(nullptr);
  }
  const std::runtime_error error(failure_);
  completion_.run(&error);
}

}  // namespace perseus::mxnet
