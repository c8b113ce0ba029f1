// kernels/hash.h: the published values, and that every bit and every length counts.
#include "kernels/hash.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

namespace perseus::kernels {
namespace {

uint64_t of(const std::string& text) { return hash(text.data(), text.size()); }

TEST(HashTest, IsXxh64) {
  EXPECT_EQ(hash(nullptr, 0), 0xEF46DB3751D8E999u);
  EXPECT_EQ(of("a"), 0xD24EC4F1A98C6E5Bu);
  EXPECT_EQ(of("abc"), 0x44BC2CF5AD770999u);
  EXPECT_EQ(of("Nobody inspects the spammish repetition"), 0xFBCEA83C8A378BF1u);
}

TEST(HashTest, EveryBitCountsAtEveryLength) {
  for (size_t length : {1, 3, 4, 7, 8, 31, 32, 33, 63, 64, 77}) {
    std::vector<unsigned char> bytes(length);
    std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(length));
    std::set<uint64_t> seen{hash(bytes.data(), length)};
    for (size_t bit = 0; bit < 8 * length; ++bit) {
      bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
      EXPECT_TRUE(seen.insert(hash(bytes.data(), length)).second) << length << " bytes, bit " << bit;
      bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    }
  }
}

TEST(HashTest, ZerosOfOtherLengthsDiffer) {
  const std::vector<unsigned char> zeros(256);
  std::set<uint64_t> seen;
  for (size_t length = 0; length <= zeros.size(); ++length) EXPECT_TRUE(seen.insert(hash(zeros.data(), length)).second);
}

TEST(HashTest, BlocksAreHashedInTwoWays) {
  std::vector<unsigned char> bytes(70);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(9));
  const unsigned char* const at = bytes.data();
  std::vector<uint64_t> found(8, 1);
  hash_blocks(at, 70, 32, found.data());
  EXPECT_EQ(found, (std::vector<uint64_t>{hash(at, 32), hash(at + 4, 28), hash(at + 32, 32), hash(at + 36, 28),
                                          hash(at + 64, 6), hash(at + 68, 2), 1, 1}));
  hash_blocks(at, 3, 32, found.data());
  EXPECT_EQ(found[0], hash(at, 3));
  EXPECT_EQ(found[1], hash(nullptr, 0));
}

TEST(HashTest, NeedsNoAlignment) {
  std::vector<unsigned char> bytes(101);
  std::iota(bytes.begin(), bytes.end(), static_cast<unsigned char>(5));
  const uint64_t expected = hash(bytes.data() + 1, 100);
  for (size_t shift = 0; shift < 9; ++shift) {
    std::vector<unsigned char> moved(120);
    std::copy(bytes.begin() + 1, bytes.end(), moved.begin() + static_cast<std::ptrdiff_t>(shift));
    EXPECT_EQ(hash(moved.data() + shift, 100), expected);
  }
}

}  // namespace
}  // namespace perseus::kernels
