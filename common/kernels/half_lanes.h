// f16 to and from float in integer lanes, for variants without an instruction for it: the bits of base/half.h, without
// branches. Internal linkage, see variant.h; no threads.
#pragma once

#include "kernels/lanes.h"

namespace perseus::kernels {
namespace {

PERSEUS_INLINE Floats half_decode(Halves from) {
  FloatBits half = __builtin_convertvector(from, FloatBits);
  FloatBits sign = (half & 0x8000) << 16;
  FloatBits shifted = (half & 0x7fff) << 13;
  FloatBits exponent = shifted & (0x7c00u << 13);
  FloatBits normal = shifted + (112u << 23);
  // 2^-14 with the denormal's bits below the point, less 2^-14: the subtraction normalises.
  FloatBits small = shifted + (113u << 23);
  constexpr float kSmallestNormal = 0x1p-14f;
  FloatBits denormal = same_bits<FloatBits>(same_bits<Floats>(small) - kSmallestNormal);
  FloatBits special = normal + (112u << 23);
  FloatBits magnitude = exponent == 0 ? denormal : (exponent == (0x7c00u << 13) ? special : normal);
  return same_bits<Floats>(sign | magnitude);
}

PERSEUS_INLINE Halves half_encode(Floats from) {
  FloatBits bits = same_bits<FloatBits>(from);
  FloatBits magnitude = bits & 0x7fffffff;
  FloatBits normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Beside 0.5 a float's last bit counts 2^-24, f16's smallest denormal: the addition rounds.
  constexpr float kHalf = 0.5f;
  constexpr uint32_t kHalfBits = 0x3f000000;
  FloatBits denormal = same_bits<FloatBits>(same_bits<Floats>(magnitude) + kHalf) - kHalfBits;
  FloatBits finite = magnitude < 0x38800000 ? denormal : normal;
  FloatBits infinite = magnitude > 0x7f800000 ? (0x7e00 | ((magnitude >> 13) & 0x3ff)) : (magnitude & 0) + 0x7c00;
  FloatBits half = ((bits >> 16) & 0x8000) | (magnitude >= 0x47800000 ? infinite : finite);
  return narrow(half);
}

}  // namespace
}  // namespace perseus::kernels
