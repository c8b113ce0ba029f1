// SHA-256 by the letter of FIPS 180-4: handshakes hash a few hundred bytes, so clarity comes before speed.
#include "net/auth.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "base/little_endian.h"

namespace perseus {
namespace {

constexpr size_t kBlock = 64;

// Fractional parts of the cube roots of the first 64 primes.
constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

uint32_t load_big_endian(const unsigned char* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
}

void compress(uint32_t state[8], const unsigned char* block) {
  uint32_t w[64];
  for (int t = 0; t < 16; ++t) w[t] = load_big_endian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    const uint32_t s0 = rotate(w[t - 15], 7) ^ rotate(w[t - 15], 18) ^ w[t - 15] >> 3;
    const uint32_t s1 = rotate(w[t - 2], 17) ^ rotate(w[t - 2], 19) ^ w[t - 2] >> 10;
    w[t] = s1 + w[t - 7] + s0 + w[t - 16];
  }
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  for (int t = 0; t < 64; ++t) {
    const uint32_t t1 = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
    const uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1;
    d = c, c = b, b = a, a = t1 + t2;
  }
  const uint32_t working[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += working[i];
}

std::string join(std::initializer_list<std::string> fields) {
  std::string joined;
  for (const std::string& field : fields) {
    put_u32(&joined, static_cast<uint32_t>(field.size()));
    joined += field;
  }
  return joined;
}

}  // namespace

Digest sha256(const void* data, size_t size) {
  // Fractional parts of the square roots of the first 8 primes.
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* bytes = static_cast<const unsigned char*>(data);
  const size_t whole = size / kBlock * kBlock;
  for (size_t at = 0; at < whole; at += kBlock) compress(state, bytes + at);

  unsigned char tail[2 * kBlock] = {};
  const size_t rest = size - whole;
  if (rest != 0) std::memcpy(tail, bytes + whole, rest);
  tail[rest] = 0x80;
  const size_t padded = rest + 9 <= kBlock ? kBlock : 2 * kBlock;
  const uint64_t bits = uint64_t{size} * 8;
  for (int i = 0; i < 8; ++i) tail[padded - 1 - i] = static_cast<unsigned char>(bits >> (8 * i));
  for (size_t at = 0; at < padded; at += kBlock) compress(state, tail + at);

  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) digest[i] = static_cast<unsigned char>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

Digest hmac_sha256(const std::string& key, const void* data, size_t size) {
  std::string inner(kBlock, '\x36'), outer(kBlock, '\x5c');
  const auto mix_in = [&](const char* bytes, size_t n) {
    for (size_t i = 0; i < n; ++i) inner[i] ^= bytes[i], outer[i] ^= bytes[i];
  };
  if (key.size() > kBlock) {
    const Digest shortened = sha256(key.data(), key.size());
    mix_in(reinterpret_cast<const char*>(shortened.data()), shortened.size());
  } else {
    mix_in(key.data(), key.size());
  }
  inner.append(static_cast<const char*>(data), size);
  const Digest digest = sha256(inner.data(), inner.size());
  outer.append(reinterpret_cast<const char*>(digest.data()), digest.size());
  return sha256(outer.data(), outer.size());
}

bool digests_equal(const Digest& a, const Digest& b) {
  // volatile: the compiler must not stop at the first difference.
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

std::string bytes_of(const Digest& digest) {
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

std::string random_bytes(size_t n) {
  std::string bytes(n, '\0');
  for (size_t filled = 0; filled < n;) {
    const ssize_t got = ::getrandom(&bytes[filled], n - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(ErrorKind::kIo, std::string("[auth] getrandom: ") + std::strerror(errno));
    filled += static_cast<size_t>(got);
  }
  return bytes;
}

Digest prove(const std::string& secret, std::initializer_list<std::string> fields) {
  const std::string statement = join(fields);
  return hmac_sha256(secret, statement.data(), statement.size());
}

bool proof_holds(const std::string& proof, const std::string& secret, std::initializer_list<std::string> fields) {
  Digest given;
  if (proof.size() != given.size()) return false;
  std::memcpy(given.data(), proof.data(), given.size());
  return digests_equal(given, prove(secret, fields));
}

}  // namespace perseus
