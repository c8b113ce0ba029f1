// A thread of its own for what one communicator has to be told: for ncclCommAbort, which may wait for all that the GPU
// does, and for everything with NCCL before 2.28. That keeps what a call has begun in variables of the thread that made
// it, until that is over. A call of the same thread in between, even for another communicator, would begin it again.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "nccl/library.h"

namespace perseus {

class CallThread {
 public:
  using Call = std::function<nccl::Result()>;

  // Throws std::system_error where there is no thread to be had.
  CallThread();
  // Does not wait. The thread ends behind the last call, and may outlive this.
  ~CallThread();
  CallThread(const CallThread&) = delete;
  CallThread& operator=(const CallThread&) = delete;

  // Behind those before. A call that throws counts as one that gives ncclInternalError.
  void give(Call call);
  // Are all over? Then the result of the last one.
  bool over(nccl::Result* last) const;
  // Waits for that; false where it takes longer.
  bool wait(std::chrono::nanoseconds patience) const;

 private:
  struct State;
  static void run(State* state);

  const std::shared_ptr<State> state_;
};

}  // namespace perseus
