// Threads that share the pieces of work that one thread has to do now. They are made when there is first something to
// share, and sleep otherwise. One thread at a time calls it.
#pragma once

#include <sched.h>

#include <algorithm>
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
  // `threads`: the caller's included, >= 1. All run on the cores that the constructing thread may use.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // The calling thread alone; any number of threads at once.
  static ThreadPool& none();

  int threads() const { return threads_; }

  // The number of tasks for work on `floats` floats: enough for all threads to end at about the same time, but none so
  // small that waking a thread takes longer. 1 = sharing does not pay off.
  size_t tasks_for(size_t floats) const {
    const auto most = static_cast<size_t>(threads_ == 1 ? 1 : 3 * threads_);
    return std::clamp(floats / kLeastFloats, size_t{1}, most);
  }

  // Calls body(size_t task, size_t thread) once for every task < tasks. Tasks with one `thread` < threads() follow each
  // other. Returns when all have ended. Throws what the first of those that threw has thrown: those before it have
  // ended, and others may never have begun.
  template <class Body>
  void parallel_for(size_t tasks, const Body& body) {
    run({&body, [](const void* of, size_t task, size_t thread) { (*static_cast<const Body*>(of))(task, thread); },
         static_cast<uint32_t>(tasks)});
  }

  // Calls body(size_t begin, size_t end, size_t thread) for parts of 0 to `items`, which stand for so many floats.
  template <class Body>
  void for_parts(size_t items, size_t floats, const Body& body) {
    const size_t tasks = std::min(tasks_for(floats), items);
    parallel_for(tasks,
                 [&](size_t task, size_t thread) { body(task * items / tasks, (task + 1) * items / tasks, thread); });
  }

 private:
  static constexpr size_t kLeastFloats = 64 * 1024;  // which take tens of microseconds

  // A std::function might allocate.
  struct Work {
    const void* body = nullptr;
    void (*call)(const void* body, size_t task, size_t thread) = nullptr;
    uint32_t tasks = 0;
    uint32_t number = 0;
  };
  void run(Work work);
  void start();
  void work_along(size_t thread);
  bool begin_task(const Work& work, uint32_t* task);
  void do_tasks(const Work& work, size_t thread);
  void end_tasks(size_t count);

  const int threads_;
  cpu_set_t cores_;
  std::vector<std::thread> workers_;  // fewer where the system makes no more
  bool started_ = false;

  // The number of the work and the next task of it. Whoever has begun a task keeps the work alive until it ends it, and
  // nobody begins one of work that is over.
  std::atomic<uint64_t> next_{0};
  std::atomic<size_t> left_{0};  // tasks that have not ended
  Mutex mutex_;
  ConditionVariable begins_, ends_;
  Work work_ PERSEUS_GUARDED_BY(mutex_);
  bool stop_ PERSEUS_GUARDED_BY(mutex_) = false;
  uint32_t failed_ PERSEUS_GUARDED_BY(mutex_) = 0;  // the first task that threw
  std::exception_ptr failure_ PERSEUS_GUARDED_BY(mutex_);
};

}  // namespace perseus
