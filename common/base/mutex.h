// The mutex, its scoped locks and its condition variable, under names that clang's thread-safety analysis knows: the
// standard library's carry no attributes. They compile to the calls of std::mutex and std::condition_variable.
// Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "base/thread_annotations.h"

namespace perseus {

class PERSEUS_CAPABILITY("mutex") Mutex {
 public:
  void lock() PERSEUS_ACQUIRE() { mutex_.lock(); }
  void unlock() PERSEUS_RELEASE() { mutex_.unlock(); }

 private:
  friend class ConditionVariable;
  std::mutex mutex_;
};

// Holds the mutex while it lives.
class PERSEUS_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) PERSEUS_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() PERSEUS_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Lets a held mutex go while it lives.
class PERSEUS_SCOPED_CAPABILITY MutexUnlock {
 public:
  explicit MutexUnlock(Mutex& mutex) PERSEUS_RELEASE(mutex) : mutex_(mutex) { mutex_.unlock(); }
  // To the analysis, "release" of a scope that began by releasing means that the mutex is held again.
  ~MutexUnlock() PERSEUS_RELEASE() { mutex_.lock(); }
  MutexUnlock(const MutexUnlock&) = delete;
  MutexUnlock& operator=(const MutexUnlock&) = delete;

 private:
  Mutex& mutex_;
};

// Waits take the held mutex and no predicate, which the analysis could not look into: a loop at the caller tests the
// condition, since a wait may also end for no reason.
class ConditionVariable {
 public:
  void wait(Mutex& mutex) PERSEUS_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    lock.release();
  }
  // False when the time is over.
  template <class Rep, class Period>
  bool wait_for(Mutex& mutex, std::chrono::duration<Rep, Period> most) PERSEUS_REQUIRES(mutex) {
    return wait_until(mutex, std::chrono::steady_clock::now() + most);
  }
  template <class Time>
  bool wait_until(Mutex& mutex, Time end) PERSEUS_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = changed_.wait_until(lock, end) == std::cv_status::no_timeout;
    lock.release();
    return in_time;
  }
  void notify_one() { changed_.notify_one(); }
  void notify_all() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

}  // namespace perseus
