// Pins the contract of collective/wire_format.h for every codec, on every SIMD variant this machine runs: the same
// bits, nothing lost between what is decoded and what is held, Inf and NaN out at once.
#include "codec/codec.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "codec/whole.h"
#include "codec_cases.h"
#include "kernels/kernels.h"
#include "variants.h"

namespace perseus {
namespace {

using namespace perseus_test;
using kernels::select_variant;

constexpr float kInf = std::numeric_limits<float>::infinity();

std::string describe(const CodecSpec& spec, size_t count, int values) {
  return codec_name(spec) + ", " + std::to_string(count) + " elements, values " + std::to_string(values);
}

class CodecTest : public ::testing::TestWithParam<size_t> {
 protected:
  ~CodecTest() override { select_variant("auto"); }

  CodecSpec spec_ = all_codecs()[GetParam()];
  std::unique_ptr<WireFormat> codec_ = make_codec(spec_);
};

TEST_P(CodecTest, SaysItsSizeAndStaysBelowTheMost) {
  for (size_t count : kCodecSizes) {
    for (Values values : kAllValues) {
      SCOPED_TRACE(describe(spec_, count, static_cast<int>(values)));
      for (float special : {0.0f, kInf}) {
        std::vector<float> x = values_of(values, count, 3);
        if (special != 0.0f) x[count / 2] = special;
        std::vector<Byte> bytes = encoded(*codec_, x, nullptr, 0);
        uint32_t said;
        std::memcpy(&said, bytes.data(), 4);
        EXPECT_EQ(said, bytes.size());
        EXPECT_EQ(bytes.size() % 4, 0u);
        EXPECT_LE(bytes.size(), codec_->most_bytes(count));
      }
    }
  }
}

TEST_P(CodecTest, GivesTheSameBitsOnEveryVariant) {
  for (size_t count : kCodecSizes) {
    for (Values values : kAllValues) {
      for (bool keep : {false, true}) {
        SCOPED_TRACE(describe(spec_, count, static_cast<int>(values)) + (keep ? ", residual" : ""));
        std::vector<std::vector<Byte>> expected;
        std::vector<float> expected_residual, expected_sum;
        for (const std::string& variant : variants_here()) {
          select_variant(variant.c_str());
          std::vector<float> residual(count), sum = values_of(Values::kNormal, count, 9);
          for (uint64_t step = 0; step < 3; ++step) {
            std::vector<Byte> bytes =
                encoded(*codec_, values_of(values, count, step), keep ? &residual : nullptr, step);
            codec_->decode_add(bytes.data(), bytes.size(), count, sum.data());
            if (variant == "portable") expected.push_back(bytes);
            ASSERT_EQ(bytes, expected[step]) << variant << ", step " << step;
          }
          if (variant == "portable") expected_residual = residual, expected_sum = sum;
          ASSERT_TRUE(same_bits(residual, expected_residual)) << variant;
          ASSERT_TRUE(same_bits(sum, expected_sum)) << variant;
        }
      }
    }
  }
}

TEST_P(CodecTest, AllWaysOfDecodingAgree) {
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    for (size_t count : kCodecSizes) {
      for (Values values : kAllValues) {
        for (size_t offset : {0, 1}) {  // streaming is for aligned memory, and must not need it
          SCOPED_TRACE(variant + " " + describe(spec_, count, static_cast<int>(values)));
          std::vector<Byte> bytes = encoded(*codec_, values_of(values, count, 5), nullptr, 2);
          std::vector<float> x = decoded(*codec_, bytes, count);
          std::vector<float> streamed(count + offset, 77.0f), sum(count), before = values_of(values, count, 6);
          codec_->decode_streamed(bytes.data(), bytes.size(), count, streamed.data() + offset);
          streamed.erase(streamed.begin(), streamed.begin() + static_cast<long>(offset));
          EXPECT_TRUE(same_bits(streamed, x));
          for (size_t i = 0; i < count; ++i) sum[i] = before[i] + x[i];
          codec_->decode_add(bytes.data(), bytes.size(), count, before.data());
          for (size_t i = 0; i < count; ++i) ASSERT_EQ(before[i], sum[i]) << i;
        }
      }
    }
  }
}

TEST_P(CodecTest, DecodedPlusResidualIsWhatWasThereBitForBit) {
  for (size_t count : kCodecSizes) {
    for (Values values : kAllValues) {
      // What a scale of one's own makes overflow is lost, as asked for.
      bool overflows = spec_.scale != 0.0 && (values == Values::kHuge || values == Values::kWide);
      if (overflows || spec_.momentum != 1.0) continue;
      SCOPED_TRACE(describe(spec_, count, static_cast<int>(values)));
      std::vector<float> residual(count), before;
      for (uint64_t step = 0; step < (count > 1000 ? 4 : 20); ++step) {
        std::vector<float> x = values_of(values, count, step);
        if (values == Values::kHuge && step > 0) x.assign(count, 0.0f);  // two of them are beyond the largest float
        before = residual;
        std::vector<float> y = decoded(*codec_, encoded(*codec_, x, &residual, step), count);
        for (size_t i = 0; i < count; ++i) {
          const float v = x[i] + before[i];
          ASSERT_EQ(static_cast<double>(y[i]) + static_cast<double>(residual[i]), static_cast<double>(v))
              << "element " << i << ", step " << step << ": " << v << " became " << y[i] << " and " << residual[i];
        }
      }
    }
  }
}

TEST_P(CodecTest, FiftyStepsLoseNothing) {
  if (spec_.momentum != 1.0) return;
  for (size_t count : kCodecSizes) {
    SCOPED_TRACE(describe(spec_, count, 0));
    // Multiples of 2^-10 below 8 beside one element of 127 in every 256, which makes a block's scale 1: floats hold
    // every sum of them exactly, so the identity over all steps is one of bits.
    std::mt19937_64 random(count);
    std::vector<float> residual(count);
    std::vector<double> produced(count), arrived(count);
    for (uint64_t step = 0; step < 50; ++step) {
      std::vector<float> x(count);
      for (size_t i = 0; i < count; ++i) {
        x[i] = i % 256 == 0 ? 127.0f : static_cast<float>(static_cast<int>(random() % 16001) - 8000) / 1024;
        produced[i] += static_cast<double>(x[i]);
      }
      std::vector<float> y = decoded(*codec_, encoded(*codec_, x, &residual, step), count);
      for (size_t i = 0; i < count; ++i) arrived[i] += static_cast<double>(y[i]);
    }
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(arrived[i] + static_cast<double>(residual[i]), produced[i]) << i;
  }
}

TEST_P(CodecTest, FiftyStepsOfRandomValuesLoseNoMoreThanTheirSumsRound) {
  if (spec_.momentum != 1.0) return;
  constexpr size_t kCount = 1000;
  std::vector<float> residual(kCount);
  std::vector<double> produced(kCount), arrived(kCount), bound(kCount);
  for (uint64_t step = 0; step < 50; ++step) {
    std::vector<float> x = values_of(Values::kNormal, kCount, step);
    for (size_t i = 0; i < kCount; ++i) {
      produced[i] += static_cast<double>(x[i]);
      bound[i] += 0x1p-24 * std::abs(static_cast<double>(x[i]) + static_cast<double>(residual[i]));
    }
    std::vector<float> y = decoded(*codec_, encoded(*codec_, x, &residual, step), kCount);
    for (size_t i = 0; i < kCount; ++i) arrived[i] += static_cast<double>(y[i]);
  }
  for (size_t i = 0; i < kCount; ++i)
    ASSERT_NEAR(arrived[i] + static_cast<double>(residual[i]), produced[i], bound[i]) << i;
}

TEST_P(CodecTest, InfAndNanPassAndLeaveNothingBehind) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    for (size_t count : kCodecSizes) {
      for (size_t place : {size_t{0}, count / 3, count / 2, count - 1}) {
        for (float special : {kInf, -kInf, nan, -nan}) {
          for (bool keep : {false, true}) {
            SCOPED_TRACE(variant + " " + describe(spec_, count, 0) + ", " + std::to_string(special) + " at " +
                         std::to_string(place));
            std::vector<float> x = values_of(Values::kNormal, count, 1);
            std::vector<float> residual = values_of(Values::kNormal, count, 2);
            x[place] = special;
            std::vector<float> sum(count, 1.0f), y(count);
            std::vector<Byte> bytes = encoded(*codec_, x, keep ? &residual : nullptr, 0);
            y = decoded(*codec_, bytes, count);
            codec_->decode_add(bytes.data(), bytes.size(), count, sum.data());
            ASSERT_TRUE(std::isnan(special) ? std::isnan(y[place]) : y[place] == special);
            ASSERT_TRUE(std::isnan(special) ? std::isnan(sum[place]) : sum[place] == special);
            if (keep) {
              ASSERT_EQ(residual[place], 0.0f);
            }
            y[place] = 0.0f;
            const auto finite = [](float value) { return std::isfinite(value); };
            ASSERT_TRUE(std::all_of(residual.begin(), residual.end(), finite));
            ASSERT_TRUE(std::all_of(y.begin(), y.end(), finite));
          }
        }
      }
    }
  }
}

