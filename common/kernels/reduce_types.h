// Element types and reductions as the reduction loops see them: load() gives accumulators, finish() what is stored,
// combine() joins two accumulators. Internal linkage, see variant.h; no threads.
#pragma once

#include "kernels/lanes.h"

namespace perseus::kernels {
namespace {

// For floating types only; integers with factors have a path of their own.
struct Factors {
  double pre;
  double post;  // divided by the divisor
};

// ---- formats: memory <-> accumulators -----------------------------------------------------------------------------

struct Float32 {
  using Scalar = float;
  using Acc = Floats;
  using Stored = Floats;
  static PERSEUS_INLINE Acc decode(Stored from) { return from; }
  static PERSEUS_INLINE Stored encode(Acc from) { return from; }
};

struct Float64 {
  using Scalar = double;
  using Acc = Doubles;
  using Stored = Doubles;
  static PERSEUS_INLINE Acc decode(Stored from) { return from; }
  static PERSEUS_INLINE Stored encode(Acc from) { return from; }
};

struct Float16 {
  using Scalar = float;
  using Acc = Floats;
  using Stored = Halves;
  static PERSEUS_INLINE Acc decode(Stored from) { return half_decode(from); }
  static PERSEUS_INLINE Stored encode(Acc from) { return half_encode(from); }
};

struct BFloat16 {
  using Scalar = float;
  using Acc = Floats;
  using Stored = Halves;
  static PERSEUS_INLINE Acc decode(Stored from) {
    return same_bits<Floats>(__builtin_convertvector(from, FloatBits) << 16);
  }
  // Of all NaNs only for the canonical one, which finish() has put there: a carry would make others infinite.
  static PERSEUS_INLINE Stored encode(Acc from) {
    FloatBits bits = same_bits<FloatBits>(from);
    return narrow((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  }
};

// ---- element types ------------------------------------------------------------------------------------------------

template <class Format, bool kScaled>
struct FloatType {
  using Acc = typename Format::Acc;
  using Stored = typename Format::Stored;
  using Scalar = typename Format::Scalar;
  static constexpr size_t kLanes = sizeof(Acc) / sizeof(Scalar);
  static constexpr size_t kSize = sizeof(Stored) / kLanes;

  static PERSEUS_INLINE Acc load(const unsigned char* from, const Factors& factors) {
    Acc value = Format::decode(load_vector<Stored>(from));
    return kScaled ? value * static_cast<Scalar>(factors.pre) : value;
  }

  // Which operand's NaN an addition hands on depends on how the compiler orders them: one NaN for all.
  static PERSEUS_INLINE Stored finish(Acc value, const Factors& factors) {
    if (kScaled) value = value * static_cast<Scalar>(factors.post);
    Acc quiet = Acc{} + static_cast<Scalar>(__builtin_nan(""));
    return Format::encode(value == value ? value : quiet);
  }
};

// T is unsigned where the reduction may wrap.
template <class T>
struct IntType {
  using Acc = Vector<T>;
  using Stored = Acc;
  static constexpr size_t kLanes = sizeof(Acc) / sizeof(T);
  static constexpr size_t kSize = sizeof(T);
  static PERSEUS_INLINE Acc load(const unsigned char* from, const Factors&) { return load_vector<Acc>(from); }
  static PERSEUS_INLINE Stored finish(Acc value, const Factors&) { return value; }
};

struct BoolType {
  using Acc = Vector<uint8_t>;
  using Stored = Acc;
  static constexpr size_t kLanes = sizeof(Acc);
  static constexpr size_t kSize = 1;
  static PERSEUS_INLINE Acc load(const unsigned char* from, const Factors&) {
    Acc value = load_vector<Acc>(from);
    return same_bits<Acc>(value != 0) & 1;
  }
  static PERSEUS_INLINE Stored finish(Acc value, const Factors&) { return value; }
};

// ---- reductions: a is what came earlier in the order --------------------------------------------------------------

struct SumOf {
  template <class V>
  static PERSEUS_INLINE V combine(V a, V b) {
    return a + b;
  }
};

struct ProductOf {
  template <class V>
  static PERSEUS_INLINE V combine(V a, V b) {
    return a * b;
  }
};

// A NaN b compares unequal to itself; a NaN a is kept because no b is less or greater.
struct MinOf {
  template <class V>
  static PERSEUS_INLINE V combine(V a, V b) {
    return ((b < a) | (b != b)) ? b : a;
  }
};

struct MaxOf {
  template <class V>
  static PERSEUS_INLINE V combine(V a, V b) {
    return ((b > a) | (b != b)) ? b : a;
  }
};

struct Or {
  template <class V>
  static PERSEUS_INLINE V combine(V a, V b) {
    return a | b;
  }
};

struct And {
  template <class V>
  static PERSEUS_INLINE V combine(V a, V b) {
    return a & b;
  }
};

}  // namespace
}  // namespace perseus::kernels
