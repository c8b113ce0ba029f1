// Pins what each codec sends: error, size and choice of elements, against references in float64.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "codec_cases.h"
#include "kernels/kernels.h"
#include "variants.h"

namespace perseus {
namespace {

using namespace perseus_test;

constexpr float kInf = std::numeric_limits<float>::infinity();

double largest(const std::vector<float>& x) {
  double largest = 0;
  for (float value : x) largest = std::max(largest, std::abs(static_cast<double>(value)));
  return largest;
}

// ---- f16 and bf16 -------------------------------------------------------------------------------------------------

TEST(HalfFormat, RoundsToElevenBitsWhateverTheRange) {
  auto codec = make_codec(spec_of(CodecKind::kFloat16));
  for (size_t count : kCodecSizes) {
    for (Values values : kAllValues) {
      std::vector<float> x = values_of(values, count, 1);
      std::vector<float> y = decoded(*codec, encoded(*codec, x, nullptr, 0), count);
      // Elements 2^28 below the largest have f16's fixed distance of denormals; the factor is at most 2^126.
      const double unit = std::max(std::ldexp(largest(x), -14 - 25), std::ldexp(1.0, -126 - 25));
      for (size_t i = 0; i < count; ++i) {
        const double exact = static_cast<double>(x[i]);
        ASSERT_LE(std::abs(static_cast<double>(y[i]) - exact), std::max(std::abs(exact) * 0x1p-11, unit)) << i;
      }
    }
  }
}

TEST(HalfFormat, NoFiniteInputOverflowsUnlessItsRoundedValueIsBeyondTheLargestFloat) {
  auto codec = make_codec(spec_of(CodecKind::kFloat16));
  std::vector<float> x{0x1.ffcp127f, -3e38f, 0x1p-149f, 65520.0f};  // the first is the largest with eleven bits
  std::vector<float> y = decoded(*codec, encoded(*codec, x, nullptr, 0), 4);
  EXPECT_EQ(y[0], 0x1.ffcp127f);
  EXPECT_NEAR(y[1] / -3e38, 1.0, 0x1p-11);
  EXPECT_EQ(y[2], 0.0f);
  x = {0x1p-149f, -0x1.8p-148f, 0x1p-140f};
  y = decoded(*codec, encoded(*codec, x, nullptr, 0), 3);
  EXPECT_TRUE(same_bits(x, y));
}

TEST(HalfFormat, AnElementBesideAnInfinityKeepsItsPrecision) {
  auto codec = make_codec(spec_of(CodecKind::kFloat16));
  std::vector<float> x{1e-9f, std::numeric_limits<float>::infinity(), 2.5e-9f};
  std::vector<float> y = decoded(*codec, encoded(*codec, x, nullptr, 0), 3);
  EXPECT_NEAR(y[0], 1e-9, 1e-12);
  EXPECT_NEAR(y[2], 2.5e-9, 2e-12);
}

TEST(HalfFormat, AScaleOfTheSpecsOwnMayOverflow) {
  auto codec = make_codec(scaled_half(1024));
  std::vector<float> x{63.0f, 64.5f, -1e9f, 1e-6f};
  std::vector<float> residual(4);
  std::vector<float> y = decoded(*codec, encoded(*codec, x, &residual, 0), 4);
  EXPECT_EQ(y[0], 63.0f);
  EXPECT_EQ(y[1], std::numeric_limits<float>::infinity());
  EXPECT_EQ(y[2], -std::numeric_limits<float>::infinity());
  EXPECT_NEAR(y[3], 1e-6, 1e-9);
  EXPECT_EQ(residual[1], 0.0f);
  EXPECT_EQ(residual[2], 0.0f);
}

TEST(HalfFormat, BFloat16RoundsToEightBits) {
  auto codec = make_codec(spec_of(CodecKind::kBFloat16));
  for (Values values : {Values::kNormal, Values::kWide, Values::kSparse, Values::kHuge}) {
    std::vector<float> x = values_of(values, 1000, 1);
    std::vector<float> y = decoded(*codec, encoded(*codec, x, nullptr, 0), 1000);
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = static_cast<double>(x[i]);
      ASSERT_LE(std::abs(static_cast<double>(y[i]) - exact), std::abs(exact) * 0x1p-8) << i;
    }
  }
}

TEST(HalfFormat, TakesTwoBytesAnElement) {
  for (CodecKind kind : {CodecKind::kFloat16, CodecKind::kBFloat16}) {
    auto codec = make_codec(spec_of(kind));
    EXPECT_EQ(encoded(*codec, std::vector<float>(1000, 1.0f), nullptr, 0).size(), 8 + 2000u);
    EXPECT_EQ(encoded(*codec, std::vector<float>(1, 1.0f), nullptr, 0).size(), 12u);
    EXPECT_FALSE(codec->keeps_residual());
  }
}

// ---- integers -----------------------------------------------------------------------------------------------------

struct Integers {
  CodecKind kind;
  int largest;
  size_t bits, share_scale;  // elements
};
class IntegerFormat : public testing::TestWithParam<Integers> {};
INSTANTIATE_TEST_SUITE_P(Codecs, IntegerFormat,
                         testing::Values(Integers{CodecKind::kInt8, 127, 8, 256}, Integers{CodecKind::kInt4, 7, 4, 256},
                                         Integers{CodecKind::kInt2, 1, 2, 32}),
                         [](const auto& info) { return "Bits" + std::to_string(info.param.bits); });

// The elements that share a scale, in a block that begins there, of a chunk of so many.
size_t sharing(const Integers& of, size_t begin, size_t count) {
  const size_t in_word = 32 / of.bits,
               words = (std::min<size_t>(256, count - begin / 256 * 256) + in_word - 1) / in_word;
  return words * in_word * of.share_scale / 256;
}

TEST_P(IntegerFormat, RoundsToHalfAStepOfItsBlock) {
  auto codec = make_codec(spec_of(GetParam().kind));
  for (size_t count : kCodecSizes) {
    for (Values values : kAllValues) {
      std::vector<float> x = values_of(values, count, 1);
      std::vector<float> y = decoded(*codec, encoded(*codec, x, nullptr, 0), count);
      for (size_t begin = 0, next = 0; begin < count; begin = next) {
        next = std::min({begin + sharing(GetParam(), begin, count), (begin / 256 + 1) * 256, count});
        const double most =
            largest(std::vector<float>(x.begin() + static_cast<long>(begin), x.begin() + static_cast<long>(next)));
        // Cutting the scale costs the largest elements up to 2^-15 of themselves, and less than half with 2 bits.
        const double half = most / GetParam().largest / 2 * (1 + 1e-5);
        const double bound = std::max(half, std::max(most * 0x1p-15, 0x1p-118));
        for (size_t i = begin; i < next; ++i) ASSERT_NEAR(y[i], x[i], bound) << i << " of " << count;
      }
    }
  }
}

TEST_P(IntegerFormat, GivesMultiplesOfTheScaleBackExactly) {
  auto codec = make_codec(spec_of(GetParam().kind));
  const int largest = GetParam().largest, values = 2 * largest + 1;
  std::vector<float> x(16 * static_cast<size_t>(values));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i) % values - largest) * 0.25f;
  EXPECT_TRUE(same_bits(decoded(*codec, encoded(*codec, x, nullptr, 0), x.size()), x));
}

