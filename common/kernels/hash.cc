// See hash.h. Names and steps are the specification's.
#include "kernels/hash.h"

#include <algorithm>
#include <cstring>

namespace perseus::kernels {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                   kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;
constexpr size_t kStripe = 32;

template <typename Word>
uint64_t read(const unsigned char* from) {  // little-endian, as everything Perseus runs on
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

uint64_t rotate(uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

uint64_t round(uint64_t accumulator, uint64_t lane) { return rotate(accumulator + lane * kPrime2, 31) * kPrime1; }

uint64_t merge(uint64_t hash, uint64_t accumulator) { return (hash ^ round(0, accumulator)) * kPrime1 + kPrime4; }

}  // namespace

uint64_t hash(const void* data, size_t n) {
  const unsigned char* at = static_cast<const unsigned char*>(data);
  size_t left = n;
  uint64_t result = kPrime5;
  if (left >= kStripe) {
    uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
    for (; left >= kStripe; left -= kStripe, at += kStripe) {
      a = round(a, read<uint64_t>(at));
      b = round(b, read<uint64_t>(at + 8));
      c = round(c, read<uint64_t>(at + 16));
      d = round(d, read<uint64_t>(at + 24));
    }
    result = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
    result = merge(merge(merge(merge(result, a), b), c), d);
  }
  result += n;
  for (; left >= 8; left -= 8, at += 8) result = rotate(result ^ round(0, read<uint64_t>(at)), 27) * kPrime1 + kPrime4;
  for (; left >= 4; left -= 4, at += 4)
    result = rotate(result ^ (read<uint32_t>(at) * kPrime1), 23) * kPrime2 + kPrime3;
  for (; left > 0; --left, ++at) result = rotate(result ^ (*at * kPrime5), 11) * kPrime1;
  result = (result ^ (result >> 33)) * kPrime2;
  result = (result ^ (result >> 29)) * kPrime3;
  return result ^ (result >> 32);
}

void hash_blocks(const void* data, size_t n, size_t block, uint64_t* hashes) {
  const unsigned char* const bytes = static_cast<const unsigned char*>(data);
  for (size_t at = 0; at < n; at += block) {
    const size_t size = std::min(block, n - at), skipped = std::min<size_t>(size, 4);
    *hashes++ = hash(bytes + at, size);
    *hashes++ = hash(bytes + at + skipped, size - skipped);
  }
}

}  // namespace perseus::kernels
