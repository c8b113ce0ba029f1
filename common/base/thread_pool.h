// Threads that share the pieces of work that one thread has to do now. They are made when there is first something to
// share, and sleep otherwise. One thread at a time calls it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace perseus {

class ThreadPool {
 public:
  // `threads`: the caller's included, >= 1.
  explicit ThreadPool(int threads) : threads_(threads) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The calling thread alone; any number of threads at once.
  static ThreadPool& none();

  int threads() const { return threads_; }

  // Calls body(size_t task, size_t thread) once for every task < tasks. Tasks with one `thread` < threads() follow each
  // other. Returns when all have ended. Throws what the first of those that threw has thrown: those before it have
  // ended, and others may never have begun.
  template <class Body>
  void parallel_for(size_t tasks, const Body& body) {
    run({&body, [](const void* of, size_t task, size_t thread) { (*static_cast<const Body*>(of))(task, thread); },
         tasks});
  }

 private:
  // A std::function might allocate.
  struct Work {
    const void* body = nullptr;
    void (*call)(const void* body, size_t task, size_t thread) = nullptr;  // null = there is none
    size_t tasks = 0;
  };
  void run(const Work& work);
  void start();
  void help(size_t thread);
  void take_part(const Work& work, size_t thread);

  const int threads_;
  std::vector<std::thread> helpers_;  // fewer where the system makes no more
  bool started_ = false;

  std::atomic<size_t> next_{0};  // task that nobody has begun
  Mutex mutex_;
  ConditionVariable begins_, ends_;
  Work work_ PERSEUS_GUARDED_BY(mutex_);
  uint64_t number_ PERSEUS_GUARDED_BY(mutex_) = 0;  // of the work
  size_t busy_ PERSEUS_GUARDED_BY(mutex_) = 0;      // helpers
  bool stop_ PERSEUS_GUARDED_BY(mutex_) = false;
  size_t failed_ PERSEUS_GUARDED_BY(mutex_) = 0;  // the first task that threw
  std::exception_ptr failure_ PERSEUS_GUARDED_BY(mutex_);
};

}  // namespace perseus
