// Blocks of 8-bit integers with a scale each. Internal linkage, see variant.h; no threads.
//
// A block's elements lie in four quarters, and word w of it holds the w-th element of each: packing and unpacking are
// shifts within lanes then, for vectors of every width.
#pragma once

#include "kernels/codec_loops.h"

namespace perseus::kernels {
namespace {

constexpr size_t kQuarter = kByteBlock / 4;
// Added to a float below 2^22, it leaves the integer nearest to it in the lowest bits (ties to even).
constexpr float kRounder = 0x1.8p23f;

struct BlockScale {
  float scale, inverse;
};

// The scale keeps 16 bits, so that its multiples by up to 127 are floats, and what rounding leaves of an element is one
// too. Below 2^-118 there is no inverse to use: such blocks are zero, all of it stays in the residual.
PERSEUS_INLINE BlockScale block_scale(uint32_t largest) {
  constexpr uint32_t kSmallest = (127 - 118) << 23, kScaleBits = 0xffffff00;
  if (largest < kSmallest) return {0.0f, 0.0f};
  float scale = same_bits<float>(same_bits<uint32_t>(same_bits<float>(largest) / 127.0f) & kScaleBits);
  return {scale, 1.0f / scale};
}

PERSEUS_INLINE uint32_t block_magnitude(const float* v) {
  Ints largest{}, other{};
  for (size_t i = 0; i < kByteBlock; i += 2 * kFloatLanes) {
    largest = larger(largest, magnitudes(load_floats(v + i)));
    other = larger(other, magnitudes(load_floats(v + i + kFloatLanes)));
  }
  return largest_lane(larger(largest, other));
}

template <bool kResidual>
PERSEUS_INLINE void encode_block(const float* v, BlockScale by, unsigned char* to, float* residual) {
  for (size_t w = 0; w < kQuarter; w += kFloatLanes) {
    FloatBits words{};
    for (size_t quarter = 0; quarter < 4; ++quarter) {
      const size_t i = quarter * kQuarter + w;
      // The page's next block, which is visited after those of other pages.
      if (!kResidual && i % kLineFloats == 0) __builtin_prefetch(v + i + kByteBlock);
      Floats value = load_floats(v + i);
      Floats rounded = value * by.inverse + kRounder;
      if (kResidual) store_floats(residual + i, value - (rounded - kRounder) * by.scale);
      words |= (same_bits<FloatBits>(rounded) & 0xff) << (8 * quarter);
    }
    store_vector(to + 4 * w, words);
  }
}

// Lines of x whole, one after the other: streams want that.
template <Arrival kArrival>
PERSEUS_INLINE void decode_block(const unsigned char* from, float scale, float* x) {
  for (size_t line = 0; line < kQuarter; line += kLineFloats) {
    for (size_t quarter = 0; quarter < 4; ++quarter) {
      for (size_t w = line; w < line + kLineFloats; w += kFloatLanes) {
        FloatBits words = load_vector<FloatBits>(from + 4 * w) << (24 - 8 * quarter);
        arrive<kArrival>(x + quarter * kQuarter + w,
                         __builtin_convertvector(same_bits<Ints>(words) >> 24, Floats) * scale);
      }
    }
  }
}

// The last block, of fewer elements, and a whole block with the same quarters, zeros after each.
struct LastBlock {
  size_t count, quarter;
  explicit LastBlock(size_t elements) : count(elements), quarter((elements + 3) / 4) {}

  template <class Copy>
  void for_quarters(const Copy& copy) const {
    for (size_t begin = 0, at = 0; begin < count; begin += quarter, at += kQuarter)
      copy(begin, at, (count - begin < quarter ? count - begin : quarter) * sizeof(float));
  }
  void fill(const float* v, float* block) const {
    for_quarters([=](size_t begin, size_t at, size_t bytes) { __builtin_memcpy(block + at, v + begin, bytes); });
  }
  void take(const float* block, float* v) const {
    for_quarters([=](size_t begin, size_t at, size_t bytes) { __builtin_memcpy(v + begin, block + at, bytes); });
  }
};

template <bool kResidual>
bool encode_bytes_as(const ByteEncodeTask& task) {
  uint32_t largest_of_all = 0;
  const auto encode = [&](const float* v, size_t block, unsigned char* to, float* residual)
                          __attribute__((always_inline)) {
                            uint32_t largest = block_magnitude(v);
                            largest_of_all = largest > largest_of_all ? largest : largest_of_all;
                            BlockScale by = block_scale(largest);
                            __builtin_memcpy(task.scales + block * sizeof(float), &by.scale, sizeof(float));
                            encode_block<kResidual>(v, by, to, residual);
                          };
  const size_t whole = walk_pages<kByteBlock * sizeof(float)>(task.count * sizeof(float),
                                                              [&](size_t offset) __attribute__((always_inline)) {
                                                                const size_t i = offset / sizeof(float);
                                                                encode(task.v + i, i / kByteBlock, task.to + i,
                                                                       kResidual ? task.residual + i : nullptr);
                                                              }) /
                       sizeof(float);
  if (whole < task.count) {
    const LastBlock last(task.count - whole);
    float v[kByteBlock] = {};
    unsigned char to[kByteBlock];
    last.fill(task.v + whole, v);
    encode(v, whole / kByteBlock, to, v);
    __builtin_memcpy(task.to + whole, to, 4 * last.quarter);
    if (kResidual) last.take(v, task.residual + whole);
  }
  return largest_of_all < kNotFinite;
}

bool encode_bytes_any(const ByteEncodeTask& task) {
  return task.residual != nullptr ? encode_bytes_as<true>(task) : encode_bytes_as<false>(task);
}

template <Arrival kArrival>
void decode_bytes_as(const ByteDecodeTask& task) {
  const auto scale_of = [&](size_t block) __attribute__((always_inline)) {
    float scale;
    __builtin_memcpy(&scale, task.scales + block * sizeof scale, sizeof scale);
    return scale;
  };
  const size_t whole = walk_pages<kByteBlock * sizeof(float)>(
                           task.count * sizeof(float),
                           [&](size_t offset) __attribute__((always_inline)) {
                             const size_t i = offset / sizeof(float);
                             decode_block<kArrival>(task.from + i, scale_of(i / kByteBlock), task.x + i);
                           }) /
                       sizeof(float);
  if (whole < task.count) {
    constexpr Arrival kBuffered = kArrival == Arrival::kAdd ? Arrival::kAdd : Arrival::kStore;
    const LastBlock last(task.count - whole);
    unsigned char from[kByteBlock] = {};
    float x[kByteBlock] = {};
    __builtin_memcpy(from, task.from + whole, 4 * last.quarter);
    last.fill(task.x + whole, x);
    decode_block<kBuffered>(from, scale_of(whole / kByteBlock), x);
    last.take(x, task.x + whole);
  }
  if (kArrival == Arrival::kStream) stream_fence();
}

void decode_bytes_any(const ByteDecodeTask& task) {
  switch (possible_arrival(task.arrival, task.x)) {
    case Arrival::kStore:
      return decode_bytes_as<Arrival::kStore>(task);
    case Arrival::kStream:
      return decode_bytes_as<Arrival::kStream>(task);
    case Arrival::kAdd:
      return decode_bytes_as<Arrival::kAdd>(task);
  }
}

}  // namespace
}  // namespace perseus::kernels
