// SipHash-2-4 against codes that the authors published and OpenSSL computes, for every length up to a few words and
// however the bytes are cut.
#include "net/siphash.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

using perseus::Digest;
using perseus::SipHash;

// 00 01 02 …, as the authors' examples have it.
template <class Bytes>
Bytes rising(Bytes bytes) {
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i);
  return bytes;
}

uint64_t code_of(SipHash& hash, const std::vector<unsigned char>& bytes, size_t piece) {
  for (size_t at = 0; at < bytes.size(); at += piece) hash.add(bytes.data() + at, std::min(piece, bytes.size() - at));
  return hash.finish();
}

TEST(SipHashTest, IsThatOfTheAuthors) {
  const std::vector<uint64_t> expected = {
      0x726fdb47dd0e0e31, 0x74f839c593dc67fd, 0x0d6c8009d9a94f5a, 0x85676696d7fb7e2d, 0xcf2794e0277187b7,
      0x18765564cd99a68d, 0xcbc9466e58fee3ce, 0xab0200f58b01d137, 0x93f5f5799a932462, 0x9e0082df0ba9e4b0,
      0x7a5dbbc594ddb9f3, 0xf4b32f46226bada7, 0x751e8fbc860ee5fb, 0x14ea5627c0843d90, 0xf723ca908e7af2ee,
      0xa129ca6149be45e5, 0x3f2acc7f57c29bdb, 0x699ae9f52cbe4794, 0x4bc1b3f0968dd39c, 0xbb6dc91da77961bd};
  SipHash hash(rising(Digest{}));
  for (size_t n = 0; n < expected.size(); ++n)
    for (const size_t piece : {1u, 3u, 8u, 11u, 1000u})
      EXPECT_EQ(code_of(hash, rising(std::vector<unsigned char>(n)), piece), expected[n]) << n << " in " << piece;
  for (const size_t piece : {1u, 7u, 64u, 1000u})
    EXPECT_EQ(code_of(hash, rising(std::vector<unsigned char>(1000)), piece), 0xdb9b3ed69e31c9a6u) << piece;
}

TEST(SipHashTest, DependsOnEveryBitOfTheKeyAndOfTheBytes) {
  const std::vector<unsigned char> bytes = rising(std::vector<unsigned char>(21));
  const Digest key = rising(Digest{});
  SipHash hash(key);
  const uint64_t code = code_of(hash, bytes, 21);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    auto changed = bytes;
    changed[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    EXPECT_NE(code_of(hash, changed, 21), code) << "bit " << bit;
  }
  for (size_t bit = 0; bit < 128; ++bit) {
    Digest other = key;
    other[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    SipHash keyed(other);
    EXPECT_NE(code_of(keyed, bytes, 21), code) << "bit " << bit << " of the key";
  }
}

}  // namespace
