// Pins the kernels of codecs on every variant this machine runs, against loops that go element by element.
#include "kernels/codec_kernels.h"

#include <gtest/gtest.h>

#include <cfenv>
#include <cmath>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/half.h"
#include "base/integer_blocks.h"
#include "codec_cases.h"
#include "kernels/kernels.h"
#include "variants.h"

namespace perseus::kernels {
namespace {

using perseus_test::kAllValues;
using perseus_test::same_bits;
using perseus_test::Values;
using perseus_test::values_of;
using perseus_test::variants_here;

constexpr float kInf = std::numeric_limits<float>::infinity();

class CodecKernels : public ::testing::TestWithParam<std::string> {
 protected:
  CodecKernels() { select_variant(GetParam().c_str()); }
  ~CodecKernels() override { select_variant("auto"); }
};

uint32_t magnitude(float value) { return float_bits(value) & 0x7fffffff; }

TEST_P(CodecKernels, LargestMagnitudeIsFoundAtEveryPlace) {
  const float one = 1.0f;
  EXPECT_EQ(largest_magnitude(&one, 0), 0u);
  for (size_t count : {1, 2, 7, 16, 33, 500, 16384}) {
    for (size_t place = 0; place < count; place += count > 500 ? 257 : 1) {
      std::vector<float> x = values_of(Values::kNormal, count, 1);
      x[place] = place % 2 == 0 ? -9.0f : 9.0f;
      EXPECT_EQ(largest_magnitude(x.data(), count), float_bits(9.0f));
      for (float special : {kInf, -kInf, std::nanf("")}) {
        const float before = x[(place + 1) % count];
        x[(place + 1) % count] = special;
        EXPECT_GE(largest_magnitude(x.data(), count), kNotFinite);
        EXPECT_EQ(largest_finite_magnitude(x.data(), count), count == 1 ? 0 : float_bits(9.0f));
        x[(place + 1) % count] = before;
      }
    }
  }
}

TEST_P(CodecKernels, ResidualsAreAddedWithTheirMomentum) {
  for (size_t count : {1, 15, 16, 100, 5000}) {
    for (float momentum : {0.0f, 0.3f, 1.0f}) {
      std::vector<float> x = values_of(Values::kNormal, count, 1), residual = values_of(Values::kWide, count, 2);
      std::vector<float> expected(count);
      uint32_t largest = 0;
      for (size_t i = 0; i < count; ++i) {
        expected[i] = x[i] + momentum * residual[i];
        largest = std::max(largest, magnitude(expected[i]));
      }
      EXPECT_EQ(add_to_residual(x.data(), momentum, residual.data(), count), largest);
      EXPECT_TRUE(same_bits(residual, expected));
    }
  }
}

TEST_P(CodecKernels, HalvesHaveTheBitsOfTheScalarConversions) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (Values values : kAllValues) {
      for (size_t count : {1, 31, 1000}) {
        for (float scale : {1.0f, 0x1p20f}) {
          std::vector<float> x = values_of(values, count, 3), y(count), rest(count);
          std::vector<uint16_t> halves(count);
          auto* bytes = reinterpret_cast<unsigned char*>(halves.data());
          encode_halves(dtype, x.data(), scale, 1 / scale, count, bytes, rest.data());
          decode_halves(dtype, bytes, 1 / scale, count, y.data(), Arrival::kStore);
          for (size_t i = 0; i < count; ++i) {
            const bool f16 = dtype == DType::kFloat16;
            const uint16_t half = f16 ? float_to_half(x[i] * scale) : float_to_bfloat16(x[i] * scale);
            const float back = (f16 ? half_to_float(half) : bfloat16_to_float(half)) * (1 / scale);
            ASSERT_EQ(halves[i], half) << x[i];
            ASSERT_EQ(float_bits(y[i]), float_bits(back)) << x[i];
            ASSERT_EQ(rest[i], std::isfinite(back) ? x[i] - back : 0.0f) << x[i];
          }
        }
      }
    }
  }
}

