// Pins SHA-256 and HMAC to the published vectors, and that proofs are bound to everything they are about.
#include "net/auth.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace perseus {
namespace {

std::string hex(const Digest& digest) {
  std::string text;
  for (const unsigned char byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string sha_hex(const std::string& text) { return hex(sha256(text.data(), text.size())); }
std::string hmac_hex(const std::string& key, const std::string& text) {
  return hex(hmac_sha256(key, text.data(), text.size()));
}

TEST(Sha256, MatchesFips180Examples) {
  EXPECT_EQ(sha_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha_hex("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrs"
                    "mnopqrstnopqrstu"),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(sha_hex(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

// Every way the padding can fall around a block's end gives another digest, and data past the end has no influence.
TEST(Sha256, EveryLengthAroundBlockEnds) {
  std::set<std::string> seen;
  const std::string text(200, 'x');
  for (size_t n = 0; n <= text.size(); ++n) {
    EXPECT_EQ(hex(sha256(text.data(), n)), sha_hex(std::string(n, 'x'))) << n;
    seen.insert(hex(sha256(text.data(), n)));
  }
  EXPECT_EQ(seen.size(), text.size() + 1);
  EXPECT_EQ(sha_hex(std::string(55, 'a')), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
  EXPECT_EQ(sha_hex(std::string(56, 'a')), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
  EXPECT_EQ(sha_hex(std::string(64, 'a')), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
}

TEST(HmacSha256, MatchesRfc4231) {
  EXPECT_EQ(hmac_hex(std::string(20, '\x0b'), "Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hmac_hex("Jefe", "what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(hmac_hex(std::string(20, '\xaa'), std::string(50, '\xdd')),
            "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  EXPECT_EQ(hmac_hex(counting, std::string(50, '\xcd')),
            "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  EXPECT_EQ(hmac_hex(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First"),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  EXPECT_EQ(hmac_hex(std::string(131, '\xaa'),
                     "This is a test using a larger than block-size key and a larger than block-size data. The key "
                     "needs to be hashed before being used by the HMAC algorithm."),
            "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(Digests, AnyDifferentBitIsADifference) {
  const Digest a = sha256("abc", 3);
  EXPECT_TRUE(digests_equal(a, a));
  for (size_t bit = 0; bit < 256; ++bit) {
    Digest b = a;
    b[bit / 8] = static_cast<unsigned char>(b[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(digests_equal(a, b)) << bit;
  }
}

TEST(Proof, HoldsOnlyForTheSameSecretAndFields) {
  const Digest digest = prove("secret", {"label", "ab", "c"});
  const std::string proof(reinterpret_cast<const char*>(digest.data()), digest.size());
  EXPECT_TRUE(proof_holds(proof, "secret", {"label", "ab", "c"}));
  EXPECT_FALSE(proof_holds(proof, "Secret", {"label", "ab", "c"}));
  EXPECT_FALSE(proof_holds(proof, "secret", {"label", "a", "bc"}));
  EXPECT_FALSE(proof_holds(proof, "secret", {"label", "abc"}));
  EXPECT_FALSE(proof_holds(proof, "secret", {"other", "ab", "c"}));
  EXPECT_FALSE(proof_holds(proof.substr(0, 31), "secret", {"label", "ab", "c"}));
  EXPECT_FALSE(proof_holds(proof + "x", "secret", {"label", "ab", "c"}));
  EXPECT_FALSE(proof_holds("", "secret", {"label", "ab", "c"}));
}

TEST(RandomBytes, HasTheLengthAskedForAndDiffers) {
  EXPECT_EQ(random_bytes(0).size(), 0u);
  EXPECT_EQ(random_bytes(1000).size(), 1000u);
  EXPECT_NE(random_bytes(32), random_bytes(32));
}

}  // namespace
}  // namespace perseus
