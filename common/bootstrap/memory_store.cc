// The Store of ranks that are threads of one process: a map, a lock, a condition.
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "base/clock.h"
#include "base/error.h"
#include "bootstrap/store.h"

namespace perseus {
namespace {

class MemoryStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }

  std::string get(const std::string& key, int64_t deadline_ns, const std::function<bool()>& interrupted) override {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (const auto found = values_.find(key); found != values_.end()) return found->second;
      const int64_t left = deadline_ns - now_ns();
      if (left <= 0) fail(ErrorKind::kTimeout, "[rendezvous] key '" + key + "' was not set in time");
      changed_.wait_for(lock, std::chrono::nanoseconds(left < kSlice ? left : kSlice));
      if (!interrupted) continue;
      // The caller's function may use this store.
      lock.unlock();
      if (interrupted()) fail(ErrorKind::kAborted, "[rendezvous] interrupted while waiting for key '" + key + "'");
      lock.lock();
    }
  }

 private:
  static constexpr int64_t kSlice = 100 * kMillisecond;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
};

}  // namespace

std::shared_ptr<Store> make_memory_store() { return std::make_shared<MemoryStore>(); }

}  // namespace perseus
