// Blocks of integers of few bits with a scale each. Internal linkage, see variant.h; no threads.
#pragma once

#include "base/integer_blocks.h"
#include "kernels/codec_loops.h"

namespace perseus::kernels {
namespace {

template <size_t kBits>
constexpr size_t kBlockBytes = kIntegerBlock * kBits / 8;
template <size_t kBits>
using Scale = std::conditional_t<kBits == 2, uint16_t, uint32_t>;  // the upper bits of a float
template <size_t kBits>
constexpr size_t kScalesBytes = kScales<kBits> * kScaleBytes<kBits>;

template <size_t kBits>
PERSEUS_INLINE void put_scale(float scale, unsigned char* to) {
  const auto bits = static_cast<Scale<kBits>>(same_bits<uint32_t>(scale) >> (32 - 8 * sizeof(Scale<kBits>)));
  __builtin_memcpy(to, &bits, sizeof bits);
}
template <size_t kBits>
PERSEUS_INLINE float scale_at(const unsigned char* from) {
  Scale<kBits> bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  return same_bits<float>(static_cast<uint32_t>(bits) << (32 - 8 * sizeof bits));
}

template <size_t kCount>
PERSEUS_INLINE uint32_t magnitude_of(const float* v) {
  Ints largest{}, other{};
  for (size_t i = 0; i < kCount; i += 2 * kFloatLanes) {
    largest = larger(largest, magnitudes(load_floats(v + i)));
    other = larger(other, magnitudes(load_floats(v + i + kFloatLanes)));
  }
  return largest_lane(larger(largest, other));
}

template <size_t kBits, bool kResidual>
PERSEUS_INLINE void encode_block(const float* v, const BlockScale* scales, unsigned char* to, float* residual) {
  constexpr uint32_t kMask = (1U << kBits) - 1;
  constexpr size_t kAhead = kIntegerBlock * sizeof(float);  // maybe behind the end of v
  for (size_t w = 0; w < kPartOf<kBits>; w += kFloatLanes) {
    FloatBits words{};
    for (size_t part = 0; part < kInWord<kBits>; ++part) {
      const size_t i = part * kPartOf<kBits> + w;
      const BlockScale by = scales[part / kOfScale<kBits>];
      // The page's next block, which is visited after those of other pages.
      if (!kResidual && i % kLineFloats == 0)
        __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(v + i) + kAhead));
      Floats value = load_floats(v + i);
      Floats rounded = value * by.inverse + kRounder;
      if (kResidual) store_floats(residual + i, value - (rounded - kRounder) * by.scale);
      words |= (same_bits<FloatBits>(rounded) & kMask) << (kBits * part);
    }
    store_vector(to + 4 * w, words);
  }
}

// Lines of x whole, one after the other: streams want that.
template <size_t kBits, Arrival kArrival>
PERSEUS_INLINE void decode_block(const unsigned char* from, const float* scales, float* x) {
  for (size_t line = 0; line < kPartOf<kBits>; line += kLineFloats) {
    for (size_t part = 0; part < kInWord<kBits>; ++part) {
      for (size_t w = line; w < line + kLineFloats; w += kFloatLanes) {
        FloatBits words = load_vector<FloatBits>(from + 4 * w) << (32 - kBits * (part + 1));
        arrive<kArrival>(
            x + part * kPartOf<kBits> + w,
            __builtin_convertvector(same_bits<Ints>(words) >> (32 - kBits), Floats) * scales[part / kOfScale<kBits>]);
      }
    }
  }
}

// The last block, of fewer elements, and a whole block with the same parts, zeros after each.
template <size_t kBits>
struct LastBlock {
  size_t count, part;
  explicit LastBlock(size_t elements) : count(elements), part((elements + kInWord<kBits> - 1) / kInWord<kBits>) {}

  template <class Copy>
  void for_parts(const Copy& copy) const {
    for (size_t begin = 0, at = 0; begin < count; begin += part, at += kPartOf<kBits>)
      copy(begin, at, (count - begin < part ? count - begin : part) * sizeof(float));
  }
  void fill(const float* v, float* block) const {
    for_parts([=](size_t begin, size_t at, size_t bytes) { __builtin_memcpy(block + at, v + begin, bytes); });
  }
  void take(const float* block, float* v) const {
    for_parts([=](size_t begin, size_t at, size_t bytes) { __builtin_memcpy(v + begin, block + at, bytes); });
  }
};

