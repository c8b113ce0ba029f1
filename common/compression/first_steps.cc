// See first_steps.h.
#include "compression/first_steps.h"

namespace perseus {

uint64_t FirstSteps::count(uint64_t owner, uint32_t group, const std::string& name) {
  const MutexLock lock(mutex_);
  return counts_[Key(owner, group, name)]++;
}

void FirstSteps::forget(uint64_t owner) {
  const MutexLock lock(mutex_);
  counts_.erase(counts_.lower_bound(Key(owner, 0, "")), counts_.lower_bound(Key(owner + 1, 0, "")));
}

}  // namespace perseus
