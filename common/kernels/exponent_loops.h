// Floats with short codes in place of their exponents. Internal linkage, see variant.h; no threads.
//
// A row of 64 elements has 16 words of their exponents, and byte k of word w is element 16 k + w's: so bytes are taken
// apart and put together by shifts within lanes, for vectors of every width, and everything else works on bytes.
#pragma once

#include "kernels/codec_loops.h"

namespace perseus::kernels {
namespace {

using Bytes = Vector<uint8_t>;
using SignedBytes = Vector<int8_t>;

constexpr size_t kParts = kExponentRow / kVectorBytes;  // vectors that hold the bytes of a row
constexpr size_t kAllRows = kExponentBlock / kExponentRow;
constexpr size_t kWordsOfRow = kExponentRow / 4;
// Widths of codes: exponents that travel as they are, and those that have an escape.
constexpr unsigned kRaw = 8;
constexpr unsigned kCounted[] = {1, 2, 3, 4, 5, 6}, kWidest = 6;

PERSEUS_INLINE Bytes load_bytes(const unsigned char* from) { return load_vector<Bytes>(from); }
PERSEUS_INLINE FloatBits words(Bytes bytes) { return same_bits<FloatBits>(bytes); }
PERSEUS_INLINE Bytes bytes_of(FloatBits words) { return same_bits<Bytes>(words); }
PERSEUS_INLINE Bytes least(Bytes a, uint8_t most) {
  const Bytes limit = Bytes{} + most;
  return a < limit ? a : limit;
}

// ---- an element as exponent:8 rest:24, where a narrow one has nothing in the lowest 16 bits ------------------------

PERSEUS_INLINE FloatBits rounded_to_narrow(FloatBits bits) {
  const FloatBits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  // A NaN stays one, and keeps its bits where all of them travel.
  const FloatBits nan = bits | (same_bits<FloatBits>((bits & 0xffff) != 0) & 0x400000);
  return (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
}

template <bool kNarrow>
PERSEUS_INLINE FloatBits exponent_first(FloatBits bits) {
  if constexpr (!kNarrow) return (bits << 1) | (bits >> 31);
  bits = rounded_to_narrow(bits) & 0xffff0000;
  return (bits << 1) | ((bits >> 15) & 0x10000);
}
template <bool kNarrow>
PERSEUS_INLINE Floats sign_first(FloatBits bits) {
  if constexpr (!kNarrow) return same_bits<Floats>((bits >> 1) | (bits << 31));
  return same_bits<Floats>(((bits >> 1) & 0x7fff0000) | ((bits << 15) & 0x80000000));
}

// ---- codes ----------------------------------------------------------------------------------------------------------

// A byte for each element of a block.
struct ByteRows {
  alignas(kExponentRow) unsigned char bytes[kExponentBlock];
  PERSEUS_INLINE unsigned char* at(size_t row, size_t part) { return bytes + row * kExponentRow + part * kVectorBytes; }
};

// How many bytes of `rows` rows of codes hold one bit of each, the next two and the next four, as the width has them.
// They follow each other in this order.
struct CodeParts {
  size_t one, two, four;
  PERSEUS_INLINE CodeParts(unsigned width, size_t rows)
      : one(width & 1 ? (rows + 7) / 8 * kExponentRow : 0),
        two(width & 2 ? (rows + 3) / 4 * kExponentRow : 0),
        four(width & 4 ? (rows + 1) / 2 * kExponentRow : 0) {}
  PERSEUS_INLINE size_t bytes() const { return one + two + four; }
};
PERSEUS_INLINE size_t code_bytes(unsigned width, size_t rows) {
  return width == kRaw ? rows * kExponentRow : CodeParts(width, rows).bytes();
}

constexpr uint8_t escape_of(unsigned width) { return static_cast<uint8_t>((1U << width) - 1); }
// Bit i is byte i's of the row.
PERSEUS_INLINE uint64_t bits_of_part(Bytes mask, size_t part) { return byte_bits(mask) << (part * kVectorBytes % 64); }

// escapes[row]: a bit for each.
template <unsigned kWidth>
PERSEUS_INLINE void pack(ByteRows& exponents, uint8_t base, size_t rows, unsigned char* to, uint64_t* escapes) {
  constexpr unsigned kAfterOne = kWidth & 1, kAfterTwo = kWidth & 3;
  const CodeParts sizes(kWidth, rows);
  for (size_t part = 0; part < kParts; ++part) {
    FloatBits one{}, two[2] = {}, four[4] = {};
#pragma GCC unroll 8
    for (size_t row = 0; row < rows; ++row) {
      const Bytes bytes = least(base - load_bytes(exponents.at(row, part)), escape_of(kWidth));
      escapes[row] |= bits_of_part(same_bits<Bytes>(bytes == escape_of(kWidth)), part);
      const FloatBits code = words(bytes);
      if (kWidth & 1) one |= (code & 0x01010101) << row;
      if (kWidth & 2) two[row / 4] |= ((code >> kAfterOne) & 0x03030303) << (2 * (row % 4));
      if (kWidth & 4) four[row / 2] |= ((code >> kAfterTwo) & 0x0f0f0f0f) << (4 * (row % 2));
    }
    unsigned char* at = to + part * kVectorBytes;
    if (sizes.one > 0) store_vector(at, one);
    at += sizes.one;
    for (size_t i = 0; i < sizes.two / kExponentRow; ++i) store_vector(at + i * kExponentRow, two[i]);
    at += sizes.two;
    for (size_t i = 0; i < sizes.four / kExponentRow; ++i) store_vector(at + i * kExponentRow, four[i]);
  }
}

template <unsigned kWidth>
PERSEUS_INLINE void unpack(const unsigned char* from, uint8_t base, size_t rows, ByteRows& exponents,
                           uint64_t* escapes) {
  constexpr unsigned kAfterOne = kWidth & 1, kAfterTwo = kWidth & 3;
  const CodeParts sizes(kWidth, rows);
  for (size_t part = 0; part < kParts; ++part) {
    const unsigned char* const at = from + part * kVectorBytes;
#pragma GCC unroll 8
    for (size_t row = 0; row < rows; ++row) {
      FloatBits code{};
      if (kWidth & 1) code |= (load_vector<FloatBits>(at) >> row) & 0x01010101;
      if (kWidth & 2) {
        const unsigned char* const two = at + sizes.one + row / 4 * kExponentRow;
        code |= ((load_vector<FloatBits>(two) >> (2 * (row % 4))) & 0x03030303) << kAfterOne;
      }
      if (kWidth & 4) {
        const unsigned char* const four = at + sizes.one + sizes.two + row / 2 * kExponentRow;
        code |= ((load_vector<FloatBits>(four) >> (4 * (row % 2))) & 0x0f0f0f0f) << kAfterTwo;
      }
      const Bytes bytes = bytes_of(code);
      escapes[row] |= bits_of_part(same_bits<Bytes>(bytes == escape_of(kWidth)), part);
      store_vector(exponents.at(row, part), base - bytes);
    }
  }
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

struct BlockHead {
  uint8_t base, width;
  uint16_t escapes;
};

constexpr size_t plane_bytes(bool narrow, size_t rows) { return rows * kExponentRow * (narrow ? 1 : 3); }

PERSEUS_INLINE uint8_t largest_byte(Bytes bytes) {
  using Half = Vector<uint8_t, 16>;
  Half parts[kVectorBytes / 16];
  __builtin_memcpy(parts, &bytes, sizeof bytes);
  Half largest = parts[0];
  for (const Half& part : parts) largest = part > largest ? part : largest;
  uint64_t halves[2];
  __builtin_memcpy(halves, &largest, sizeof largest);
  uint8_t found = 0;
  for (size_t i = 0; i < 8; ++i) {
    for (uint64_t half : halves) {
      const uint8_t byte = static_cast<uint8_t>(half >> (8 * i));
      found = byte > found ? byte : found;
    }
  }
  return found;
}

// Writes all but the exponents, which go to `exponents`; gives the largest of these.
template <bool kNarrow>
PERSEUS_INLINE unsigned char* split_rows(const float* v, size_t rows, unsigned char* to, ByteRows& exponents,
                                         uint8_t* base) {
  Bytes largest{};
  unsigned char* const middle = to + (kNarrow ? 0 : 2 * rows * kExponentRow);
  for (size_t row = 0; row < rows; ++row) {
    for (size_t part = 0; part < kParts; ++part) {
      const float* const from = v + row * kExponentRow + part * kFloatLanes;
      FloatBits e[4];
      for (size_t k = 0; k < 4; ++k) {
        // The next block but one. Beyond an array nothing happens.
        if (part == 0) __builtin_prefetch(from + k * kWordsOfRow + 2 * kExponentBlock);
        e[k] = exponent_first<kNarrow>(same_bits<FloatBits>(load_floats(from + k * kWordsOfRow)));
      }
      const FloatBits exponent =
          (e[0] >> 24) | ((e[1] >> 16) & 0xff00) | ((e[2] >> 8) & 0xff0000) | (e[3] & 0xff000000);
      const FloatBits rest =
          ((e[0] >> 16) & 0xff) | ((e[1] >> 8) & 0xff00) | (e[2] & 0xff0000) | ((e[3] << 8) & 0xff000000);
      store_vector(exponents.at(row, part), exponent);
      store_vector(middle + row * kExponentRow + part * kVectorBytes, rest);
      if constexpr (!kNarrow) {
        unsigned char* const low = to + 2 * row * kExponentRow + part * kVectorBytes;
        store_vector(low, (e[0] & 0xffff) | (e[1] << 16));
        store_vector(low + kExponentRow, (e[2] & 0xffff) | (e[3] << 16));
      }
      const Bytes bytes = bytes_of(exponent);
      largest = bytes > largest ? bytes : largest;
    }
  }
  *base = largest_byte(largest);
  return middle + rows * kExponentRow;
}

template <Arrival kArrival, bool kNarrow>
PERSEUS_INLINE void join_rows(const unsigned char* from, size_t rows, ByteRows& exponents, float* x) {
  const unsigned char* const middle = from + (kNarrow ? 0 : 2 * rows * kExponentRow);
  for (size_t row = 0; row < rows; ++row) {
    for (size_t part = 0; part < kParts; ++part) {
      float* const to = x + row * kExponentRow + part * kFloatLanes;
      const FloatBits exponent = words(load_bytes(exponents.at(row, part)));
      const FloatBits rest = load_vector<FloatBits>(middle + row * kExponentRow + part * kVectorBytes);
      FloatBits e[4] = {(exponent << 24) | ((rest & 0xff) << 16), ((exponent & 0xff00) << 16) | ((rest & 0xff00) << 8),
                        ((exponent & 0xff0000) << 8) | (rest & 0xff0000),
                        (exponent & 0xff000000) | ((rest >> 8) & 0xff0000)};
      if constexpr (!kNarrow) {
        const unsigned char* const low = from + 2 * row * kExponentRow + part * kVectorBytes;
        const FloatBits one = load_vector<FloatBits>(low), two = load_vector<FloatBits>(low + kExponentRow);
        e[0] |= one & 0xffff;
        e[1] |= one >> 16;
        e[2] |= two & 0xffff;
        e[3] |= two >> 16;
      }
      for (size_t k = 0; k < 4; ++k) arrive<kArrival>(to + k * kWordsOfRow, sign_first<kNarrow>(e[k]));
    }
  }
}

// Two counts by lane, below 2^16 in all, added up in one pass.
PERSEUS_INLINE void add_up(Bytes a, Bytes b, size_t* sum_of_a, size_t* sum_of_b) {
  const auto pairs = [](Bytes counts) __attribute__((always_inline)) {
    const FloatBits two = (words(counts) & 0x00ff00ff) + ((words(counts) >> 8) & 0x00ff00ff);
    return (two & 0xffff) + (two >> 16);
  };
  const FloatBits both = pairs(a) + (pairs(b) << 16);
  uint32_t sum = 0;
  for (size_t lane = 0; lane < kFloatLanes; ++lane) sum += both[lane];
  *sum_of_a = sum & 0xffff;
  *sum_of_b = sum >> 16;
}

// The width whose codes take the fewest bytes, of equal ones the first; 0 where all exponents are the base.
PERSEUS_INLINE BlockHead best_head(ByteRows& exponents, uint8_t base, size_t rows) {
  constexpr size_t kWidths = sizeof kCounted / sizeof kCounted[0];
  static_assert(kWidths % 2 == 0 && kCounted[0] == 1, "counts are added up in twos, and the first is of all but zeros");
  Bytes counts[kWidths] = {};
  for (size_t row = 0; row < rows; ++row) {
    for (size_t part = 0; part < kParts; ++part) {
      // Signed bytes are what every machine compares.
      const SignedBytes code = same_bits<SignedBytes>(least(base - load_bytes(exponents.at(row, part)), 127));
#pragma GCC unroll 8
      for (size_t i = 0; i < kWidths; ++i)
        counts[i] -= same_bits<Bytes>(code > static_cast<int8_t>(escape_of(kCounted[i]) - 1));
    }
  }
  BlockHead best{base, kRaw, 0};
  size_t fewest = code_bytes(kRaw, rows);
#pragma GCC unroll 4
  for (size_t i = 0; i < kWidths; i += 2) {
    size_t found[2];
    add_up(counts[i], counts[i + 1], &found[0], &found[1]);
    if (i == 0 && found[0] == 0) return {base, 0, 0};
    for (size_t j = i; j < i + 2; ++j) {
      const size_t bytes = code_bytes(kCounted[j], rows) + found[j - i];
      if (bytes >= fewest) continue;
      fewest = bytes;
      best = {base, static_cast<uint8_t>(kCounted[j]), static_cast<uint16_t>(found[j - i])};
    }
  }
  return best;
}

// Calls call(width) with a constant, for a width that has codes.
template <class Call>
PERSEUS_INLINE void with_width(unsigned width, const Call& call) {
  switch (width) {
    case 1:
      return call(std::integral_constant<unsigned, 1>());
    case 2:
      return call(std::integral_constant<unsigned, 2>());
    case 3:
      return call(std::integral_constant<unsigned, 3>());
    case 4:
      return call(std::integral_constant<unsigned, 4>());
    case 5:
      return call(std::integral_constant<unsigned, 5>());
    case 6:
      return call(std::integral_constant<unsigned, 6>());
    default:
      return;
  }
}

// Codes are packed and unpacked by functions of their own, of which there is one copy for whole blocks, whose loops
// unroll, and one for a chunk's last: inlined for all types and arrivals they would be a tenth of the library.
template <bool kWhole>
__attribute__((noinline)) void pack_block(const BlockHead& head, size_t some_rows, ByteRows& exponents,
                                          unsigned char* to, uint64_t* escapes) {
  const size_t rows = kWhole ? kAllRows : some_rows;
  if (head.width == kRaw) __builtin_memcpy(to, exponents.bytes, rows * kExponentRow);
  with_width(head.width, [&](auto width) __attribute__((always_inline)) {
    pack<width.value>(exponents, head.base, rows, to, escapes);
  });
}
template <bool kWhole>
__attribute__((noinline)) void unpack_block(const BlockHead& head, size_t some_rows, const unsigned char* codes,
                                            ByteRows& exponents, uint64_t* escapes) {
  const size_t rows = kWhole ? kAllRows : some_rows;
  if (head.width == 0) __builtin_memset(exponents.bytes, head.base, rows * kExponentRow);
  if (head.width == kRaw) __builtin_memcpy(exponents.bytes, codes, rows * kExponentRow);
  with_width(head.width, [&](auto width) __attribute__((always_inline)) {
    unpack<width.value>(codes, head.base, rows, exponents, escapes);
  });
}

template <bool kNarrow>
PERSEUS_INLINE unsigned char* encode_exponent_block(const float* v, size_t rows, unsigned char* to) {
  ByteRows exponents;
  uint8_t base;
  unsigned char* const head_at = to;
  to = split_rows<kNarrow>(v, rows, to + sizeof(BlockHead), exponents, &base);
  const BlockHead head = best_head(exponents, base, rows);
  __builtin_memcpy(head_at, &head, sizeof head);
  uint64_t escapes[kAllRows] = {};
  if (rows == kAllRows) pack_block<true>(head, rows, exponents, to, escapes);
  else pack_block<false>(head, rows, exponents, to, escapes);
  to += code_bytes(head.width, rows);
  if (head.escapes == 0) return to;
  for (size_t row = 0; row < rows; ++row) {
    for (uint64_t bits = escapes[row]; bits != 0; bits &= bits - 1)
      *to++ = exponents.bytes[row * kExponentRow + static_cast<size_t>(__builtin_ctzll(bits))];
  }
  return to;
}

template <bool kNarrow>
size_t encode_exponents_as(const ExponentEncodeTask& task) {
  unsigned char* to = task.to;
  for (size_t row = 0; row < task.rows; row += kAllRows) {
    const float* const v = task.v + row * kExponentRow;
    to = encode_exponent_block<kNarrow>(v, task.rows - row < kAllRows ? task.rows - row : kAllRows, to);
  }
  return static_cast<size_t>(to - task.to);
}

size_t encode_exponents_any(const ExponentEncodeTask& task) {
  return task.narrow ? encode_exponents_as<true>(task) : encode_exponents_as<false>(task);
}

// From behind a block's head, which fits; false where the codes say another number of escapes.
template <Arrival kArrival, bool kNarrow>
PERSEUS_INLINE bool decode_exponent_block(const BlockHead& head, const unsigned char* from, size_t rows, float* x) {
  ByteRows exponents;
  uint64_t escapes[kAllRows] = {};
  const unsigned char* const codes = from + plane_bytes(kNarrow, rows);
  if (rows == kAllRows) unpack_block<true>(head, rows, codes, exponents, escapes);
  else unpack_block<false>(head, rows, codes, exponents, escapes);
  size_t found = 0;
  for (size_t row = 0; row < rows; ++row) found += static_cast<size_t>(__builtin_popcountll(escapes[row]));
  if (found != head.escapes) return false;
  const unsigned char* escaped = codes + code_bytes(head.width, rows);
  for (size_t row = 0; row < rows; ++row) {
    for (uint64_t bits = escapes[row]; bits != 0; bits &= bits - 1)
      exponents.bytes[row * kExponentRow + static_cast<size_t>(__builtin_ctzll(bits))] = *escaped++;
  }
  join_rows<kArrival, kNarrow>(from, rows, exponents, x);
  return true;
}

template <Arrival kArrival, bool kNarrow>
size_t decode_exponents_as(const ExponentDecodeTask& task) {
  const unsigned char *from = task.from, *const end = from + task.bytes;
  bool fits = true;
  for (size_t row = 0; row < task.rows && fits; row += kAllRows) {
    BlockHead head;
    if (static_cast<size_t>(end - from) < sizeof head) return kBadExponents;
    __builtin_memcpy(&head, from, sizeof head);
    from += sizeof head;
    const bool known = head.width <= kWidest || head.width == kRaw;
    const size_t rows = task.rows - row < kAllRows ? task.rows - row : kAllRows;
    const size_t bytes = plane_bytes(kNarrow, rows) + code_bytes(head.width, rows) + head.escapes;
    if (!known || static_cast<size_t>(end - from) < bytes) return kBadExponents;
    fits = decode_exponent_block<kArrival, kNarrow>(head, from, rows, task.x + row * kExponentRow);
    from += bytes;
  }
  if (kArrival == Arrival::kStream) stream_fence();
  return fits ? static_cast<size_t>(from - task.from) : kBadExponents;
}

template <bool kNarrow>
size_t decode_exponents_from(const ExponentDecodeTask& task) {
  switch (possible_arrival(task.arrival, task.x)) {
    case Arrival::kStore:
      return decode_exponents_as<Arrival::kStore, kNarrow>(task);
    case Arrival::kStream:
      return decode_exponents_as<Arrival::kStream, kNarrow>(task);
    case Arrival::kAdd:
      return decode_exponents_as<Arrival::kAdd, kNarrow>(task);
  }
  return kBadExponents;
}

size_t decode_exponents_any(const ExponentDecodeTask& task) {
  return task.narrow ? decode_exponents_from<true>(task) : decode_exponents_from<false>(task);
}

}  // namespace
}  // namespace perseus::kernels