template <size_t kBits, bool kResidual>
bool encode_integers_as(const IntegerEncodeTask& task) {
  uint32_t largest_of_all = 0;
  const auto encode = [&](const float* v, size_t block, unsigned char* to, float* residual)
                          __attribute__((always_inline)) {
                            BlockScale by[kScales<kBits>];
                            unsigned char* scales = task.scales + block * kScalesBytes<kBits>;
                            for (size_t i = 0; i < kScales<kBits>; ++i) {
                              constexpr size_t kCount = kIntegerBlock / kScales<kBits>;
                              uint32_t largest = magnitude_of<kCount>(v + i * kCount);
                              largest_of_all = largest > largest_of_all ? largest : largest_of_all;
                              by[i] = block_scale<kBits>(largest);
                              put_scale<kBits>(by[i].scale, scales + i * sizeof(Scale<kBits>));
                            }
                            encode_block<kBits, kResidual>(v, by, to, residual);
                          };
  const size_t whole =
      walk_pages<kIntegerBlock * sizeof(float)>(task.count * sizeof(float),
                                                [&](size_t offset) __attribute__((always_inline)) {
                                                  const size_t i = offset / sizeof(float);
                                                  encode(task.v + i, i / kIntegerBlock, task.to + i * kBits / 8,
                                                         kResidual ? task.residual + i : nullptr);
                                                }) /
      sizeof(float);
  if (whole < task.count) {
    const LastBlock<kBits> last(task.count - whole);
    float v[kIntegerBlock] = {};
    unsigned char to[kBlockBytes<kBits>];
    last.fill(task.v + whole, v);
    encode(v, whole / kIntegerBlock, to, v);
    __builtin_memcpy(task.to + whole * kBits / 8, to, 4 * last.part);
    if (kResidual) last.take(v, task.residual + whole);
  }
  return largest_of_all < kNotFinite;
}

template <size_t kBits>
bool encode_integers_of(const IntegerEncodeTask& task) {
  return task.residual != nullptr ? encode_integers_as<kBits, true>(task) : encode_integers_as<kBits, false>(task);
}

bool encode_integers_any(const IntegerEncodeTask& task) {
  return task.bits == 2   ? encode_integers_of<2>(task)
         : task.bits == 4 ? encode_integers_of<4>(task)
                          : encode_integers_of<8>(task);
}

template <size_t kBits, Arrival kArrival>
void decode_integers_as(const IntegerDecodeTask& task) {
  float scales[kScales<kBits>];
  const auto scales_of = [&](size_t block) __attribute__((always_inline)) {
    const unsigned char* from = task.scales + block * kScalesBytes<kBits>;
    for (size_t i = 0; i < kScales<kBits>; ++i) scales[i] = scale_at<kBits>(from + i * sizeof(Scale<kBits>));
    return scales;
  };
  const size_t whole =
      walk_pages<kIntegerBlock * sizeof(float)>(
          task.count * sizeof(float),
          [&](size_t offset) __attribute__((always_inline)) {
            const size_t i = offset / sizeof(float);
            decode_block<kBits, kArrival>(task.from + i * kBits / 8, scales_of(i / kIntegerBlock), task.x + i);
          }) /
      sizeof(float);
  if (whole < task.count) {
    constexpr Arrival kBuffered = kArrival == Arrival::kAdd ? Arrival::kAdd : Arrival::kStore;
    const LastBlock<kBits> last(task.count - whole);
    unsigned char from[kBlockBytes<kBits>] = {};
    float x[kIntegerBlock] = {};
    __builtin_memcpy(from, task.from + whole * kBits / 8, 4 * last.part);
    last.fill(task.x + whole, x);
    decode_block<kBits, kBuffered>(from, scales_of(whole / kIntegerBlock), x);
    last.take(x, task.x + whole);
  }
  if (kArrival == Arrival::kStream) stream_fence();
}

template <size_t kBits>
void decode_integers_of(const IntegerDecodeTask& task) {
  switch (possible_arrival(task.arrival, task.x)) {
    case Arrival::kStore:
      return decode_integers_as<kBits, Arrival::kStore>(task);
    case Arrival::kStream:
      return decode_integers_as<kBits, Arrival::kStream>(task);
    case Arrival::kAdd:
      return decode_integers_as<kBits, Arrival::kAdd>(task);
  }
}

void decode_integers_any(const IntegerDecodeTask& task) {
  return task.bits == 2   ? decode_integers_of<2>(task)
         : task.bits == 4 ? decode_integers_of<4>(task)
                          : decode_integers_of<8>(task);
}

}  // namespace
}  // namespace perseus::kernels
