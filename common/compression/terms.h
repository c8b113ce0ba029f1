// What a request says about compression, and what all its ranks must say alike. Plain values.
#pragma once

#include <cstdint>

#include "codec/codec.h"

namespace perseus {

struct CompressionTerms {
  CodecSpec codec;         // of sums of floating type between inner groups
  bool automatic = false;  // or one that loses less, by what the group has measured
  bool inside = false;     // inside groups as PERSEUS_ALLREDUCE_DTYPE says, not exact
  bool doubles = false;    // float64 tensors, too
  uint64_t from = 0;       // bytes: smaller tensors go as the settings say
};

}  // namespace perseus
