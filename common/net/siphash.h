// SipHash-2-4 (Aumasson and Bernstein, 2012): a code of 64 bits that only those who know its key can compute, made for
// short messages. One object makes one code after the other; not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "net/auth.h"

namespace perseus {

class SipHash {
 public:
  // The first 16 bytes are the key.
  explicit SipHash(const Digest& key);

  // Takes the next bytes; where a message is cut makes no difference.
  void add(const void* data, size_t n);
  // The code of all bytes since the last one.
  uint64_t finish();

 private:
  void begin();
  void take(uint64_t word);
  void mix(int rounds);

  std::array<uint64_t, 2> key_;
  std::array<uint64_t, 4> state_;
  uint64_t partial_ = 0;  // bytes that do not fill a word yet, from the lowest
  uint64_t count_ = 0;    // of all bytes
};

}  // namespace perseus
