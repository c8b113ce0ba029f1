// Pins base/half.h to the formats' definition: every f16 and bf16 value, and rounding at every tie between two of them.
#include "base/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace perseus {
namespace {

// From the definition, without looking at float's bits.
double half_value(uint16_t half) {
  int exponent = (half >> 10) & 0x1f;
  int mantissa = half & 0x3ff;
  double sign = (half & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

TEST(HalfTest, EveryHalfHasItsValueAsAFloat) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    uint16_t half = static_cast<uint16_t>(h);
    double expected = half_value(half);
    float got = half_to_float(half);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(got)) << std::hex << h;
    } else {
      ASSERT_EQ(got, expected) << std::hex << h;
    }
    ASSERT_EQ(std::signbit(got), (h & 0x8000) != 0) << std::hex << h;
  }
}

TEST(HalfTest, EveryHalfSurvivesTheWayToFloatAndBack) {
  for (uint32_t h = 0; h < 0x10000; ++h) {
    bool nan = (h & 0x7c00) == 0x7c00 && (h & 0x3ff) != 0;
    uint32_t expected = nan ? h | 0x200 : h;
    ASSERT_EQ(float_to_half(half_to_float(static_cast<uint16_t>(h))), expected) << std::hex << h;
  }
}

TEST(HalfTest, BetweenTwoHalvesRoundsToTheNearestAndTiesToEven) {
  for (uint32_t h = 0; h < 0x7bff; ++h) {
    double low = half_value(static_cast<uint16_t>(h));
    double high = half_value(static_cast<uint16_t>(h + 1));
    float middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(middle, (low + high) / 2);
    uint32_t even = (h & 1) == 0 ? h : h + 1;
    ASSERT_EQ(float_to_half(middle), even) << std::hex << h;
    ASSERT_EQ(float_to_half(-middle), even | 0x8000) << std::hex << h;
    ASSERT_EQ(float_to_half(std::nextafter(middle, 0.0f)), h) << std::hex << h;
    ASSERT_EQ(float_to_half(std::nextafter(middle, 1e9f)), h + 1) << std::hex << h;
  }
}

TEST(HalfTest, TooLargeBecomesInfiniteFromTheTieOn) {
  EXPECT_EQ(float_to_half(65504.0f), 0x7bff);
  EXPECT_EQ(float_to_half(std::nextafter(65520.0f, 0.0f)), 0x7bff);
  EXPECT_EQ(float_to_half(65520.0f), 0x7c00);
  EXPECT_EQ(float_to_half(-65536.0f), 0xfc00);
  EXPECT_EQ(float_to_half(std::numeric_limits<float>::max()), 0x7c00);
  EXPECT_EQ(float_to_half(-std::numeric_limits<float>::infinity()), 0xfc00);
}

TEST(HalfTest, TooSmallBecomesZeroOfTheSameSign) {
  EXPECT_EQ(float_to_half(0x1p-25f), 0);
  EXPECT_EQ(float_to_half(std::nextafter(0x1p-25f, 1.0f)), 1);
  EXPECT_EQ(float_to_half(-0x1p-30f), 0x8000);
  EXPECT_EQ(float_to_half(std::numeric_limits<float>::denorm_min()), 0);
  EXPECT_EQ(float_to_half(-0.0f), 0x8000);
}

TEST(HalfTest, NanKeepsItsSignAndUpperPayload) {
  EXPECT_EQ(float_to_half(float_from_bits(0x7fc00000)), 0x7e00);
  EXPECT_EQ(float_to_half(float_from_bits(0xff802000)), 0xfe01);
  EXPECT_EQ(float_to_half(float_from_bits(0x7f800001)), 0x7e00);
  EXPECT_EQ(float_to_bfloat16(float_from_bits(0x7f800001)), 0x7fc0);
  EXPECT_EQ(float_to_bfloat16(float_from_bits(0xffffffff)), 0xffff);
}

TEST(HalfTest, BFloat16RoundsToTheNearestAndTiesToEven) {
  for (uint32_t b = 0; b < 0x7f80; ++b) {
    uint32_t exact = b << 16;
    ASSERT_EQ(float_bits(bfloat16_to_float(static_cast<uint16_t>(b))), exact);
    uint32_t even = (b & 1) == 0 ? b : b + 1;
    ASSERT_EQ(float_to_bfloat16(float_from_bits(exact)), b);
    ASSERT_EQ(float_to_bfloat16(float_from_bits(exact | 0x7fff)), b);
    ASSERT_EQ(float_to_bfloat16(float_from_bits(exact | 0x8000)), even);
    ASSERT_EQ(float_to_bfloat16(float_from_bits(exact | 0x8001)), b + 1);
    ASSERT_EQ(float_to_bfloat16(float_from_bits(exact | 0x80008000)), even | 0x8000);
  }
  EXPECT_EQ(float_to_bfloat16(std::numeric_limits<float>::max()), 0x7f80);
  EXPECT_EQ(float_to_bfloat16(-std::numeric_limits<float>::infinity()), 0xff80);
}

}  // namespace
}  // namespace perseus
