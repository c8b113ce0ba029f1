// A list per engine, and what each thread remembers of the lists it is on, so that its end is noticed.
#include "progress/callers.h"

#include <algorithm>
#include <atomic>

#include "base/clock.h"
#include "base/mutex.h"

namespace perseus {
namespace {

// Between two slices of a wait a thread looks for signals. After so long it does something else.
constexpr int64_t kBetweenSlices = kSecond;

}  // namespace

// Written by its thread alone.
struct Callers::Caller {
  std::atomic<int64_t> handle{0};  // that it waits for; 0 = it does something else
  std::atomic<int64_t> since_ns{0};
  std::atomic<int64_t> left_ns{0};  // when a slice of its wait ended; 0 = in one
  std::atomic<bool> ended{false};
};

struct Callers::List {
  Mutex mutex;
  std::vector<std::shared_ptr<Caller>> callers PERSEUS_GUARDED_BY(mutex);
  std::atomic<bool> over{false};  // the engine is gone
};

struct Callers::OfThread {
  struct Membership {
    std::shared_ptr<List> list;
    std::shared_ptr<Caller> caller;
  };
  std::vector<Membership> memberships;

  ~OfThread() {
    for (const Membership& membership : memberships) membership.caller->ended.store(true, std::memory_order_relaxed);
  }
};

Callers::OfThread& Callers::of_thread() {
  static thread_local OfThread mine;
  return mine;
}

Callers::Callers() : list_(std::make_shared<List>()) {}
Callers::~Callers() { list_->over.store(true, std::memory_order_relaxed); }

Callers::Caller* Callers::find() const {
  for (const OfThread::Membership& membership : of_thread().memberships)
    if (membership.list == list_) return membership.caller.get();
  return nullptr;
}

void Callers::submits() {
  if (Caller* caller = find()) return caller->handle.store(0, std::memory_order_relaxed);
  auto& memberships = of_thread().memberships;
  const auto over = [](const OfThread::Membership& m) { return m.list->over.load(std::memory_order_relaxed); };
  memberships.erase(std::remove_if(memberships.begin(), memberships.end(), over), memberships.end());
  const auto caller = std::make_shared<Caller>();
  memberships.push_back({list_, caller});
  const MutexLock lock(list_->mutex);
  auto& callers = list_->callers;
  const auto ended = [](const auto& other) { return other->ended.load(std::memory_order_relaxed); };
  callers.erase(std::remove_if(callers.begin(), callers.end(), ended), callers.end());
  callers.push_back(caller);
}

void Callers::begins_wait(int64_t handle, int64_t now) {
  Caller* caller = find();
  if (caller == nullptr) return;
  const int64_t left = caller->left_ns.load(std::memory_order_relaxed);
  const bool goes_on = caller->handle.load(std::memory_order_relaxed) == handle && now - left < kBetweenSlices;
  if (!goes_on) caller->since_ns.store(now, std::memory_order_relaxed);
  caller->left_ns.store(0, std::memory_order_relaxed);
  caller->handle.store(handle, std::memory_order_relaxed);
}

void Callers::ends_wait(bool served, int64_t now) {
  Caller* caller = find();
  if (caller == nullptr) return;
  caller->left_ns.store(now, std::memory_order_relaxed);
  if (served) caller->handle.store(0, std::memory_order_relaxed);
}

bool Callers::all_wait(int64_t now, int64_t ns, std::vector<int64_t>* handles) const {
  const MutexLock lock(list_->mutex);
  for (const auto& caller : list_->callers) {
    if (caller->ended.load(std::memory_order_relaxed)) continue;
    const int64_t handle = caller->handle.load(std::memory_order_relaxed);
    const int64_t left = caller->left_ns.load(std::memory_order_relaxed);
    if (handle == 0 || (left != 0 && now - left >= kBetweenSlices)) return false;
    if (now - caller->since_ns.load(std::memory_order_relaxed) < ns) return false;
    handles->push_back(handle);
  }
  return !handles->empty();
}

}  // namespace perseus
