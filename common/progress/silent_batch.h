// Requests whose callers are told when they are done: nobody waits for one of them, so nobody drives. A training step
// makes the same number every time; once as many are there as the last time, what is under way is all that somebody
// waits for. A wrong guess costs a wake-up. Thread-safe.
#pragma once

#include <atomic>

namespace perseus {

class SilentBatch {
 public:
  // One more; true when the batch is complete with it.
  bool submitted() {
    in_flight_.fetch_add(1, std::memory_order_relaxed);
    here_.fetch_add(1, std::memory_order_relaxed);
    return complete();
  }
  // It was not taken after all.
  void refused() {
    here_.fetch_sub(1, std::memory_order_relaxed);
    in_flight_.fetch_sub(1, std::memory_order_relaxed);
  }
  void done() {
    if (in_flight_.fetch_sub(1, std::memory_order_relaxed) == 1)
      last_.store(here_.exchange(0, std::memory_order_relaxed), std::memory_order_relaxed);
  }
  bool complete() const {
    const int last = last_.load(std::memory_order_relaxed);
    return last > 0 && here_.load(std::memory_order_relaxed) >= last;
  }

 private:
  std::atomic<int> in_flight_{0};
  std::atomic<int> here_{0};  // of this batch, which ends when none is in flight
  std::atomic<int> last_{0};  // of the one before; 0 = there was none
};

}  // namespace perseus
