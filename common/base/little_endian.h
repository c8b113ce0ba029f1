// Numbers as the handshakes and the store put them on the wire. Thread-safe: pure functions.
#pragma once

#include <cstdint>
#include <string>

namespace perseus {

inline void put_u32(std::string* out, uint32_t value) {
  for (int i = 0; i < 4; ++i) out->push_back(static_cast<char>(value >> (8 * i)));
}

inline void put_u64(std::string* out, uint64_t value) {
  put_u32(out, static_cast<uint32_t>(value));
  put_u32(out, static_cast<uint32_t>(value >> 32));
}

// These read 4 and 8 bytes; the caller has checked that they are there.
inline uint32_t get_u32(const char* bytes) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value |= uint32_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}
inline uint64_t get_u64(const char* bytes) { return get_u32(bytes) | uint64_t{get_u32(bytes + 4)} << 32; }

}  // namespace perseus
