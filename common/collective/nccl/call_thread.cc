// A queue of calls, and the thread that makes them.
#include "collective/nccl/call_thread.h"

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

namespace perseus {

struct CallThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Call> calls;  // the first one is being made
  nccl::Result last = nccl::kSuccess;
  bool closed = false;
};

CallThread::CallThread() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { run(state.get()); }).detach();
}

CallThread::~CallThread() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
}

void CallThread::give(Call call) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->calls.push_back(std::move(call));
  state_->changed.notify_all();
}

bool CallThread::over(nccl::Result* last) const {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  *last = state_->last;
  return state_->calls.empty();
}

bool CallThread::wait(std::chrono::nanoseconds patience) const {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return state_->changed.wait_for(lock, patience, [this] { return state_->calls.empty(); });
}

void CallThread::run(State* state) {
  std::unique_lock<std::mutex> lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [state] { return state->closed || !state->calls.empty(); });
    if (state->calls.empty()) return;
    const Call& call = state->calls.front();  // others may be put behind it
    lock.unlock();
    nccl::Result result = nccl::kInternalError;
    try {
      result = call();
    } catch (const std::exception&) {
      // The process ends, and the driver has ended before it.
    }
    lock.lock();
    state->last = result;
    state->calls.pop_front();  // with what the call has kept
    state->changed.notify_all();
  }
}

}  // namespace perseus
