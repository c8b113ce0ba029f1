// One process-wide list, as fork is process-wide: the one place besides the default context where that is right.
#include "base/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/mutex.h"

namespace perseus {
namespace {

struct Registry {
  Mutex mutex;
  std::vector<int> fds PERSEUS_GUARDED_BY(mutex);
  std::atomic<uint32_t> generation{0};
};

Registry& registry();

// Across fork() the mutex is held between two functions, which the analysis cannot follow.
void before_fork() PERSEUS_NO_THREAD_ANALYSIS { registry().mutex.lock(); }
void after_fork_in_parent() PERSEUS_NO_THREAD_ANALYSIS { registry().mutex.unlock(); }
void after_fork_in_child() PERSEUS_NO_THREAD_ANALYSIS {
  Registry& r = registry();
  for (int fd : r.fds) ::close(fd);
  r.fds.clear();
  r.generation.fetch_add(1, std::memory_order_relaxed);
  r.mutex.unlock();
}

Registry& registry() {
  // Never destroyed: descriptors may be closed by objects that outlive static destruction.
  static Registry* instance = [] {
    auto* made = new Registry;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return made;
  }();
  return *instance;
}

}  // namespace

// The mutex is held between functions here, too.
ForksWait::ForksWait(size_t most) PERSEUS_NO_THREAD_ANALYSIS {
  Registry& r = registry();
  r.mutex.lock();
  try {
    // What is open must find room in the list.
    if (r.fds.capacity() < r.fds.size() + most) r.fds.reserve(2 * r.fds.size() + most);
  } catch (...) {
    r.mutex.unlock();
    throw;
  }
}

ForksWait::~ForksWait() PERSEUS_NO_THREAD_ANALYSIS { registry().mutex.unlock(); }

void ForksWait::guard(int fd) PERSEUS_NO_THREAD_ANALYSIS { registry().fds.push_back(fd); }

int open_guarded(const std::function<int()>& open) {
  ForksWait forks_wait(1);
  const int fd = open();
  if (fd >= 0) forks_wait.guard(fd);
  return fd;
}

void close_guarded(int fd) {
  if (fd < 0) return;
  Registry& r = registry();
  const MutexLock lock(r.mutex);
  const auto it = std::find(r.fds.begin(), r.fds.end(), fd);
  if (it == r.fds.end()) return;  // a forked child: the number may belong to somebody else by now
  *it = r.fds.back();
  r.fds.pop_back();
  ::close(fd);
}

uint32_t fork_generation() { return registry().generation.load(std::memory_order_relaxed); }

}  // namespace perseus
