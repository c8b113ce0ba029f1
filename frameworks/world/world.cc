// A pointer and the number of its uses, behind one lock. A forked child starts without uses, since the threads that
// held them stayed with the parent.
#include "world.h"

#include <pthread.h>

#include <condition_variable>
#include <mutex>
#include <new>

namespace perseus {
namespace {

struct World {
  std::mutex mutex;
  std::condition_variable unused;
  perseus_context* context = nullptr;
  int uses = 0;
  int generation = 0;  // of forks
};

// Lives as long as the process: threads of the framework may run ops while it ends.
World& world() {
  static World* const only = [] {
    pthread_atfork([] { world().mutex.lock(); }, [] { world().mutex.unlock(); },
                   [] {
                     // Threads of the parent may wait on the condition, too.
                     new (&world().unused) std::condition_variable;
                     world().uses = 0;
                     ++world().generation;
                     world().mutex.unlock();
                   });
    return new World;
  }();
  return *only;
}

}  // namespace

void attach_world(perseus_context* context) {
  std::lock_guard<std::mutex> lock(world().mutex);
  world().context = context;
}

void detach_world() {
  std::unique_lock<std::mutex> lock(world().mutex);
  world().context = nullptr;
  world().unused.wait(lock, [] { return world().uses == 0; });
}

WorldUse::WorldUse() {
  std::lock_guard<std::mutex> lock(world().mutex);
  context_ = world().context;
  generation_ = world().generation;
  if (context_ != nullptr) ++world().uses;
}

WorldUse::~WorldUse() {
  if (context_ == nullptr) return;
  std::lock_guard<std::mutex> lock(world().mutex);
  if (generation_ == world().generation && --world().uses == 0) world().unused.notify_all();
}

}  // namespace perseus
