// Conversions between float and the two 16-bit formats, in integer arithmetic: the same bits on every machine, whatever
// its rounding mode. f16 keeps denormals; both round to nearest even; NaN stays NaN (made quiet, the upper payload
// kept). Thread-safe: pure functions.
#pragma once

#include <cstdint>
#include <cstring>

// For the CPU and, where nvcc compiles it, for a GPU.
#ifdef __CUDACC__
#define PERSEUS_EVERYWHERE __host__ __device__
#else
#define PERSEUS_EVERYWHERE
#endif

namespace perseus {

PERSEUS_EVERYWHERE inline uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

PERSEUS_EVERYWHERE inline float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// The value bits / 2^shift rounded to nearest, ties to even; 1 <= shift <= 31.
PERSEUS_EVERYWHERE inline uint32_t shift_right_to_even(uint32_t bits, int shift) {
  uint32_t half = uint32_t{1} << (shift - 1);
  uint32_t odd = (bits >> shift) & 1;
  return (bits + half - 1 + odd) >> shift;
}

PERSEUS_EVERYWHERE inline uint16_t float_to_half(float value) {
  constexpr uint32_t kInfinity = 0x7f800000, kTooLarge = 0x47800000, kSmallestNormal = 0x38800000;
  uint32_t bits = float_bits(value);
  uint32_t sign = (bits >> 16) & 0x8000;
  uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kInfinity) return static_cast<uint16_t>(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
  if (magnitude >= kTooLarge) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude >= kSmallestNormal) {
    // A carry out of the mantissa moves the exponent on, up to infinity: exactly what rounding asks for.
    return static_cast<uint16_t>(sign | shift_right_to_even(magnitude - (uint32_t{112} << 23), 13));
  }
  int shift = 126 - static_cast<int>(magnitude >> 23);  // counts units of 2^-24, f16's smallest denormal
  if (shift > 24) return static_cast<uint16_t>(sign);   // at most half of that unit, and a tie goes to zero
  return static_cast<uint16_t>(sign | shift_right_to_even((magnitude & 0x7fffff) | 0x800000, shift));
}

PERSEUS_EVERYWHERE inline float half_to_float(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  uint32_t exponent = (half >> 10) & 0x1f;
  uint32_t mantissa = half & 0x3ff;
  if (exponent == 31) {
    uint32_t quiet = mantissa != 0 ? 0x400000 : 0;
    return float_from_bits(sign | 0x7f800000 | quiet | (mantissa << 13));
  }
  if (exponent != 0) return float_from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (mantissa == 0) return float_from_bits(sign);
  exponent = 113;
  while ((mantissa & 0x400) == 0) {
    mantissa <<= 1;
    --exponent;
  }
  return float_from_bits(sign | (exponent << 23) | ((mantissa & 0x3ff) << 13));
}

PERSEUS_EVERYWHERE inline uint16_t float_to_bfloat16(float value) {
  uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>(shift_right_to_even(bits, 16));
}

PERSEUS_EVERYWHERE inline float bfloat16_to_float(uint16_t value) {
  return float_from_bits(static_cast<uint32_t>(value) << 16);
}

// The power of two that brings the largest finite element of a chunk, of this magnitude, to [2^14, 2^15): rounding
// cannot carry it past f16's end at 2^16. Both the factor and its inverse are normal floats.
PERSEUS_EVERYWHERE inline float half_scale(uint32_t largest_magnitude) {
  const int exponent = static_cast<int>(largest_magnitude >> 23) - 127;
  int shift = largest_magnitude == 0 ? 0 : 14 - exponent;
  if (shift > 126) shift = 126;
  return float_from_bits(static_cast<uint32_t>(shift + 127) << 23);
}

}  // namespace perseus
