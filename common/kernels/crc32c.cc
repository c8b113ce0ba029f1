// See crc32c.h.
#include "kernels/crc32c.h"

#include <array>
#include <cstring>

#include "base/span.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#define PERSEUS_CRC_INSTRUCTION __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && (!defined(__clang__) || defined(__ARM_FEATURE_CRC32))
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define PERSEUS_CRC_INSTRUCTION __attribute__((target("+crc")))
#endif

namespace perseus::kernels {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // Castagnoli's, its bits in reverse

// By the last byte of a register, what a step over a byte adds to the rest.
constexpr std::array<uint32_t, 256> byte_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0);
    table[byte] = value;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kBytes = byte_table();

uint32_t by_table(uint32_t state, const Byte* data, size_t n) {
  for (size_t i = 0; i < n; ++i) state = kBytes[(state ^ data[i]) & 0xff] ^ (state >> 8);
  return state;
}

#if defined(PERSEUS_CRC_INSTRUCTION)

constexpr size_t kRun = 1024;  // bytes that go beside two more such runs

// A register after kRun zeros: the sum over its bytes, as each step is linear.
struct AfterZeros {
  std::array<std::array<uint32_t, 256>, 4> of_byte;

  AfterZeros() {
    for (size_t place = 0; place < of_byte.size(); ++place)
      for (uint32_t byte = 0; byte < 256; ++byte) {
        uint32_t state = byte << (8 * place);
        for (size_t i = 0; i < kRun; ++i) state = kBytes[state & 0xff] ^ (state >> 8);
        of_byte[place][byte] = state;
      }
  }
  uint32_t operator()(uint32_t state) const {
    return of_byte[0][state & 0xff] ^ of_byte[1][state >> 8 & 0xff] ^ of_byte[2][state >> 16 & 0xff] ^
           of_byte[3][state >> 24];
  }
};

#if defined(__x86_64__)
bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
PERSEUS_CRC_INSTRUCTION inline uint32_t step(uint32_t state, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(state, word));
}
#else
bool has_instruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
PERSEUS_CRC_INSTRUCTION inline uint32_t step(uint32_t state, uint64_t word) { return __crc32cd(state, word); }
#endif

inline uint64_t word_at(const Byte* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

PERSEUS_CRC_INSTRUCTION uint32_t by_instruction(uint32_t state, const Byte* data, size_t n) {
  static const AfterZeros after_zeros;
  for (; n >= 3 * kRun; data += 3 * kRun, n -= 3 * kRun) {
    uint32_t second = 0, third = 0;
    for (size_t i = 0; i < kRun; i += 8) {
      state = step(state, word_at(data + i));
      second = step(second, word_at(data + kRun + i));
      third = step(third, word_at(data + 2 * kRun + i));
    }
    state = after_zeros(after_zeros(state) ^ second) ^ third;
  }
  for (; n >= 8; data += 8, n -= 8) state = step(state, word_at(data));
  return by_table(state, data, n);
}

#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* data, size_t n) {
  const auto* bytes = static_cast<const Byte*>(data);
#if defined(PERSEUS_CRC_INSTRUCTION)
  static const bool fast = has_instruction();
  if (fast) return ~by_instruction(~crc, bytes, n);
#endif
  return ~by_table(~crc, bytes, n);
}

}  // namespace perseus::kernels