TEST_P(CodecKernels, IntegersLieInPartsOfTheirBlock) {
  for (const size_t bits : {8, 4, 2}) {
    const int largest = (1 << (bits - 1)) - 1;
    std::vector<float> x(300);
    for (size_t i = 0; i < x.size(); ++i)
      x[i] = static_cast<float>(static_cast<int>(i * 37 % (2 * largest + 1)) - largest);
    x[0] = x[256] = static_cast<float>(largest);  // with 2 bits, every scale has one
    std::vector<unsigned char> scales(perseus::integer_scales_bytes(bits, x.size())),
        to(perseus::integer_bytes(bits, x.size()));
    ASSERT_TRUE(encode_integers(bits, x.data(), x.size(), scales.data(), to.data(), nullptr));
    const size_t in_word = 32 / bits;
    for (size_t i = 0; i < x.size(); ++i) {
      const size_t begin = i / 256 * 256, in_block = i - begin;
      const size_t words = (std::min<size_t>(256, x.size() - begin) + in_word - 1) / in_word;
      uint32_t word;
      std::memcpy(&word, to.data() + begin * bits / 8 + 4 * (in_block % words), sizeof word);
      const size_t shift = bits * (in_block / words);
      const int found = static_cast<int32_t>(word << (32 - bits - shift)) >> (32 - bits);
      ASSERT_EQ(found, static_cast<int>(x[i])) << i << " with " << bits << " bits";
    }
  }
}

TEST_P(CodecKernels, IntegersRefuseWhatIsNotFinite) {
  for (const size_t bits : {8, 4, 2}) {
    for (size_t count : {1, 256, 300}) {
      for (size_t place = 0; place < count; ++place) {
        for (float special : {kInf, -std::nanf("")}) {
          std::vector<float> x(count, 1.0f);
          std::vector<unsigned char> scales(perseus::integer_scales_bytes(bits, count)),
              to(perseus::integer_bytes(bits, count));
          EXPECT_TRUE(encode_integers(bits, x.data(), count, scales.data(), to.data(), nullptr));
          x[place] = special;
          EXPECT_FALSE(encode_integers(bits, x.data(), count, scales.data(), to.data(), nullptr));
        }
      }
    }
  }
}

TEST_P(CodecKernels, ElementsAreCountedAndFoundByMagnitude) {
  for (size_t count : {1, 8, 31, 32, 33, 1000, 16384}) {
    for (Values values : {Values::kNormal, Values::kSparse, Values::kDenormal}) {
      std::vector<float> x = values_of(values, count, 4);
      for (uint32_t least : {1u, 0x200u, magnitude(x[0]) | 1, float_bits(1e-3f), float_bits(2.0f)}) {
        std::vector<uint16_t> expected, found(count);
        for (size_t i = 0; i < count; ++i)
          if (magnitude(x[i]) >= least) expected.push_back(static_cast<uint16_t>(i));
        EXPECT_EQ(count_at_least(x.data(), count, least), expected.size());
        found.resize(find_at_least(x.data(), count, least, found.data()));
        EXPECT_EQ(found, expected);
      }
    }
  }
}

TEST_P(CodecKernels, DoNotDependOnTheCallersRoundingModeNorFlushing) {
  const std::vector<float> x = values_of(Values::kNormal, 1000, 1), held = values_of(Values::kDenormal, 1000, 2);
  const auto work = [&] {
    std::vector<float> residual = held;
    add_to_residual(x.data(), 0.7f, residual.data(), 500);  // the other half stays denormal
    std::vector<float> y = residual;
    std::vector<unsigned char> scales(16), to(2000);
    encode_integers(8, residual.data(), 1000, scales.data(), to.data(), residual.data());
    decode_integers(8, scales.data(), to.data(), 1000, y.data(), Arrival::kAdd);
    y.insert(y.end(), residual.begin(), residual.end());
    encode_halves(DType::kFloat16, residual.data(), 0x1p20f, 0x1p-20f, 1000, to.data(), residual.data());
    decode_halves(DType::kFloat16, to.data(), 0.3f, 1000, y.data(), Arrival::kAdd);
    const std::vector<uint16_t> indices{3, 900};
    add_at(y.data(), indices.data(), residual.data(), 2);
    y.insert(y.end(), residual.begin(), residual.end());
    return y;
  };
  const std::vector<float> plain = work();
  std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
  const unsigned int mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);
#endif
  const std::vector<float> other = work();
#if defined(__x86_64__)
  _mm_setcsr(mode);
#endif
  std::fesetround(FE_TONEAREST);
  EXPECT_TRUE(same_bits(plain, other));
}

INSTANTIATE_TEST_SUITE_P(EveryVariant, CodecKernels, ::testing::ValuesIn(variants_here()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace perseus::kernels
