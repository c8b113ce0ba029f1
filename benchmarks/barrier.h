// Threads of a benchmark that play ranks wait for each other, to begin something together.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace perseus {

class Barrier {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Barrier(int size) : size_(size) {}

  // When all are here, the same moment for all of them, a little ahead: whoever is woken late begins with the others.
  Clock::time_point begin() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t turn = turn_;
    if (++here_ == size_) {
      here_ = 0;
      ++turn_;
      begin_ = Clock::now() + std::chrono::milliseconds(2);
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return turn_ != turn; });
    }
    return begin_;
  }

 private:
  const int size_;
  int here_ = 0;
  uint64_t turn_ = 0;
  Clock::time_point begin_;
  std::mutex mutex_;
  std::condition_variable all_here_;
};

}  // namespace perseus
