// The search for slow ranks (PERSEUS_PERF_CHECK_N_STEPS): a rank's computing time for a step is the time outside of
// waits for Perseus; every N steps the ranks of a group compare it. Thread-safe.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <set>
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
  // A caller was in a wait. Callers that wait at the same time count each, so several that always do hide computing.
  void waited(int64_t from_ns, int64_t to_ns) {
    const int64_t computed = computing_until_ns_.load(std::memory_order_relaxed);
    waited_ns_.fetch_add(std::max<int64_t>(to_ns - std::max(from_ns, computed), 0), std::memory_order_relaxed);
  }
  // A device computes gradients for which callers wait already, and has done so by then; INT64_MAX = it still does.
  void computing_until(int64_t ns) { computing_until_ns_.store(ns, std::memory_order_relaxed); }

  // Called for every submitted gradient. A group's step is over when its first gradient comes again. Negative, except
  // after `steps` steps: then the seconds of computing per step. All members of a group count its steps, whatever other
  // groups they are in: otherwise some would wait for a comparison that others never begin.
  double submitted(uint64_t owner, int group, const char* name, int64_t now);
  // Called at the end of every gradient for which nobody is in a wait: its submitter is called back. Such a step waits
  // from its last submission, which is that of the last gradient to be computed, to its last end.
  void ended(uint64_t owner, int group, int64_t now);
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
    int64_t submitted_ns = 0;  // the last gradient
    int64_t ended_ns = 0;      // the last one of ended()
    // Since a gradient came again: threads may submit those of every step in another order.
    std::set<std::string> names;
  };

  const int64_t steps_;
  std::atomic<int64_t> waited_ns_{0}, computing_until_ns_{0};
  Mutex mutex_;
  int64_t counted_until_ns_ PERSEUS_GUARDED_BY(mutex_) = 0;  // of waits for calls back: groups may have them at once
  std::map<int, Steps> by_group_ PERSEUS_GUARDED_BY(mutex_);
};

// Describes the slow ranks among these seconds of computing per step; "" if none is slow.
std::string describe_slow(const std::vector<double>& seconds, const std::vector<int>& ranks, int64_t steps);

// Counts its lifetime as waiting.
class WaitTimer {
 public:
  explicit WaitTimer(PerfCheck& check) : check_(check), began_ns_(check.on() ? now_ns() : 0) {}
  ~WaitTimer() {
    if (check_.on()) check_.waited(began_ns_, now_ns());
  }
  WaitTimer(const WaitTimer&) = delete;
  WaitTimer& operator=(const WaitTimer&) = delete;

 private:
  PerfCheck& check_;
  const int64_t began_ns_;
};

}  // namespace perseus
