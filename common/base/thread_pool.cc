// Every thread takes the next task until none is left.
#include "base/thread_pool.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "base/blocked_signals.h"

namespace perseus {
namespace {

uint64_t place(uint32_t number, uint32_t task) { return uint64_t{number} << 32 | task; }

}  // namespace

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  // Later, the thread that first has work to share may be bound to one core.
  if (sched_getaffinity(0, sizeof cores_, &cores_) != 0) CPU_ZERO(&cores_);
}

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
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::start() {
  started_ = true;
  workers_.reserve(static_cast<size_t>(threads_ - 1));
  const BlockedSignals blocked;
  try {
    while (workers_.size() + 1 < static_cast<size_t>(threads_))
      workers_.emplace_back([this, thread = workers_.size() + 1] { work_along(thread); });
  } catch (const std::system_error&) {
    // The pool makes do with fewer.
  }
}

void ThreadPool::run(Work work) {
  if (threads_ == 1 || work.tasks <= 1) {
    for (size_t task = 0; task < work.tasks; ++task) work.call(work.body, task, 0);
    return;
  }
  if (!started_) start();
  left_.store(work.tasks, std::memory_order_relaxed);
  {
    const MutexLock lock(mutex_);
    work.number = work_.number + 1;
    work_ = work;
    next_.store(place(work.number, 0), std::memory_order_release);  // with begin_task()
  }
  for (size_t i = 0; i < std::min<size_t>(work.tasks - 1, workers_.size()); ++i) begins_.notify_one();
  do_tasks(work, 0);
  std::exception_ptr failure;
  {
    const MutexLock lock(mutex_);
    while (left_.load(std::memory_order_acquire) > 0) ends_.wait(mutex_);  // with end_tasks()
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) std::rethrow_exception(failure);
}

void ThreadPool::work_along(size_t thread) {
  pthread_setname_np(pthread_self(), "perseus-codec");
  if (CPU_COUNT(&cores_) > 0) sched_setaffinity(0, sizeof cores_, &cores_);
  const MutexLock lock(mutex_);
  for (uint32_t seen = 0;;) {
    while (!stop_ && work_.number == seen) begins_.wait(mutex_);
    if (stop_) return;
    const Work work = work_;
    seen = work.number;
    const MutexUnlock unlock(mutex_);
    do_tasks(work, thread);
  }
}

// False where all tasks of that work have been begun.
bool ThreadPool::begin_task(const Work& work, uint32_t* task) {
  for (uint64_t next = next_.load(std::memory_order_acquire);;) {
    *task = static_cast<uint32_t>(next);
    if (next >> 32 != work.number || *task >= work.tasks) return false;
    if (next_.compare_exchange_weak(next, next + 1, std::memory_order_acq_rel)) return true;
  }
}

void ThreadPool::do_tasks(const Work& work, size_t thread) {
  for (uint32_t task; begin_task(work, &task);) {
    size_t ended = 1;
    try {
      work.call(work.body, task, thread);
    } catch (...) {
      // Those before this task have begun. Others are not begun any more, and count as ended.
      const auto begun =
          static_cast<uint32_t>(next_.exchange(place(work.number, work.tasks), std::memory_order_acq_rel));
      ended += work.tasks - std::min(begun, work.tasks);
      const MutexLock lock(mutex_);
      if (!failure_ || task < failed_) {
        failed_ = task;
        failure_ = std::current_exception();
      }
    }
    end_tasks(ended);
  }
}

void ThreadPool::end_tasks(size_t count) {
  if (left_.fetch_sub(count, std::memory_order_acq_rel) != count) return;
  const MutexLock lock(mutex_);
  ends_.notify_one();
}

}  // namespace perseus
