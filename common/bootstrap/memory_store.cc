// The Store of ranks that are threads of one process: a map, a lock, and for each that waits a condition.
#include <algorithm>
#include <chrono>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "bootstrap/numbered_keys.h"
#include "bootstrap/store.h"

namespace perseus {
namespace {

class MemoryStore : public Store {
 public:
  void set(const std::string& key, const std::string& value, int64_t, const Interrupted&) override {
    const MutexLock lock(mutex_);
    const Value& kept = values_[key] = std::make_shared<const std::string>(value);
    for (Waiter* waiter : waiters_) {
      const std::optional<int> number = waiter->missing.number_of(key);
      if (!number) continue;
      waiter->arrived.emplace_back(*number, kept);
      waiter->missing.mark(*number);
      // Many ranks wait for all of them: waking each for every key would be most of what a start costs.
      if (waiter->missing.all_came()) waiter->changed.notify_one();
    }
    changed_.notify_all();
  }

  std::string get(const std::string& key, int64_t deadline_ns, const Interrupted& interrupted) override {
    const MutexLock lock(mutex_);
    for (;;) {
      if (const auto found = values_.find(key); found != values_.end()) return *found->second;
      if (now_ns() >= deadline_ns) fail(ErrorKind::kTimeout, "[rendezvous] key '" + key + "' was not set in time");
      wait_a_slice(changed_, deadline_ns, interrupted, key);
    }
  }

  std::vector<int> get_all(const std::string& prefix, const std::vector<int>& numbers, int64_t deadline_ns,
                           const OnValue& on_value, const Interrupted& interrupted) override {
    Waiter waiter;
    waiter.missing = NumberedKeys(prefix, numbers);
    const MutexLock lock(mutex_);
    look_up(&waiter);
    const Waiting waiting(*this, &waiter);
    for (;;) {
      hand_over(&waiter, on_value);
      if (!waiter.arrived.empty()) continue;
      if (waiter.missing.all_came()) return {};
      if (now_ns() >= deadline_ns) return waiter.missing.missing();
      wait_a_slice(waiter.changed, deadline_ns, interrupted, waiter.missing.first_missing());
    }
  }

  std::vector<int> get_present(const std::string& prefix, const std::vector<int>& numbers, int64_t,
                               const OnValue& on_value, const Interrupted&) override {
    Waiter waiter;
    waiter.missing = NumberedKeys(prefix, numbers);
    const MutexLock lock(mutex_);
    look_up(&waiter);
    hand_over(&waiter, on_value);
    return waiter.missing.missing();
  }

 private:
  static constexpr int64_t kSlice = 100 * kMillisecond;
  using Value = std::shared_ptr<const std::string>;

  struct Waiter {
    NumberedKeys missing;
    std::vector<std::pair<int, Value>> arrived;  // and not handed over
    ConditionVariable changed;                   // signalled when all are here
  };

  // Both ends hold the mutex.
  class Waiting {
   public:
    Waiting(MemoryStore& store, Waiter* waiter) : waiters_(store.waiters_), waiter_(waiter) {
      waiters_.push_back(waiter);
    }
    ~Waiting() { waiters_.erase(std::find(waiters_.begin(), waiters_.end(), waiter_)); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    std::vector<Waiter*>& waiters_;
    Waiter* waiter_;
  };

  void look_up(Waiter* waiter) PERSEUS_REQUIRES(mutex_) {
    for (const int number : waiter->missing.missing()) {
      const auto found = values_.find(waiter->missing.key(number));
      if (found == values_.end()) continue;
      waiter->arrived.emplace_back(number, found->second);
      waiter->missing.mark(number);
    }
  }

  // The caller's function may use this store, too.
  void hand_over(Waiter* waiter, const OnValue& on_value) PERSEUS_REQUIRES(mutex_) {
    const std::vector<std::pair<int, Value>> arrived = std::exchange(waiter->arrived, {});
    const MutexUnlock unlock(mutex_);
    for (const auto& [number, value] : arrived) on_value(number, *value);
  }

  void wait_a_slice(ConditionVariable& changed, int64_t deadline_ns, const Interrupted& interrupted,
                    const std::string& key) PERSEUS_REQUIRES(mutex_) {
    changed.wait_for(mutex_, std::chrono::nanoseconds(std::min(deadline_ns - now_ns(), kSlice)));
    if (!interrupted) return;
    // The caller's function may use this store.
    const MutexUnlock unlock(mutex_);
    if (interrupted()) fail(ErrorKind::kAborted, "[rendezvous] interrupted while waiting for key '" + key + "'");
  }

  Mutex mutex_;
  ConditionVariable changed_;
  std::unordered_map<std::string, Value> values_ PERSEUS_GUARDED_BY(mutex_);
  std::vector<Waiter*> waiters_ PERSEUS_GUARDED_BY(mutex_);
};

}  // namespace

std::shared_ptr<Store> make_memory_store() { return std::make_shared<MemoryStore>(); }

}  // namespace perseus
