// A mutex that clang's thread-safety analysis knows (thread_annotations.h), and the lock on it. Thread-safe.
#pragma once

#include <mutex>

#include "base/thread_annotations.h"

namespace perseus {

class PERSEUS_CAPABILITY("mutex") Mutex {
 public:
  void lock() PERSEUS_ACQUIRE() { mutex_.lock(); }
  void unlock() PERSEUS_RELEASE() { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class PERSEUS_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) PERSEUS_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() PERSEUS_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

}  // namespace perseus