TEST_P(CodecTest, DoesNotDependOnWhereItsInputLies) {
  for (size_t count : {257, 16384}) {
    std::vector<float> x = values_of(Values::kNormal, count, 1), moved(count + 1);
    std::copy(x.begin(), x.end(), moved.begin() + 1);
    std::vector<uint32_t> to(codec_->most_bytes(count) / 4);
    Byte* bytes = reinterpret_cast<Byte*>(to.data());
    size_t size = codec_->encode(moved.data() + 1, nullptr, count, 0, bytes);
    EXPECT_EQ(std::vector<Byte>(bytes, bytes + size), encoded(*codec_, x, nullptr, 0));
  }
}

// Whatever arrives, nothing outside the chunk's bytes is read and nothing outside x is written: AddressSanitizer and
// the words around x watch.
TEST_P(CodecTest, DamagedBytesAreAnErrorOrOtherNumbersNeverMore) {
  std::mt19937_64 random(11);
  int refused = 0;
  for (size_t count : {1, 16, 257, 1000, 16384}) {
    const int rounds = count > 1000 ? 60 : 250;
    for (int round = 0; round < rounds; ++round) {
      std::vector<float> x = values_of(round % 3 == 0 ? Values::kSparse : Values::kNormal, count, round % 7);
      if (round % 5 == 0) x[0] = kInf;
      std::vector<Byte> bytes = encoded(*codec_, x, nullptr, round % 9);
      const bool cut = round % 4 == 0;
      if (cut) {
        bytes.resize(random() % bytes.size());
        bytes.shrink_to_fit();
      } else {
        for (uint64_t flips = 1 + random() % 4; flips > 0; --flips) {
          size_t near_start = std::min<size_t>(bytes.size(), random() % 2 == 0 ? 16 : bytes.size());
          bytes[random() % near_start] ^= static_cast<Byte>(1 + random() % 255);
        }
      }
      if (cut && bytes.size() >= 4 && random() % 2 == 0) {  // a header that fits the cut
        auto said = static_cast<uint32_t>(bytes.size());
        std::memcpy(bytes.data(), &said, 4);
      }
      const std::vector<Byte> exact(bytes);
      for (int way = 0; way < 3; ++way) {
        std::vector<float> y(count + 2, 77.0f);
        try {
          if (way == 0) codec_->decode(exact.data(), exact.size(), count, y.data() + 1);
          if (way == 1) codec_->decode_add(exact.data(), exact.size(), count, y.data() + 1);
          if (way == 2) codec_->decode_streamed(exact.data(), exact.size(), count, y.data() + 1);
          EXPECT_FALSE(cut) << "cut to " << exact.size() << " bytes";
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::kIo);
          ++refused;
        }
        ASSERT_EQ(y.front(), 77.0f);
        ASSERT_EQ(y.back(), 77.0f);
      }
    }
  }
  EXPECT_GT(refused, 100);
}