TEST_P(IntegerFormat, OneLargeElementDoesNotTouchThoseOfOtherScales) {
  auto codec = make_codec(spec_of(GetParam().kind));
  const size_t share = GetParam().share_scale;
  std::vector<float> x = values_of(Values::kNormal, 1024, 1), usual = x;
  x[300] = 1e20f;
  const std::vector<float> y = decoded(*codec, encoded(*codec, x, nullptr, 0), x.size());
  usual = decoded(*codec, encoded(*codec, usual, nullptr, 0), x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    if (i / share == 300 / share) continue;
    ASSERT_EQ(y[i], usual[i]) << i;
  }
}

TEST_P(IntegerFormat, TakesItsBitsAnElementAndItsScales) {
  auto codec = make_codec(spec_of(GetParam().kind));
  const auto size = [&](size_t count) { return encoded(*codec, std::vector<float>(count, 1.0f), nullptr, 0).size(); };
  const size_t of_scale = GetParam().bits == 2 ? 2 : 4;
  const size_t scales = of_scale * 256 / GetParam().share_scale, block = 256 * GetParam().bits / 8;
  EXPECT_EQ(size(1), 8 + scales + 4u);
  EXPECT_EQ(size(256), 8 + scales + block);
  EXPECT_EQ(size(257), 8 + 2 * scales + block + 4u);
  EXPECT_EQ(size(16384), 8 + 64 * (scales + block));
  std::vector<float> x(1000, 1.0f);
  x[7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(encoded(*codec, x, nullptr, 0).size(), 8 + 4000u);
}

// ---- top-k --------------------------------------------------------------------------------------------------------

uint32_t magnitude(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffff;
}

size_t non_zeros(const std::vector<float>& x) {
  return static_cast<size_t>(std::count_if(x.begin(), x.end(), [](float value) { return value != 0.0f; }));
}

TEST(TopKFormat, SendsTheLargestAndAtMostAQuarterMoreThanK) {
  for (double ratio : {0.001, 0.01, 0.1, 0.37}) {
    auto codec = make_codec(top_k(ratio, false));
    for (size_t count : kCodecSizes) {
      for (Values values : kAllValues) {
        for (uint64_t seed = 0; seed < 5; ++seed) {
          std::vector<float> x = values_of(values, count, seed);
          std::vector<Byte> bytes = encoded(*codec, x, nullptr, 0);
          std::vector<float> y = decoded(*codec, bytes, count);
          if (bytes.size() == 8 + 4 * count) {  // dense is shorter
            ASSERT_TRUE(same_bits(x, y));
            continue;
          }
          const auto k = std::max(size_t{1}, static_cast<size_t>(ratio * static_cast<double>(count) + 0.5));
          const size_t sent = non_zeros(y);
          ASSERT_LE(sent, k + k / 4) << count;
          ASSERT_GE(sent, std::min(k, non_zeros(x))) << count;
          uint32_t least_sent = 0xffffffff, most_held = 0;
          for (size_t i = 0; i < count; ++i) {
            if (y[i] != 0.0f) {
              ASSERT_EQ(y[i], x[i]);
              least_sent = std::min(least_sent, magnitude(x[i]));
            } else {
              most_held = std::max(most_held, magnitude(x[i]));
            }
          }
          ASSERT_GE(least_sent, most_held) << count;
        }
      }
    }
  }
}

TEST(TopKFormat, OfEqualElementsTheFirstAreSent) {
  auto codec = make_codec(top_k(0.01, false));
  for (size_t count : {1000, 16384}) {
    std::vector<float> x(count, 2.0f);
    for (size_t i = 0; i < count; i += 7) x[i] = -2.0f;
    x[count - 1] = 3.0f;
    std::vector<float> y = decoded(*codec, encoded(*codec, x, nullptr, 0), count);
    const size_t k = (count + 50) / 100;
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(y[i], i < k - 1 || i == count - 1 ? x[i] : 0.0f) << i;
  }
}

TEST(TopKFormat, FindsAFewElementsThatASampleMisses) {
  auto codec = make_codec(top_k(0.01, false));
  std::vector<float> x(16384, 1e-6f);
  for (size_t i = 1000; i < 1100; ++i) x[i] = static_cast<float>(i);
  std::vector<float> y = decoded(*codec, encoded(*codec, x, nullptr, 0), x.size());
  for (size_t i = 1000; i < 1100; ++i) ASSERT_EQ(y[i], x[i]);
}

TEST(TopKFormat, ZerosCostNothing) {
  for (bool half_values : {false, true}) {
    auto codec = make_codec(top_k(0.1, half_values));
    EXPECT_EQ(encoded(*codec, values_of(Values::kZero, 16384, 0), nullptr, 0).size(), 8u);
    std::vector<float> x(16384);
    x[16000] = -4.0f;
    x[3] = 0x1p-149f;  // the smallest float is no zero
    std::vector<Byte> bytes = encoded(*codec, x, nullptr, 0);
    EXPECT_EQ(bytes.size(), half_values ? 8 + 4 + 4 + 4u : 8 + 4 + 8u);
    EXPECT_EQ(decoded(*codec, bytes, x.size())[16000], -4.0f);
  }
}

TEST(TopKFormat, PositionsAreIndicesOrBitsWhicheverIsShorter) {
  const auto bytes_of = [](double ratio, bool half_values) {
    return encoded(*make_codec(top_k(ratio, half_values)), std::vector<float>(16000, 1.0f), nullptr, 0).size();
  };
  EXPECT_EQ(bytes_of(0.01, false), 8 + 160 * 2 + 160 * 4u);
  EXPECT_EQ(bytes_of(0.01, true), 8 + 4 + 160 * 2 + 160 * 2u);
  EXPECT_EQ(bytes_of(0.5, false), 8 + 2000 + 8000 * 4u);
  EXPECT_EQ(bytes_of(1.0, false), 8 + 16000 * 4u);
  EXPECT_EQ(bytes_of(1.0, true), 8 + 4 + 2000 + 16000 * 2u);
}

// A slice of chunks of different scales, the last one shorter.
struct Slice {
  explicit Slice(size_t n, bool keep = true) {
    for (size_t c = 0; c < n; ++c) {
      const size_t count = c + 1 < n ? kWireChunk : 1000;
      x.push_back(values_of(Values::kNormal, count, c));
      for (float& value : x.back()) value *= static_cast<float>(1 + c % 5);
      residuals.emplace_back(keep ? count : 0);
    }
  }
  // What the chunks decode to, one after the other.
  std::vector<float> over_the_wire(const WireFormat& codec, uint64_t step) {
    std::vector<ChunkSelection> chunks;
    for (size_t c = 0; c < x.size(); ++c)
      chunks.push_back({x[c].data(), residuals[c].empty() ? nullptr : residuals[c].data(), nullptr, x[c].size()});
    std::vector<uint16_t> indices = {7, 8, 9};  // of another slice
    codec.select(chunks.data(), chunks.size(), step, &ThreadPool::none(), &indices);
    std::vector<float> all;
    for (const ChunkSelection& chunk : chunks) {
      std::vector<uint32_t> to(codec.most_bytes(chunk.count) / 4);
      Byte* bytes = reinterpret_cast<Byte*>(to.data());
      const size_t size = codec.encode_selected(chunk, indices.data(), bytes);
      const std::vector<float> y = decoded(codec, std::vector<Byte>(bytes, bytes + size), chunk.count);
      all.insert(all.end(), y.begin(), y.end());
    }
    return all;
  }
  static std::vector<float> in_a_row(const std::vector<std::vector<float>>& parts) {
    std::vector<float> all;
    for (const std::vector<float>& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  }

  std::vector<std::vector<float>> x, residuals;
};

TEST(TopKFormat, OneThresholdHoldsForTheWholeSlice) {
  for (const std::string& variant : variants_here()) {
    kernels::select_variant(variant.c_str());
    for (double ratio : {0.0001, 0.001, 0.01, 0.1}) {
      for (size_t n : {1, 2, 5, 64}) {
        for (bool keep : {false, true}) {
          Slice slice(n, keep);
          const std::vector<float> x = Slice::in_a_row(slice.x);
          const std::vector<float> y = slice.over_the_wire(*make_codec(top_k(ratio, false)), 1);
          const auto k = std::max(size_t{1}, static_cast<size_t>(ratio * static_cast<double>(x.size()) + 0.5));
          ASSERT_GE(non_zeros(y), k) << ratio << ", " << n;
          ASSERT_LE(non_zeros(y), k + k / 4) << ratio << ", " << n;
          uint32_t least_sent = 0xffffffff, most_held = 0;
          const std::vector<float> residual = Slice::in_a_row(slice.residuals);
          for (size_t i = 0; i < x.size(); ++i) {
            if (keep) {
              ASSERT_EQ(y[i] + residual[i], x[i]) << i;
            }
            if (y[i] != 0.0f) {
              ASSERT_EQ(y[i], x[i]) << i;
              least_sent = std::min(least_sent, magnitude(x[i]));
            } else {
              most_held = std::max(most_held, magnitude(x[i]));
            }
          }
          ASSERT_GE(least_sent, most_held) << ratio << ", " << n;
        }
      }
    }
  }
  kernels::select_variant("auto");
}

TEST(TopKFormat, OfASlicesEqualElementsTheFirstAreSent) {
  Slice slice(3);
  for (std::vector<float>& x : slice.x) std::fill(x.begin(), x.end(), 2.0f);
  slice.x[2][10] = -3.0f;
  const std::vector<float> y = slice.over_the_wire(*make_codec(top_k(0.5, false)), 1);
  const size_t elements = 2 * kWireChunk + 1000, k = elements / 2;
  for (size_t i = 0; i < elements; ++i) {
    const float expected = i < k - 1 ? 2.0f : i == 2 * kWireChunk + 10 ? -3.0f : 0.0f;
    ASSERT_EQ(y[i], expected) << i;
  }
}

TEST(TopKFormat, AChunkThatIsNotFiniteGoesWholeAndTheOthersOfItsSliceAsEver) {
  Slice slice(4), without(4);
  slice.x[1][5] = kInf;
  without.x[1].assign(kWireChunk, 0.0f);
  const auto codec = make_codec(top_k(0.01, false));
  const std::vector<float> y = slice.over_the_wire(*codec, 1);
  EXPECT_TRUE(std::equal(slice.x[1].begin(), slice.x[1].end(), y.begin() + kWireChunk));
  size_t sent = 0;
  for (size_t i = 0; i < y.size(); ++i) sent += (i / kWireChunk != 1 && y[i] != 0.0f) ? 1 : 0;
  const size_t k = (2 * kWireChunk + 1000 + 50) / 100;
  EXPECT_GE(sent, k);
  EXPECT_LE(sent, k + k / 4);
  slice.x[1].assign(kWireChunk, kInf);
  slice.x[0] = slice.x[2] = slice.x[1];
  slice.x[3].assign(1000, -kInf);
  for (float value : slice.over_the_wire(*codec, 2)) ASSERT_TRUE(std::isinf(value));
}

TEST(TopKFormat, TheRatioFallsInItsWarmUp) {
  CodecSpec spec = top_k(0.01, false);
  spec.warm_up = 10;
  const auto codec = make_codec(spec);
  const auto sent = [&](uint64_t step) { return non_zeros(Slice(8, false).over_the_wire(*codec, step)); };
  const double elements = 7 * kWireChunk + 1000;
  for (uint64_t step = 1; step < 20; ++step) {
    const double ratio = 0.25 * std::pow(0.04, std::min(1.0, static_cast<double>(step - 1) / 10.0));
    EXPECT_GE(static_cast<double>(sent(step)), ratio * elements - 1) << step;
    EXPECT_LE(static_cast<double>(sent(step)), 1.25 * ratio * elements + 1) << step;
  }
  spec.ratio = 0.05;  // needs none
  EXPECT_LE(static_cast<double>(non_zeros(Slice(8, false).over_the_wire(*make_codec(spec), 1))),
            0.05 * 1.25 * elements);
}

// What an owner gets of `members`, the sum of it, and what it gives back of that.
struct Result {
  Result(const WireFormat& codec, uint64_t members, std::vector<float>* residual) : sum(kWireChunk) {
    for (uint64_t member = 0; member < members; ++member) {
      parts.push_back(encoded(codec, values_of(Values::kNormal, sum.size(), member), nullptr, 1));
      codec.decode_add(parts.back().data(), parts.back().size(), sum.size(), sum.data());
      starts.push_back(parts.back().data());
    }
    std::vector<uint32_t> to(codec.most_bytes(sum.size()) / 4);
    Byte* bytes = reinterpret_cast<Byte*>(to.data());
    const size_t size =
        codec.encode_result(sum.data(), residual != nullptr ? residual->data() : nullptr, sum.size(), 1, starts, bytes);
    result = decoded(codec, std::vector<Byte>(bytes, bytes + size), sum.size());
  }

  std::vector<float> sum, result;
  std::vector<std::vector<Byte>> parts;
  std::vector<const Byte*> starts;
};

TEST(TopKFormat, AResultIsTheWholeUnionOfUpToEightMembers) {
  for (bool half_values : {false, true}) {
    const auto codec = make_codec(top_k(0.01, half_values));
    for (uint64_t members : {1, 2, 8}) {
      std::vector<float> residual(kWireChunk);
      Result kept(*codec, members, &residual), lost(*codec, members, nullptr);
      EXPECT_GE(non_zeros(kept.result), members * 160);
      EXPECT_EQ(non_zeros(kept.result), non_zeros(kept.sum));
      EXPECT_TRUE(same_bits(kept.result, lost.result));
      for (size_t i = 0; i < kWireChunk; ++i) {
        ASSERT_EQ(kept.result[i] + residual[i], kept.sum[i]);
        if (!half_values) {
          ASSERT_EQ(residual[i], 0.0f);
        }
      }
    }
  }
}

TEST(TopKFormat, OfManyMembersTheLargestElementsAreGivenBack) {
  const auto codec = make_codec(top_k(0.01, false));
  std::vector<float> residual(kWireChunk);
  Result result(*codec, 30, &residual);
  const size_t limit = 8 * 205, sent = non_zeros(result.result);
  EXPECT_LE(sent, limit + limit / 4);
  EXPECT_GE(sent, size_t{8 * 164});
  ASSERT_LT(sent, non_zeros(result.sum));
  for (size_t i = 0; i < kWireChunk; ++i) ASSERT_EQ(result.result[i] + residual[i], result.sum[i]);
  // What is left goes out by and by, and ends.
  for (int step = 0; step < 8; ++step) {
    std::vector<float> nothing(kWireChunk);
    std::vector<uint32_t> to(codec->most_bytes(kWireChunk) / 4);
    codec->encode_result(nothing.data(), residual.data(), kWireChunk, 1, result.starts,
                         reinterpret_cast<Byte*>(to.data()));
  }
  EXPECT_EQ(largest(residual), 0.0f);
}

// ---- rotating subset ----------------------------------------------------------------------------------------------

TEST(RotatingFormat, SendsEveryElementOnceInNSteps) {
  for (int every : {1, 2, 3, 8, 70}) {
    auto codec = make_codec(rotate(every, 1.0));
    for (size_t count : kCodecSizes) {
      std::vector<float> x(count, 1.0f), zero(count), residual(count), arrived(count);
      for (uint64_t step = 5; step < 5 + static_cast<uint64_t>(every); ++step) {
        // The first step has the gradient, the others what is left of it.
        std::vector<Byte> bytes = encoded(*codec, step == 5 ? x : zero, &residual, step);
        std::vector<float> y = decoded(*codec, bytes, count);
        size_t sent = 0;
        for (size_t i = 0; i < count; ++i) {
          const bool turn = (i / 16 + step) % static_cast<uint64_t>(every) == 0;
          ASSERT_EQ(y[i], turn ? 1.0f : 0.0f) << i;
          sent += turn;
        }
        ASSERT_EQ(bytes.size(), 8 + 4 * sent);
        codec->decode_add(bytes.data(), bytes.size(), count, arrived.data());
      }
      ASSERT_EQ(arrived, x);
      ASSERT_EQ(residual, zero);
    }
  }
}

TEST(RotatingFormat, WhatWaitsIsDiscountedByItsAge) {
  auto codec = make_codec(rotate(4, 0.5));
  std::vector<float> residual(64);
  // Block 0 had its turn in step 0 and has it again in step 4: 8 + 4 / 2 … of what came since.
  for (uint64_t step = 0; step < 5; ++step) {
    std::vector<float> x(64, std::ldexp(1.0f, static_cast<int>(step)));
    std::vector<float> y = decoded(*codec, encoded(*codec, x, &residual, step), x.size());
    if (step == 0) {
      EXPECT_EQ(y[0], 1.0f);
    }
    if (step == 3) {
      EXPECT_EQ(residual[0], 2 * 0.25f + 4 * 0.5f + 8);
    }
    if (step == 4) {
      EXPECT_EQ(y[0], 2 * 0.125f + 4 * 0.25f + 8 * 0.5f + 16);
    }
  }
}

TEST(RotatingFormat, SumsOverRanksAreDense) {
  auto codec = make_codec(rotate(8, 1.0));
  std::vector<float> sum(1000), expected(1000);
  for (uint64_t rank = 0; rank < 3; ++rank) {
    std::vector<float> x = values_of(Values::kNormal, sum.size(), rank);
    std::vector<Byte> bytes = encoded(*codec, x, nullptr, 6);
    codec->decode_add(bytes.data(), bytes.size(), sum.size(), sum.data());
    for (size_t i = 0; i < sum.size(); ++i) expected[i] += (i / 16 + 6) % 8 == 0 ? x[i] : 0.0f;
  }
  EXPECT_EQ(sum, expected);
  EXPECT_EQ(decoded(*codec, encoded(*codec, sum, nullptr, 6), sum.size()), expected);
}

}  // namespace
}  // namespace perseus
