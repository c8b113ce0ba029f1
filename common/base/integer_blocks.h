// How integers of 8, 4 or 2 bits and their scales lie in a chunk (see codec/integers.h), for the CPU's loops and for
// those of a GPU. Internal linkage: the CPU's are compiled for several sets of instructions. Pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/half.h"

namespace perseus {
namespace {

constexpr size_t kIntegerBlock = 256;  // elements; the last block has what is left
template <size_t kBits>
constexpr size_t kInWord = 32 / kBits;
// A block's elements lie in as many parts as a word has integers, and word w has the w-th element of each: packing and
// unpacking are shifts within lanes then, for vectors of every width.
template <size_t kBits>
constexpr size_t kPartOf = kIntegerBlock / kInWord<kBits>;  // elements
// With few bits the largest element of those that share a scale must not be far from the others.
template <size_t kBits>
constexpr size_t kScales = kBits == 2 ? 8 : 1;
template <size_t kBits>
constexpr size_t kScaleBytes = kBits == 2 ? 2 : 4;  // the upper bytes of a float
template <size_t kBits>
constexpr size_t kOfScale = kInWord<kBits> / kScales<kBits>;  // parts
template <size_t kBits>
constexpr uint32_t kLargest = (1U << (kBits - 1)) - 1;
// Added to a float below 2^22, it leaves the integer nearest to it in the lowest bits (ties to even).
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23

// Bytes of a chunk's scales, and of its words.
PERSEUS_EVERYWHERE constexpr size_t integer_scales_bytes(size_t bits, size_t count) {
  return (count + kIntegerBlock - 1) / kIntegerBlock * (bits == 2 ? kScales<2> * kScaleBytes<2> : kScaleBytes<8>);
}
PERSEUS_EVERYWHERE constexpr size_t integer_bytes(size_t bits, size_t count) {
  const size_t in_word = 32 / bits;
  return (count + in_word - 1) / in_word * 4;
}

struct BlockScale {
  float scale, inverse;
};

// The scale keeps few bits, so that its multiples by the integers are floats, and what rounding leaves of an element is
// one too. Below 2^-118 there is no inverse to use: such blocks are zero, all of it stays in the residual.
template <size_t kBits>
PERSEUS_EVERYWHERE inline BlockScale block_scale(uint32_t largest) {
  constexpr uint32_t kSmallest = (127 - 118) << 23, kScaleBits = kBits == 2 ? 0xffff0000 : 0xffffff00;
  if (largest < kSmallest) return {0.0f, 0.0f};
  float magnitude, scale;
  __builtin_memcpy(&magnitude, &largest, sizeof magnitude);
  const float exact = magnitude / static_cast<float>(kLargest<kBits>);
  uint32_t bits;
  __builtin_memcpy(&bits, &exact, sizeof bits);
  bits &= kScaleBits;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return {scale, 1.0f / scale};
}

}  // namespace
}  // namespace perseus
