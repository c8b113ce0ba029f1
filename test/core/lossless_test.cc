// Pins the lossless codec: every bit comes back on every SIMD variant, sizes, and what hostile bytes may do.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "base/half.h"
#include "codec/chunk.h"
#include "codec_cases.h"
#include "kernels/kernels.h"
#include "variants.h"

namespace perseus {
namespace {

using namespace perseus_test;
using kernels::kExponentBlock;
using kernels::kExponentRow;
using kernels::select_variant;

constexpr size_t kSizes[] = {1, 63, 64, 65, 128, 447, 511, 512, 513, 575, 1000, 16384};

class Lossless : public ::testing::Test {
 protected:
  ~Lossless() override { select_variant("auto"); }

  // Same bytes from every variant, and the same bits back from each, however they arrive. Gives the bytes.
  std::vector<Byte> back_and_forth(bool narrow, const std::vector<float>& x) {
    const auto codec = make_codec(lossless(narrow));
    std::vector<Byte> expected;
    for (const std::string& variant : variants_here()) {
      SCOPED_TRACE(variant + ", " + std::to_string(x.size()) + (narrow ? " narrow" : "") + " elements");
      select_variant(variant.c_str());
      const std::vector<Byte> bytes = encoded(*codec, x, nullptr, 0);
      if (expected.empty()) expected = bytes;
      EXPECT_EQ(bytes, expected);
      EXPECT_LE(bytes.size(), codec->most_bytes(x.size()));
      EXPECT_LE(bytes.size(), narrow ? codec->most_bytes(x.size()) : dense_bytes(x.size()));
      EXPECT_TRUE(same_bits(decoded(*codec, bytes, x.size()), x));
      std::vector<float> streamed(x.size());
      codec->decode_streamed(bytes.data(), bytes.size(), x.size(), streamed.data());
      EXPECT_TRUE(same_bits(streamed, x));
    }
    return expected;
  }
};

float from_bits(uint32_t bits) { return float_from_bits(bits); }

std::vector<float> cut_to_narrow(std::vector<float> x) {
  for (float& value : x) value = from_bits(float_bits(value) & 0xffff0000);
  return x;
}

TEST_F(Lossless, EveryBfloat16ComesBackWhateverItIs) {
  std::vector<float> x(size_t{1} << 16);
  for (uint32_t i = 0; i < x.size(); ++i) x[i] = from_bits(i << 16);  // all, with NaNs of every payload
  for (bool narrow : {false, true}) {
    for (size_t begin = 0; begin < x.size(); begin += kWireChunk) {
      const auto from = x.begin() + static_cast<long>(begin);
      back_and_forth(narrow, std::vector<float>(from, from + kWireChunk));
    }
    std::shuffle(x.begin(), x.end(), std::mt19937_64(1));
    for (size_t count : kSizes)
      back_and_forth(narrow, std::vector<float>(x.begin(), x.begin() + static_cast<long>(count)));
  }
}

TEST_F(Lossless, AnyBitsComeBack) {
  std::mt19937_64 random(1);
  for (size_t count : kSizes) {
    std::vector<float> x(count);
    for (float& value : x) value = from_bits(static_cast<uint32_t>(random()));
    back_and_forth(false, x);
    back_and_forth(true, cut_to_narrow(x));
    for (Values values : kAllValues) {
      x = values_of(values, count, 1);
      back_and_forth(false, x);
      back_and_forth(true, cut_to_narrow(x));
      // One element unlike its neighbours.
      for (uint32_t special : {0x7f800001U, 0xffffffffU, 0x00000001U, 0x80000000U, 0xff800000U}) {
        const float before = x[special % count];
        x[special % count] = from_bits(special);
        back_and_forth(false, x);
        x[special % count] = before;
      }
    }
  }
}

TEST_F(Lossless, EveryWidthComesBack) {
  for (unsigned range = 0; range < 256; ++range) {
    for (size_t count : {size_t{64}, size_t{320}, size_t{512}, size_t{1024}}) {
      std::vector<float> x(count);
      for (size_t i = 0; i < count; ++i) {
        const auto exponent = static_cast<uint32_t>(255 - i * 37 % (range + 1));
        x[i] = from_bits(static_cast<uint32_t>(i) * 2654435761U % (1U << 23) | exponent << 23);
      }
      const std::vector<Byte> bytes = back_and_forth(false, x);
      back_and_forth(true, cut_to_narrow(x));
      if (range == 0) {
        EXPECT_LE(bytes.size(), 8 + 3 * count + 4 * ((count + 511) / 512)) << "equal exponents cost nothing";
      }
    }
  }
}

// What the exact sum of bfloat16 tensors rounds to.
TEST_F(Lossless, NarrowElementsAreRoundedToNearestEven) {
  std::mt19937_64 random(1);
  const auto codec = make_codec(lossless(true));
  for (size_t count : kSizes) {
    std::vector<float> x(count), expected(count);
    for (size_t i = 0; i < count; ++i) {
      uint32_t bits = static_cast<uint32_t>(random());
      if (i % 3 == 0) bits = (bits & 0xffff0000) | 0x8000;  // a tie
      if (i % 5 == 0) bits |= 0x7f800000;
      x[i] = from_bits(bits);
      expected[i] = from_bits(static_cast<uint32_t>(float_to_bfloat16(x[i])) << 16);
      if (std::isnan(x[i]) && (bits & 0xffff) == 0) expected[i] = x[i];
    }
    for (const std::string& variant : variants_here()) {
      select_variant(variant.c_str());
      EXPECT_TRUE(same_bits(decoded(*codec, encoded(*codec, x, nullptr, 0), count), expected)) << variant;
    }
  }
}

double part_sent(bool narrow, const std::vector<float>& x) {
  const auto codec = make_codec(lossless(narrow));
  return static_cast<double>(encoded(*codec, x, nullptr, 0).size()) / static_cast<double>(x.size() * (narrow ? 2 : 4));
}

TEST_F(Lossless, NormalValuesTakeSixSeventhsOfTheirBytes) {
  const std::vector<float> x = values_of(Values::kNormal, kWireChunk, 1);
  EXPECT_NEAR(part_sent(false, x), 0.853, 0.002);
  EXPECT_NEAR(part_sent(true, x), 0.706, 0.003);
}

// Rows whose scales differ, as the rows of a layer's gradient do, and units that were off.
TEST_F(Lossless, RowsOfDifferentScalesTakeLittleMore) {
  std::vector<float> x = values_of(Values::kNormal, kWireChunk, 1);
  std::mt19937_64 random(1);
  for (size_t row = 0; row < kWireChunk / 128; ++row) {
    const float scale = std::ldexp(1.0F, static_cast<int>(random() % 6)) * (random() % 16 == 0 ? 0.0F : 1.0F);
    for (size_t i = 0; i < 128; ++i) x[row * 128 + i] *= scale;
  }
  EXPECT_LT(part_sent(false, x), 0.89);
  EXPECT_LT(part_sent(true, x), 0.77);
}

TEST_F(Lossless, AChunkThatWouldNotGetSmallerGoesDense) {
  std::mt19937_64 random(1);
  std::vector<float> x(kWireChunk);
  for (float& value : x) value = from_bits(static_cast<uint32_t>(random()));
  const std::vector<Byte> bytes = encoded(*make_codec(lossless(false)), x, nullptr, 0);
  ASSERT_EQ(bytes.size(), dense_bytes(kWireChunk));
  uint32_t form;
  std::memcpy(&form, bytes.data() + 4, sizeof form);
  EXPECT_EQ(form, kDenseForm);
  EXPECT_EQ(encoded(*make_codec(lossless(false)), std::vector<float>(20), nullptr, 0).size(), dense_bytes(20));
}

TEST_F(Lossless, ANanInASumIsTheOneQuietNan) {
  for (bool narrow : {false, true}) {
    const auto codec = make_codec(lossless(narrow));
    for (size_t count : kSizes) {
      std::vector<float> x(count, 1.0F), sum(count, 2.0F);
      for (size_t i = 0; i < count; i += 3) x[i] = from_bits(0xffff0000);
      const std::vector<Byte> bytes = encoded(*codec, x, nullptr, 0);
      codec->decode_add(bytes.data(), bytes.size(), count, sum.data());
      for (size_t i = 0; i < count; ++i) ASSERT_EQ(float_bits(sum[i]), i % 3 == 0 ? 0x7fc00000 : float_bits(3.0F)) << i;
    }
  }
}

// ---- hostile bytes: AddressSanitizer sees what lies outside ---------------------------------------------------------

class HostileChunk : public Lossless {
 protected:
  bool refused(const std::vector<Byte>& bytes, size_t count, bool narrow = false) {
    std::vector<float> y(count);
    try {
      make_codec(lossless(narrow))->decode(bytes.data(), bytes.size(), count, y.data());
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kIo);
      EXPECT_NE(std::string(error.what()).find("lossless chunk"), std::string::npos);
      return true;
    }
    return false;
  }
  static constexpr size_t kHead = sizeof(ChunkHeader);  // where the first block's head is
};

TEST_F(HostileChunk, ABlockWhoseHeadLiesIsRefused) {
  for (const std::string& variant : variants_here()) {
    select_variant(variant.c_str());
    const std::vector<Byte> bytes =
        encoded(*make_codec(lossless(false)), values_of(Values::kNormal, 1024, 1), nullptr, 0);
    EXPECT_FALSE(refused(bytes, 1024));
    EXPECT_TRUE(refused(bytes, 1024, true)) << "a wide chunk where a narrow one is due";
    for (unsigned width = 0; width < 256; ++width) {
      std::vector<Byte> changed = bytes;
      changed[kHead + 1] = static_cast<Byte>(width);
      EXPECT_EQ(refused(changed, 1024), width != bytes[kHead + 1]) << width;
    }
    for (unsigned escapes = 0; escapes < 65536; escapes += escapes < 1100 ? 1 : 997) {
      std::vector<Byte> changed = bytes;
      const auto said = static_cast<uint16_t>(escapes);
      std::memcpy(changed.data() + kHead + 2, &said, sizeof said);
      EXPECT_EQ(refused(changed, 1024), changed != bytes) << escapes;
    }
  }
}

TEST_F(HostileChunk, CodesWithAnotherNumberOfEscapesAreRefused) {
  std::vector<Byte> bytes = encoded(*make_codec(lossless(false)), values_of(Values::kNormal, 512, 1), nullptr, 0);
  const size_t codes = kHead + 4 + 3 * 512;
  ASSERT_EQ(bytes[kHead + 1], 3);
  std::fill_n(bytes.begin() + codes, 3 * 64, Byte{0xff});
  EXPECT_TRUE(refused(bytes, 512)) << "512 escapes";
  std::fill_n(bytes.begin() + codes, 3 * 64, Byte{0});
  EXPECT_TRUE(refused(bytes, 512)) << "none";
}

TEST_F(HostileChunk, EveryCutIsRefused) {
  for (bool narrow : {false, true}) {
    for (size_t count : {size_t{100}, size_t{513}, size_t{1100}}) {
      const std::vector<Byte> bytes =
          encoded(*make_codec(lossless(narrow)), values_of(Values::kNormal, count, 1), nullptr, 0);
      for (size_t size = 0; size < bytes.size(); ++size) {
        std::vector<Byte> cut(bytes.begin(), bytes.begin() + static_cast<long>(size));
        cut.shrink_to_fit();
        const auto said = static_cast<uint32_t>(size);
        if (size >= 4) std::memcpy(cut.data(), &said, sizeof said);
        ASSERT_TRUE(refused(cut, count, narrow)) << size;
      }
      std::vector<Byte> longer = bytes;
      longer.resize(bytes.size() + 4);
      const auto said = static_cast<uint32_t>(longer.size());
      std::memcpy(longer.data(), &said, sizeof said);
      EXPECT_TRUE(refused(longer, count, narrow));
    }
  }
}

TEST_F(HostileChunk, RandomBytesAreRefusedOrOtherNumbers) {
  std::mt19937_64 random(1);
  int count_refused = 0;
  for (int round = 0; round < 20000; ++round) {
    const bool narrow = round % 2 == 0;
    const size_t count = 1 + random() % 700;
    std::vector<Byte> bytes(8 + 4 * (random() % 800));
    for (Byte& byte : bytes) byte = static_cast<Byte>(random() % (round % 3 == 0 ? 256 : 8));
    const uint32_t header[] = {static_cast<uint32_t>(bytes.size()), narrow ? 1U : 0U};
    std::memcpy(bytes.data(), header, sizeof header);
    count_refused += refused(bytes, count, narrow) ? 1 : 0;
  }
  EXPECT_GT(count_refused, 10000);
}

}  // namespace
}  // namespace perseus
