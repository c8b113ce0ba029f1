// The search for elements by magnitude. Internal linkage, see variant.h; no threads.
#pragma once

#include "kernels/codec_loops.h"

namespace perseus::kernels {
namespace {

// All ones in lanes at or above a magnitude of at least 1: a comparison that every machine has.
PERSEUS_INLINE Ints at_least(Floats value, uint32_t magnitude) {
  return magnitudes(value) > static_cast<int32_t>(magnitude - 1);
}

size_t count_at_least_any(const float* v, size_t count, uint32_t magnitude) {
  Ints found{};
  size_t at = 0;
  for (; count - at >= kFloatLanes; at += kFloatLanes) found -= at_least(load_floats(v + at), magnitude);
  found -= at_least(load_some(v + at, count - at), magnitude);
  size_t sum = 0;
  for (size_t lane = 0; lane < kFloatLanes; ++lane) sum += static_cast<size_t>(found[lane]);
  return sum;
}

size_t find_at_least_any(const float* v, size_t count, uint32_t magnitude, uint16_t* indices) {
  constexpr size_t kGroup = 32;  // a word of bits
  size_t found = 0;
  const auto note = [&](uint32_t bits, size_t begin) __attribute__((always_inline)) {
    for (; bits != 0; bits &= bits - 1)
      indices[found++] = static_cast<uint16_t>(begin + static_cast<size_t>(__builtin_ctz(bits)));
  };
  size_t at = 0;
  for (; count - at >= kGroup; at += kGroup) {
    uint32_t bits = 0;
    for (size_t i = 0; i < kGroup; i += kFloatLanes)
      bits |= lane_bits(at_least(load_floats(v + at + i), magnitude)) << i;
    note(bits, at);
  }
  for (; at < count; at += kFloatLanes) {
    const size_t now = count - at < kFloatLanes ? count - at : kFloatLanes;
    note(lane_bits(at_least(load_some(v + at, now), magnitude)), at);
  }
  return found;
}

void add_at_any(float* x, const uint16_t* indices, const float* values, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    float sum = x[indices[i]] + values[i];
    x[indices[i]] = sum == sum ? sum : __builtin_nanf("");
  }
}

}  // namespace
}  // namespace perseus::kernels
