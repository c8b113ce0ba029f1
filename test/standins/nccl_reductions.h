// How the stand-in for NCCL reduces: in the order of ranks, 16-bit floats as float32 that is rounded once at the end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "nccl.h"

namespace standin_nccl {

template <class To, class From>
To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// A number as it is stored, and as it is reduced.
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value load(Stored x) { return x; }
  static Stored store(Value x) { return x; }
};

struct Float16 {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored x) {
    const uint32_t sign = (x & 0x8000u) << 16, magnitude = x & 0x7fffu;
    if (magnitude >= 0x7c00) return bits<float>(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x400) return bits<float>(sign | ((magnitude << 13) + (112u << 23)));
    const float subnormal = static_cast<float>(magnitude) * (1.0f / (1 << 24));
    return sign == 0 ? subnormal : -subnormal;
  }
  static Stored store(Value x) {
    const uint32_t sign = bits<uint32_t>(x) >> 16 & 0x8000u, magnitude = bits<uint32_t>(x) & 0x7fffffffu;
    if (magnitude > 0x7f800000) return static_cast<Stored>(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return static_cast<Stored>(sign | 0x7c00);  // from 65520 on
    if (magnitude < 0x38800000)  // its sum with 0.5 is rounded where a subnormal number ends
      return static_cast<Stored>(sign | (bits<uint32_t>(bits<float>(magnitude) + 0.5f) - bits<uint32_t>(0.5f)));
    const uint32_t rebased = magnitude - (112u << 23);
    return static_cast<Stored>(sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13);
  }
};

struct Bfloat16 {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored x) { return bits<float>(static_cast<uint32_t>(x) << 16); }
  static Stored store(Value x) {
    const uint32_t all = bits<uint32_t>(x);
    if ((all & 0x7fffffffu) > 0x7f800000) return static_cast<Stored>(all >> 16 | 0x40);
    return static_cast<Stored>((all + 0x7fff + (all >> 16 & 1)) >> 16);
  }
};

template <class T>
T combined(ncclRedOp_t op, T a, T b) {
  if (op == ncclMax) return std::max(a, b);
  if (op == ncclMin) return std::min(a, b);
  if constexpr (std::is_integral_v<T>) {  // modulo 2^bits
    const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<T>(op == ncclProd ? x * y : x + y);
  } else {
    return op == ncclProd ? a * b : a + b;
  }
}

using Pieces = std::vector<const unsigned char*>;  // by rank

template <class Format>
void reduce_as(ncclRedOp_t op, const Pieces& from, size_t count, unsigned char* to) {
  using Value = typename Format::Value;
  typename Format::Stored stored;
  for (size_t at = 0; at < count * sizeof stored; at += sizeof stored) {
    std::memcpy(&stored, from[0] + at, sizeof stored);
    Value value = Format::load(stored);
    for (size_t rank = 1; rank < from.size(); ++rank) {
      std::memcpy(&stored, from[rank] + at, sizeof stored);
      value = combined<Value>(op, value, Format::load(stored));
    }
    if (op == ncclAvg) value = static_cast<Value>(value / static_cast<Value>(from.size()));
    stored = Format::store(value);
    std::memcpy(to + at, &stored, sizeof stored);
  }
}

struct Type {
  size_t bytes;
  void (*reduce)(ncclRedOp_t op, const Pieces& from, size_t count, unsigned char* to);
};
inline const Type kTypes[] = {
    {1, reduce_as<Plain<int8_t>>},   {1, reduce_as<Plain<uint8_t>>}, {4, reduce_as<Plain<int32_t>>},
    {4, reduce_as<Plain<uint32_t>>}, {8, reduce_as<Plain<int64_t>>}, {8, reduce_as<Plain<uint64_t>>},
    {2, reduce_as<Float16>},         {4, reduce_as<Plain<float>>},   {8, reduce_as<Plain<double>>},
    {2, reduce_as<Bfloat16>},
};

}  // namespace standin_nccl
