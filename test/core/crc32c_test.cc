// CRC32C against the examples of RFC 3720 and against a division bit by bit, for every size and place around its runs.
#include "kernels/crc32c.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/span.h"
#include "values.h"

namespace {

using perseus::Byte;
using perseus::kernels::crc32c;
using Bytes = std::vector<Byte>;

uint32_t bit_by_bit(const Bytes& bytes) {
  uint32_t state = ~0U;
  for (const Byte byte : bytes) {
    state ^= byte;
    for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ ((state & 1) != 0 ? 0x82F63B78 : 0);
  }
  return ~state;
}

uint32_t of(const Bytes& bytes) { return crc32c(0, bytes.data(), bytes.size()); }

TEST(Crc32cTest, IsThatOfTheExamplesOfRfc3720) {
  EXPECT_EQ(crc32c(0, nullptr, 0), 0U);
  EXPECT_EQ(crc32c(0, "123456789", 9), 0xE3069283);
  EXPECT_EQ(of(Bytes(32, 0)), 0x8A9136AA);
  EXPECT_EQ(of(Bytes(32, 0xff)), 0x62A8AB43);
  Bytes rising(32);
  for (size_t i = 0; i < rising.size(); ++i) rising[i] = static_cast<Byte>(i);
  EXPECT_EQ(of(rising), 0x46DD794E);
  EXPECT_EQ(of(Bytes(rising.rbegin(), rising.rend())), 0x113FDB5C);
}

TEST(Crc32cTest, DependsOnTheBytesAloneWhereverTheyLieAndHoweverTheyAreCut) {
  const std::vector<size_t> sizes = {0, 1, 7, 8, 9, 63, 1024, 3071, 3072, 3073, 3080, 6144, 9300, 65536, 100001};
  for (const size_t size : sizes) {
    for (size_t place = 0; place < 9; ++place) {
      Bytes bytes(place + size);
      for (size_t i = 0; i < size; ++i) bytes[place + i] = static_cast<Byte>(perseus_test::mix(size * 131071 + i));
      const Byte* data = bytes.data() + place;
      const uint32_t expected = bit_by_bit(Bytes(data, data + size));
      ASSERT_EQ(crc32c(0, data, size), expected) << size << " bytes at " << place;
      for (const size_t cut : {size_t{0}, size / 3, size / 2 + 1, size}) {
        if (cut > size) continue;
        ASSERT_EQ(crc32c(crc32c(0, data, cut), data + cut, size - cut), expected) << size << " bytes cut at " << cut;
      }
    }
  }
}

}  // namespace
