// A batch of a frozen schedule's buckets: a rank begins all of them or none. Plain values.
#pragma once

#include <cstdint>

namespace perseus {

struct Batch {
  uint64_t schedule = 0;  // its fingerprint; 0 = none: agreed on in a round
  uint64_t number = 0;    // since the schedule was frozen
};

}  // namespace perseus
