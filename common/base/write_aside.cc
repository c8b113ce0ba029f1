// One process-wide queue and thread, as standard error is process-wide.
#include "base/write_aside.h"

#include <pthread.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <system_error>
#include <thread>

#include "base/blocked_signals.h"
#include "base/fork_guard.h"
#include "base/mutex.h"

namespace perseus {
namespace {

constexpr auto kPatience = std::chrono::milliseconds(500);
constexpr auto kFarewell = std::chrono::seconds(10);

class Writer {
 public:
  Writer() {
    const BlockedSignals blocked;
    try {
      std::thread thread([this] { run(); });
      id_ = thread.get_id();
      thread.detach();
      std::atexit([] { writer().finish_at_exit(); });
    } catch (const std::system_error&) {
      process_ = kNobody;  // no thread is to be had: callers write themselves
    }
  }

  // Never destroyed: the thread lives as long as the process.
  static Writer& writer() {
    static Writer* instance = new Writer;
    return *instance;
  }

  void write(std::function<void()> action) {
    if (process_ != fork_generation() || std::this_thread::get_id() == id_) return run_one(action);
    const MutexLock lock(mutex_);
    queue_.push_back(std::move(action));
    const uint64_t number = ++taken_;
    work_.notify_one();
    if (held_up_) return;
    if (!wait_for(number, kPatience)) held_up_ = true;
  }

 private:
  static constexpr uint32_t kNobody = UINT32_MAX;

  bool wait_for(uint64_t number, std::chrono::milliseconds most) PERSEUS_REQUIRES(mutex_) {
    const auto end = std::chrono::steady_clock::now() + most;
    while (finished_ < number && done_.wait_until(mutex_, end)) continue;
    return finished_ >= number;
  }

  void finish_at_exit() {
    if (process_ != fork_generation()) return;
    const MutexLock lock(mutex_);
    wait_for(taken_, kFarewell);
  }

  static void run_one(const std::function<void()>& action) {
    try {
      action();
    } catch (const std::exception&) {
      // Out of memory: there is nothing left to say it with.
    }
  }

  void run() {
    pthread_setname_np(pthread_self(), "perseus-writer");
    const MutexLock lock(mutex_);
    for (;;) {
      while (queue_.empty()) work_.wait(mutex_);
      const std::function<void()> action = std::move(queue_.front());
      queue_.pop_front();
      {
        const MutexUnlock meanwhile(mutex_);
        run_one(action);
      }
      ++finished_;
      if (finished_ == taken_) held_up_ = false;
      done_.notify_all();
    }
  }

  uint32_t process_ = fork_generation();
  std::thread::id id_;
  Mutex mutex_;
  ConditionVariable work_, done_;
  std::deque<std::function<void()>> queue_ PERSEUS_GUARDED_BY(mutex_);
  uint64_t taken_ PERSEUS_GUARDED_BY(mutex_) = 0;
  uint64_t finished_ PERSEUS_GUARDED_BY(mutex_) = 0;
  bool held_up_ PERSEUS_GUARDED_BY(mutex_) = false;
};

}  // namespace

void write_aside(std::function<void()> action) { Writer::writer().write(std::move(action)); }

}  // namespace perseus
