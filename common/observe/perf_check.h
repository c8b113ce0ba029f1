// The search for slow ranks (PERSEUS_PERF_CHECK_N_STEPS): a rank's computing time for a step is the time outside of
// waits for Perseus; every N steps the ranks of a group compare it. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
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

  // Called for every submitted gradient. A group's step is over when its first gradient comes again. Negative, except
  // after `steps` steps: then the seconds of computing per step. All members of a group count its steps, whatever other
  // groups they are in: otherwise some would wait for a comparison that others never begin.
  double submitted(uint64_t owner, int group, const char* name, int64_t now);
  // The optimizer submits no more gradients; another one's count the steps from now on.
  void forget(uint64_t owner);
  // The group was removed; another one may get its number.
  void forget_group(int group);

  // A group's comparison, which is under way from one step to a later one.
  struct Comparison {
    int64_t handle = 0;           // 0 = not under way
    std::vector<double> seconds;  // of every member; 0 = takes no part
    std::vector<int> ranks;       // of these members, in the world
  };
  Mutex comparison_mutex;
  std::map<int, Comparison> comparisons PERSEUS_GUARDED_BY(comparison_mutex);  // by group

 private:
  struct Steps {
    std::string first;
    uint64_t owner = 0;
    int64_t count = 0;  // since began_ns
    int64_t began_ns = 0;
    int64_t began_waited_ns = 0;
  };

  const int64_t steps_;
  std::atomic<int64_t> waited_ns_{0};
  Mutex mutex_;
  std::map<int, Steps> by_group_ PERSEUS_GUARDED_BY(mutex_);
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