TEST_P(CodecTest, AChunkOfAnotherCountIsAnError) {
  std::vector<float> x(1000), y(2000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
  std::vector<Byte> bytes = encoded(*codec_, x, nullptr, 0);
  for (size_t count : {10, 500, 2000}) {
    // The ten largest elements of 1000 may also be all that 2000 have; one block in 100000 is the same for all.
    if ((count > x.size() && spec_.kind == CodecKind::kTopK) || spec_.every > 1000) continue;
    try {
      codec_->decode(bytes.data(), bytes.size(), count, y.data());
      FAIL() << count;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kIo);
      EXPECT_NE(std::string(error.what()).find("[codec]"), std::string::npos);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryCodec, CodecTest, ::testing::Range(size_t{0}, all_codecs().size()));

TEST(CodecSpecTest, NoneIsNoCodec) { EXPECT_EQ(make_codec(CodecSpec{}), nullptr); }

TEST(CodecSpecTest, EveryFieldCountsForEquality) {
  EXPECT_EQ(CodecSpec{}, CodecSpec{});
  std::vector<CodecSpec> others(7);
  others[0].kind = CodecKind::kInt8;
  others[1].ratio = 0.5;
  others[2].half_values = true;
  others[3].every = 2;
  others[4].momentum = 0.5;
  others[5].scale = 2;
  others[6].warm_up = 3;
  for (const CodecSpec& other : others) EXPECT_NE(other, CodecSpec{});
}

TEST(CodecSpecTest, ABadValueIsAnErrorThatNamesItsField) {
  const double nan = std::nan("");
  const auto refuse = [](const CodecSpec& spec, const std::string& field) {
    try {
      make_codec(spec);
      ADD_FAILURE() << field << " accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(field + " is "), std::string::npos) << error.what();
    }
  };
  CodecSpec spec;
  for (double ratio : {0.0, -0.1, 1.01, nan}) spec.ratio = ratio, refuse(spec, "ratio");
  spec = CodecSpec{};
  spec.warm_up = -1, refuse(spec, "warm_up");
  spec = CodecSpec{};
  for (int every : {0, -3}) spec.every = every, refuse(spec, "every");
  spec = CodecSpec{};
  for (double momentum : {-0.1, 1.1, nan}) spec.momentum = momentum, refuse(spec, "momentum");
  spec = CodecSpec{};
  for (double scale : {-1.0, 1e-40, 1e39, nan}) spec.scale = scale, refuse(spec, "scale");
  spec = CodecSpec{};
  spec.kind = static_cast<CodecKind>(kCodecKinds);
  refuse(spec, "kind");
}

TEST(WholeFormat, SendsAllThatIsHeldAndLeavesNothing) {
  const WholeFormat whole;
  for (size_t count : kCodecSizes) {
    std::vector<float> x = values_of(kAllValues[0], count, 3), residual = values_of(kAllValues[0], count, 4);
    x[0] = kInf;
    std::vector<float> expected(count), decoded(count), added = x;
    for (size_t i = 0; i < count; ++i) expected[i] = x[i] + residual[i];
    std::vector<Byte> bytes(whole.most_bytes(count));
    ASSERT_EQ(whole.encode(x.data(), residual.data(), count, 0, bytes.data()), bytes.size());
    EXPECT_EQ(residual, std::vector<float>(count));
    whole.decode(bytes.data(), bytes.size(), count, decoded.data());
    EXPECT_EQ(decoded, expected);
    whole.decode_add(bytes.data(), bytes.size(), count, added.data());
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(added[i], x[i] + expected[i]);
    bytes[4] = 0;  // the form of no dense chunk
    EXPECT_THROW(whole.decode(bytes.data(), bytes.size(), count, decoded.data()), Error);
  }
}

}  // namespace
}  // namespace perseus
