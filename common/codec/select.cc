// Selection by bisection on magnitudes. Thread-safe.
#include "codec/select.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "collective/wire_format.h"
#include "kernels/codec_kernels.h"

namespace perseus {
namespace {

struct Window {
  size_t least, most;
};

// A magnitude that between `least` and `most` elements reach. Where there is none because many are equal, theirs; where
// fewer are not zero, 1. Fewer than `least` reach `above`.
uint32_t threshold(const float* v, size_t count, uint32_t above, Window window) {
  uint32_t low = 1, high = std::max<uint32_t>(above, 1);
  if (kernels::count_at_least(v, count, low) <= window.most) return low;
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    const size_t found = kernels::count_at_least(v, count, middle);
    if (found >= window.least && found <= window.most) return middle;
    (found > window.most ? low : high) = middle;
  }
  return low;
}

constexpr size_t kSample = 1024, kPiece = 16;

// A threshold that k elements reach very likely, and not many more.
uint32_t sampled_threshold(const float* v, size_t count, size_t k, uint32_t largest) {
  float sample[kSample];
  // Whole lines, evenly apart.
  constexpr size_t kPieces = kSample / kPiece;
  for (size_t piece = 0; piece < kPieces; ++piece)
    std::memcpy(sample + piece * kPiece, v + piece * (count - kPiece) / (kPieces - 1), kPiece * sizeof(float));
  const double expected = static_cast<double>(k) * kSample / static_cast<double>(count);
  const double spread = std::sqrt(expected);
  Window window{static_cast<size_t>(expected + 1.5 * spread + 1), static_cast<size_t>(expected + 3 * spread + 4)};
  return threshold(sample, kSample, largest + 1, window);
}

// Leaves only those of the n indices whose elements are above the magnitude, and the first others up to k.
size_t trim(const float* v, uint16_t* indices, size_t n, uint32_t magnitude, size_t k) {
  const auto magnitude_of = [v](uint16_t index) {
    uint32_t bits;
    std::memcpy(&bits, v + index, sizeof bits);
    return bits & 0x7fffffff;
  };
  const auto above = std::count_if(indices, indices + n, [&](uint16_t i) { return magnitude_of(i) > magnitude; });
  size_t equal = k - std::min(k, static_cast<size_t>(above)), kept = 0;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t one = magnitude_of(indices[i]);
    if (one < magnitude || (one == magnitude && equal == 0)) continue;
    if (one == magnitude) --equal;
    indices[kept++] = indices[i];
  }
  return kept;
}

}  // namespace

size_t select_largest(const float* v, size_t count, size_t k, uint32_t largest, uint16_t* indices) {
  if (largest == 0) return 0;
  const Window window{k, k + k / 4};
  uint32_t magnitude = 0;
  if (count > 2 * kSample) magnitude = sampled_threshold(v, count, k, largest);
  else magnitude = threshold(v, count, largest + 1, window);
  size_t n = kernels::find_at_least(v, count, magnitude, indices);
  if (n < window.least && magnitude > 1) {
    magnitude = threshold(v, count, magnitude, window);
    n = kernels::find_at_least(v, count, magnitude, indices);
  }
  if (n <= window.most) return n;
  float found[kWireChunk];
  for (size_t i = 0; i < n; ++i) found[i] = v[indices[i]];
  magnitude = threshold(found, n, largest + 1, window);
  const size_t reached = kernels::count_at_least(found, n, magnitude);
  // Everything that reaches it, or too many equal ones.
  return trim(v, indices, n, magnitude, reached <= window.most ? reached : window.least);
}

}  // namespace perseus
