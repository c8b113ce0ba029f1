// The search for slow ranks (PERSEUS_PERF_CHECK_N_STEPS): a rank's computing time for a step is the time outside of
// waits for Perseus; every N steps the ranks compare it. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"

namespace perseus {

class PerfCheck {
 public:
  explicit PerfCheck(int64_t steps) : steps_(steps) {}

  bool on() const { return steps_ > 0; }
  int64_t steps() const { return steps_; }
  // Time a caller has spent in a wait. Callers that wait at the same time count each, so several that always do hide
  // computing.
  void waited(int64_t ns) { waited_ns_.fetch_add(ns, std::memory_order_relaxed); }

  // Called for every submitted gradient. A step is over when its first gradient comes again. Negative, except after
  // `steps` steps: then the seconds of computing per step.
  double submitted(uint64_t owner, int group, const char* name, int64_t now);
  // The optimizer submits no more gradients; another one's count the steps from now on.
  void forget(uint64_t owner);

  // The comparison, which is under way from one step to a later one: `handle` is 0 when it is not.
  Mutex comparison_mutex;
  int64_t handle PERSEUS_GUARDED_BY(comparison_mutex) = 0;
  // Of every member of the group that compares; 0 = takes no part.
  std::vector<double> seconds PERSEUS_GUARDED_BY(comparison_mutex);
  std::vector<int> ranks PERSEUS_GUARDED_BY(comparison_mutex);  // of these members, in the world

 private:
  const int64_t steps_;
  std::atomic<int64_t> waited_ns_{0};
  Mutex mutex_;
  std::string first_ PERSEUS_GUARDED_BY(mutex_);
  uint64_t owner_ PERSEUS_GUARDED_BY(mutex_) = 0;
  int group_ PERSEUS_GUARDED_BY(mutex_) = 0;
  int64_t count_ PERSEUS_GUARDED_BY(mutex_) = 0;  // steps since began_ns_
  int64_t began_ns_ PERSEUS_GUARDED_BY(mutex_) = 0;
  int64_t began_waited_ns_ PERSEUS_GUARDED_BY(mutex_) = 0;
};

// Describes the slow ranks among these seconds of computing per step; "" if none is slow.
std::string describe_slow(const std::vector<double>& seconds, const std::vector<int>& ranks, int64_t steps);

// Counts its lifetime as waiting.
class WaitTimer {
 public:
  explicit WaitTimer(PerfCheck& check) : check_(check), began_ns_(check.on() ? now_ns() : 0) {}
  ~WaitTimer() {
    if (check_.on()) check_.waited(now_ns() - began_ns_);
  }
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  PerfCheck& check_;
  const int64_t began_ns_;
};

}  // namespace perseus
