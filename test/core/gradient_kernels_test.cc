// Pins the kernels over single gradients on every variant this machine runs: NaNs are found wherever they are, and
// running sums have the bits of a loop that goes element by element.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/half.h"
#include "kernels/kernels.h"
#include "variants.h"

namespace perseus::kernels {
namespace {

using perseus_test::variants_here;

constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

void put(DType dtype, unsigned char* at, uint64_t bits) { std::memcpy(at, &bits, dtype_size(dtype)); }

struct Bits {
  uint64_t infinity, sign;
};
Bits bits_of(DType dtype) {
  if (dtype == DType::kFloat16) return {0x7c00, 0x8000};
  if (dtype == DType::kBFloat16) return {0x7f80, 0x8000};
  if (dtype == DType::kFloat32) return {0x7f800000, 0x80000000};
  return {0x7ff0000000000000, 0x8000000000000000};
}

TEST(HasNan, FindsEveryKindOfNanAtEveryPlaceAndNothingElse) {
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    for (DType dtype : kFloats) {
      const auto [infinity, sign] = bits_of(dtype);
      const size_t size = dtype_size(dtype);
      for (size_t count : {1, 3, 31, 64, 257, 5000, 140000}) {
        for (size_t offset : {0, 1}) {  // in bytes: any alignment will do
          SCOPED_TRACE(variant + " " + dtype_name(dtype) + " " + std::to_string(count));
          std::vector<unsigned char> memory(offset + count * size);
          unsigned char* data = memory.data() + offset;
          // Neither infinity nor the largest number is a NaN, of either sign.
          for (size_t i = 0; i < count; ++i)
            put(dtype, data + i * size, (i % 2 == 0 ? sign : 0) | (infinity - (i % 3 == 0 ? 1 : 0)));
          EXPECT_FALSE(has_nan(dtype, data, count));
          std::mt19937_64 random(count);
          for (size_t place = 0; place < count; place += 1 + random() % (count > 300 ? count / 16 : 1)) {
            for (uint64_t nan : {infinity + 1, sign | (infinity + 1), sign | (sign - 1)}) {
              uint64_t before = 0;
              std::memcpy(&before, data + place * size, size);
              put(dtype, data + place * size, nan);
              EXPECT_TRUE(has_nan(dtype, data, count)) << "at " << place;
              put(dtype, data + place * size, before);
            }
          }
          put(dtype, data + (count - 1) * size, infinity + 1);
          EXPECT_TRUE(has_nan(dtype, data, count)) << "at the end";
          EXPECT_FALSE(has_nan(dtype, data, count - 1)) << "read beyond the end";
        }
      }
    }
  }
  select_variant("auto");
}

TEST(HasNan, KnowsNoNanInIntegers) {
  const std::vector<unsigned char> ones(64, 0xff);
  for (DType dtype : {DType::kUInt8, DType::kInt16, DType::kInt32, DType::kInt64, DType::kBool})
    EXPECT_FALSE(has_nan(dtype, ones.data(), 64 / dtype_size(dtype))) << dtype_name(dtype);
}

// Three arrays of `count` values that differ everywhere and are not exact in 16 bits when added.
std::vector<std::vector<double>> operands(size_t count) {
  std::vector<std::vector<double>> all(3, std::vector<double>(count));
  for (size_t k = 0; k < all.size(); ++k)
    for (size_t i = 0; i < count; ++i)
      all[k][i] = std::ldexp(static_cast<double>((i * 37 + k * 101) % 1009) - 500, static_cast<int>(i % 7) - 8);
  return all;
}

template <class T>
std::vector<unsigned char> stored(const std::vector<double>& values, T (*encode)(float)) {
  std::vector<unsigned char> bytes(values.size() * sizeof(T));
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = encode(static_cast<float>(values[i]));
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof value);
  }
  return bytes;
}

template <class T>
T itself(float value) {
  return value;
}

// dst = (x0 + x1) + x2 as `add` and `encode` see it, against start, add, finish; in place as the engine does it.
template <class T>
void check_sum(DType dtype, T (*encode)(float), double (*decode)(T)) {
  for (size_t count : {1, 7, 33, 1000, 70001}) {
    SCOPED_TRACE(std::string(variant()) + " " + dtype_name(dtype) + " " + std::to_string(count));
    std::vector<std::vector<unsigned char>> x;
    for (const auto& values : operands(count)) x.push_back(stored(values, encode));
    std::vector<unsigned char> expected(count * sizeof(T));
    for (size_t i = 0; i < count; ++i) {
      T value[3];
      for (size_t k = 0; k < 3; ++k) std::memcpy(&value[k], x[k].data() + i * sizeof(T), sizeof(T));
      T result;
      if constexpr (sizeof(T) == 2) {
        // Not rounded in between: the sum is a float.
        volatile float sum = static_cast<float>(decode(value[0]));
        for (size_t k = 1; k < 3; ++k) sum = sum + static_cast<float>(decode(value[k]));
        result = encode(sum);
      } else {
        volatile T sum = value[0];
        for (size_t k = 1; k < 3; ++k) sum = sum + value[k];
        result = sum;
      }
      std::memcpy(expected.data() + i * sizeof(T), &result, sizeof(T));
    }
    constexpr unsigned char kGuard = 0x5a;
    std::vector<unsigned char> sum(count * sum_size(dtype) + 16, kGuard);
    start_sum(dtype, sum.data(), x[0].data(), count);
    add_to_sum(dtype, sum.data(), x[1].data(), count);
    x[2].resize(x[2].size() + 16, kGuard);
    finish_sum(dtype, x[2].data(), sum.data(), x[2].data(), count);
    EXPECT_EQ(std::memcmp(x[2].data(), expected.data(), expected.size()), 0);
    for (size_t i = 0; i < 16; ++i) {
      EXPECT_EQ(sum[count * sum_size(dtype) + i], kGuard);
      EXPECT_EQ(x[2][count * sizeof(T) + i], kGuard);
    }
  }
}

TEST(RunningSum, IsRoundedOnceAndTheSameForEveryVariant) {
  for (const std::string& name : variants_here()) {
    select_variant(name.c_str());
    check_sum<uint16_t>(
        DType::kFloat16, [](float v) { return float_to_half(v); },
        [](uint16_t v) { return static_cast<double>(half_to_float(v)); });
    check_sum<uint16_t>(
        DType::kBFloat16, [](float v) { return float_to_bfloat16(v); },
        [](uint16_t v) { return static_cast<double>(bfloat16_to_float(v)); });
    check_sum<float>(DType::kFloat32, itself<float>, nullptr);
    check_sum<double>(DType::kFloat64, itself<double>, nullptr);
  }
  select_variant("auto");
}

TEST(RunningSum, Of16BitFloatsKeepsWhatTheyCouldNotHold) {
  for (const std::string& name : variants_here()) {
    select_variant(name.c_str());
    // 1 + 2^-11 + 2^-11: each addition alone would round back to 1.
    uint16_t one = float_to_half(1.0f), small = float_to_half(0x1p-11f), result = 0;
    float sum = 0;
    start_sum(DType::kFloat16, &sum, &one, 1);
    add_to_sum(DType::kFloat16, &sum, &small, 1);
    finish_sum(DType::kFloat16, &result, &sum, &small, 1);
    EXPECT_EQ(half_to_float(result), 1.0f + 0x1p-10f) << name;
  }
  select_variant("auto");
}

}  // namespace
}  // namespace perseus::kernels
