// By the letter of the paper, section 2, with whole words taken where there are any.
#include "net/siphash.h"

#include <cstring>

namespace perseus {
namespace {

constexpr int kRoundsOfWord = 2, kRoundsAtEnd = 4;

uint64_t rotated(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

// Little-endian, as this library's machines are.
uint64_t word_at(const unsigned char* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

}  // namespace

SipHash::SipHash(const Digest& key) : key_{word_at(key.data()), word_at(key.data() + 8)} { begin(); }

void SipHash::begin() {
  state_ = {key_[0] ^ 0x736f6d6570736575, key_[1] ^ 0x646f72616e646f6d, key_[0] ^ 0x6c7967656e657261,
            key_[1] ^ 0x7465646279746573};
  partial_ = count_ = 0;
}

void SipHash::mix(int rounds) {
  auto& [a, b, c, d] = state_;
  for (int i = 0; i < rounds; ++i) {
    a += b, c += d;
    b = rotated(b, 13) ^ a, d = rotated(d, 16) ^ c;
    a = rotated(a, 32);
    c += b, a += d;
    b = rotated(b, 17) ^ c, d = rotated(d, 21) ^ a;
    c = rotated(c, 32);
  }
}

void SipHash::take(uint64_t word) {
  state_[3] ^= word;
  mix(kRoundsOfWord);
  state_[0] ^= word;
}

void SipHash::add(const void* data, size_t n) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  const auto take_byte = [this](unsigned char byte) {
    partial_ |= uint64_t{byte} << 8 * (count_++ % 8);
    if (count_ % 8 != 0) return;
    take(partial_);
    partial_ = 0;
  };
  size_t at = 0;
  while (at < n && count_ % 8 != 0) take_byte(bytes[at++]);
  for (; n - at >= 8; at += 8, count_ += 8) take(word_at(bytes + at));
  while (at < n) take_byte(bytes[at++]);
}

uint64_t SipHash::finish() {
  take(partial_ | count_ << 56);
  state_[2] ^= 0xff;
  mix(kRoundsAtEnd);
  const uint64_t code = state_[0] ^ state_[1] ^ state_[2] ^ state_[3];
  begin();
  return code;
}

}  // namespace perseus
