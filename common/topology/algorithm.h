// The algorithms of an allreduce among equals. Plain values.
#pragma once

#include <cstdint>

namespace perseus {

enum class Algorithm : uint8_t { kPairwise, kHalvingDoubling, kRing, kRecursiveDoubling };

}  // namespace perseus
