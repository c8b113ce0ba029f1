// Every thread takes the next task until none is left.
#include "base/thread_pool.h"

#include <signal.h>

#include <system_error>
#include <utility>

namespace perseus {

ThreadPool& ThreadPool::none() {
  static ThreadPool pool(1);
  return pool;
}

ThreadPool::~ThreadPool() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  begins_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void ThreadPool::start() {
  started_ = true;
  helpers_.reserve(static_cast<size_t>(threads_ - 1));
  // Signals belong to the program's own threads.
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  try {
    while (helpers_.size() + 1 < static_cast<size_t>(threads_))
      helpers_.emplace_back([this, thread = helpers_.size() + 1] { help(thread); });
  } catch (const std::system_error&) {  // then there are fewer
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

void ThreadPool::run(const Work& work) {
  if (threads_ == 1 || work.tasks <= 1) {
    for (size_t task = 0; task < work.tasks; ++task) work.call(work.body, task, 0);
    return;
  }
  if (!started_) start();
  {
    const MutexLock lock(mutex_);
    next_.store(0, std::memory_order_relaxed);
    work_ = work;
    ++number_;
  }
  begins_.notify_all();
  take_part(work, 0);
  std::exception_ptr failure;
  {
    const MutexLock lock(mutex_);
    work_ = Work();  // who comes late finds nothing
    while (busy_ > 0) ends_.wait(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) std::rethrow_exception(failure);
}

void ThreadPool::help(size_t thread) {
  const MutexLock lock(mutex_);
  for (uint64_t seen = 0;;) {
    while (!stop_ && (work_.call == nullptr || number_ == seen)) begins_.wait(mutex_);
    if (stop_) return;
    seen = number_;
    const Work work = work_;
    ++busy_;
    {
      const MutexUnlock unlock(mutex_);
      take_part(work, thread);
    }
    if (--busy_ == 0) ends_.notify_one();
  }
}

void ThreadPool::take_part(const Work& work, size_t thread) {
  for (size_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < work.tasks;) {
    try {
      work.call(work.body, task, thread);
    } catch (...) {
      next_.store(work.tasks, std::memory_order_relaxed);  // those before this task have begun
      const MutexLock lock(mutex_);
      if (!failure_ || task < failed_) {
        failed_ = task;
        failure_ = std::current_exception();
      }
    }
  }
}

}  // namespace perseus
