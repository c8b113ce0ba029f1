// Element values that differ per rank, tensor and index, and what their reduction must be, bit for bit, computed one
// element after the other in rank order. Pure functions.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "base/half.h"
#include "perseus/perseus.h"

namespace perseus_test {

using Bytes = std::vector<unsigned char>;

constexpr perseus_dtype kDTypes[] = {PERSEUS_FLOAT16, PERSEUS_BFLOAT16, PERSEUS_FLOAT32, PERSEUS_FLOAT64, PERSEUS_UINT8,
                                     PERSEUS_INT8,    PERSEUS_INT16,    PERSEUS_INT32,   PERSEUS_INT64,   PERSEUS_BOOL};
constexpr perseus_reduce_op kReductions[] = {PERSEUS_SUM, PERSEUS_AVERAGE, PERSEUS_MIN, PERSEUS_MAX, PERSEUS_PRODUCT};

inline size_t size_of(perseus_dtype dtype) {
  constexpr size_t kSizes[] = {2, 2, 4, 8, 1, 1, 2, 4, 8, 1};
  return kSizes[dtype];
}
inline const char* name_of(perseus_dtype dtype) {
  constexpr const char* kNames[] = {"f16", "bf16", "f32", "f64", "u8", "i8", "i16", "i32", "i64", "bool"};
  return kNames[dtype];
}
inline const char* name_of(perseus_reduce_op op) {
  constexpr const char* kNames[] = {"average", "sum", "adasum", "min", "max", "product"};
  return kNames[op];
}

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// ---- element types: stored as T, reduced as Acc ----

struct Half {
  using Stored = uint16_t;
  using Acc = float;
  static Acc load(Stored x) { return perseus::half_to_float(x); }
  static Stored store(Acc x) { return perseus::float_to_half(x); }
};
struct BFloat {
  using Stored = uint16_t;
  using Acc = float;
  static Acc load(Stored x) { return perseus::bfloat16_to_float(x); }
  static Stored store(Acc x) { return perseus::float_to_bfloat16(x); }
};
template <typename T>
struct Plain {
  using Stored = T;
  using Acc = T;
  static Acc load(Stored x) { return x; }
  static Stored store(Acc x) { return x; }
};
struct Truth : Plain<uint8_t> {};

// Calls body(Type()) with the element type of `dtype`.
template <typename Body>
auto with_type(perseus_dtype dtype, Body body) {
  switch (dtype) {
    case PERSEUS_FLOAT16:
      return body(Half());
    case PERSEUS_BFLOAT16:
      return body(BFloat());
    case PERSEUS_FLOAT32:
      return body(Plain<float>());
    case PERSEUS_FLOAT64:
      return body(Plain<double>());
    case PERSEUS_UINT8:
      return body(Plain<uint8_t>());
    case PERSEUS_INT8:
      return body(Plain<int8_t>());
    case PERSEUS_INT16:
      return body(Plain<int16_t>());
    case PERSEUS_INT32:
      return body(Plain<int32_t>());
    case PERSEUS_INT64:
      return body(Plain<int64_t>());
    default:
      return body(Truth());
  }
}
inline bool is_float(perseus_dtype dtype) { return dtype <= PERSEUS_FLOAT64; }

// ---- inputs ----

// Floats lie in [-2, 2) with every bit of the significand in use, so that an order or a rounding that differs shows;
// integers use the whole range.
template <typename Type>
typename Type::Stored element(Type, uint64_t hash) {
  using Acc = typename Type::Acc;
  if constexpr (std::is_same_v<Type, Truth>) return (hash & 3) != 0;
  else if constexpr (std::is_same_v<Acc, double>) return static_cast<double>(hash >> 11) * 0x1p-51 - 2.0;
  else if constexpr (std::is_same_v<Acc, float>) return Type::store(static_cast<float>(hash >> 40) * 0x1p-22f - 2.0f);
  else return static_cast<typename Type::Stored>(hash);
}

void fill(perseus_dtype dtype, uint64_t seed, int rank, size_t first, size_t count, void* out);

// ---- what comes out ----

struct Reduction {
  perseus_reduce_op op = PERSEUS_SUM;
  double prescale = 1.0, postscale = 1.0;
};

// Scaling acts on integers in double and truncates toward zero, to the nearest limit where their range ends.
template <typename T>
T truncated(double x) {
  constexpr double kPast = 2.0 * static_cast<double>(uint64_t{1} << (sizeof(T) * 8 - (std::is_signed_v<T> ? 2 : 1)));
  if (x >= kPast) return std::numeric_limits<T>::max();
  if (x <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(x);
}

template <typename Acc>
Acc combine(perseus_reduce_op op, Acc a, Acc b) {
  if (op == PERSEUS_MIN) return b < a ? b : a;
  if (op == PERSEUS_MAX) return b > a ? b : a;
  if constexpr (std::is_integral_v<Acc>) {  // wraps
    const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
    return static_cast<Acc>(op == PERSEUS_PRODUCT ? x * y : x + y);
  } else {
    return op == PERSEUS_PRODUCT ? a * b : a + b;
  }
}

// values: one element of each rank, in rank order.
template <typename Type>
typename Type::Stored reduced(Type, const Reduction& how, const typename Type::Stored* values, int ranks) {
  using Acc = typename Type::Acc;
  const int divisor = how.op == PERSEUS_AVERAGE ? ranks : 1;
  if constexpr (std::is_same_v<Type, Truth>) {
    uint8_t acc = values[0];
    for (int r = 1; r < ranks; ++r)
      acc = how.op == PERSEUS_SUM || how.op == PERSEUS_MAX ? acc | values[r] : acc & values[r];
    return acc;
  } else if constexpr (std::is_floating_point_v<Acc>) {
    const Acc pre = static_cast<Acc>(how.prescale);
    const Acc post = static_cast<Acc>(how.postscale / divisor);
    Acc acc = Type::load(values[0]) * pre;
    for (int r = 1; r < ranks; ++r) acc = combine(how.op, acc, static_cast<Acc>(Type::load(values[r]) * pre));
    return Type::store(acc * post);
  } else {
    const auto scaled = [](Acc x, double factor, int by) {
      if (factor == 1.0) return static_cast<Acc>(x / static_cast<Acc>(by));
      return truncated<Acc>(static_cast<double>(x) * factor / by);
    };
    Acc acc = scaled(values[0], how.prescale, 1);
    for (int r = 1; r < ranks; ++r) acc = combine(how.op, acc, scaled(values[r], how.prescale, 1));
    return scaled(acc, how.postscale, divisor);
  }
}

// Elements [first, first + count) of the reduction over `members` of what fill() gave them. Sets *plausible to false
// when an element is further from the float64 reference than rounding explains.
Bytes expected_reduction(perseus_dtype dtype, const Reduction& how, uint64_t seed, const std::vector<int>& members,
                         size_t first, size_t count, bool* plausible);

}  // namespace perseus_test
