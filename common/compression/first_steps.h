// How often each gradient was submitted on this rank, for codecs that begin after some steps without them. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "base/mutex.h"

namespace perseus {

class FirstSteps {
 public:
  // Counts a submission and returns how many came before it. owner: whose gradient; group: the process set's channels.
  uint64_t count(uint64_t owner, uint32_t group, const std::string& name);
  void forget(uint64_t owner);

 private:
  using Key = std::tuple<uint64_t, uint32_t, std::string>;

  Mutex mutex_;
  std::map<Key, uint64_t> counts_ PERSEUS_GUARDED_BY(mutex_);
};

}  // namespace perseus
