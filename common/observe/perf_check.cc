// Steps, the time in them, and the comparison.
#include "observe/perf_check.h"

#include <algorithm>
#include <cstdio>

namespace perseus {

double PerfCheck::submitted(uint64_t owner, int group, const char* name, int64_t now) {
  const MutexLock lock(mutex_);
  Steps& steps = by_group_[group];
  if (steps.owner == 0) steps = {name, owner, -1, now, waited_ns_.load(std::memory_order_relaxed), now, 0, {}};
  if (owner != steps.owner) return -1;
  if (!steps.names.insert(name).second) {
    steps.names = {name};
    waited(std::max(steps.submitted_ns, counted_until_ns_), steps.ended_ns);
    counted_until_ns_ = std::max(steps.ended_ns, counted_until_ns_);
  }
  steps.submitted_ns = now;
  if (steps.first != name || ++steps.count < steps_) return -1;
  const int64_t all_waits = waited_ns_.load(std::memory_order_relaxed);
  const int64_t computed = std::max<int64_t>(now - steps.began_ns - (all_waits - steps.began_waited_ns), 1);
  steps.count = 0;
  steps.began_ns = now;
  steps.began_waited_ns = all_waits;
  return static_cast<double>(computed) / 1e9 / static_cast<double>(steps_);
}

void PerfCheck::ended(uint64_t owner, int group, int64_t now) {
  const MutexLock lock(mutex_);
  const auto steps = by_group_.find(group);
  if (steps != by_group_.end() && steps->second.owner == owner) steps->second.ended_ns = now;
}

void PerfCheck::forget(uint64_t owner) {
  const MutexLock lock(mutex_);
  for (auto& [group, steps] : by_group_)
    if (steps.owner == owner) steps.owner = 0;
}

void PerfCheck::forget_group(int group) {
  const MutexLock lock(mutex_);
  by_group_.erase(group);
}

std::string describe_slow(const std::vector<double>& seconds, const std::vector<int>& ranks, int64_t steps) {
  // Slower than the rank in the middle by more than measurement and chance explain.
  constexpr double kSlow = 1.25;
  std::vector<double> sorted;
  for (double value : seconds)
    if (value > 0) sorted.push_back(value);
  if (sorted.size() < 2) return "";
  std::sort(sorted.begin(), sorted.end());
  const double median = sorted[(sorted.size() - 1) / 2];
  std::string slow;
  for (size_t i = 0; i < seconds.size(); ++i) {
    if (seconds[i] < kSlow * median) continue;
    char text[96];
    std::snprintf(text, sizeof text, "%srank %d %.3f ms (%.2f times)", slow.empty() ? "" : ", ", ranks[i],
                  seconds[i] * 1e3, seconds[i] / median);
    slow += text;
  }
  if (slow.empty()) return "";
  char text[160];
  std::snprintf(text, sizeof text, "; the median of %d ranks is %.3f ms, the fastest %.3f ms",
                static_cast<int>(sorted.size()), median * 1e3, sorted[0] * 1e3);
  return "[perf check] slow in the last " + std::to_string(steps) + " steps, computing for each: " + slow + text;
}

}  // namespace perseus
