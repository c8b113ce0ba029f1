// Vectors of the variant's width as GCC and clang both know them: + - * & | and comparisons act lane by lane. The
// variant's .cc defines kVectorBytes before it includes this, and afterwards the functions declared at the end.
// Internal linkage, see variant.h; no threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace perseus::kernels {
namespace {

#define PERSEUS_INLINE inline __attribute__((always_inline))

template <class T, size_t kBytes = kVectorBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <class T, size_t kBytes = kVectorBytes>
using Vector = typename VectorOf<T, kBytes>::Type;

constexpr size_t kFloatLanes = kVectorBytes / sizeof(float);
using Floats = Vector<float>;
using Doubles = Vector<double>;
using FloatBits = Vector<uint32_t>;
using Ints = Vector<int32_t>;                       // as many as there are Floats
using Halves = Vector<uint16_t, kVectorBytes / 2>;  // as many as there are Floats

template <class V>
PERSEUS_INLINE V load_vector(const unsigned char* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
PERSEUS_INLINE void store_vector(unsigned char* to, V value) {
  __builtin_memcpy(to, &value, sizeof value);
}

template <class To, class From>
PERSEUS_INLINE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// ---- what each variant defines ------------------------------------------------------------------------------------

// f16 with the bits of base/half.h; NaNs come out quiet.
PERSEUS_INLINE Floats half_decode(Halves from);
PERSEUS_INLINE Halves half_encode(Floats from);
// Lanes below 2^16 each.
PERSEUS_INLINE Halves narrow(FloatBits from);
// Bit i is lane i's, lanes being all ones or all zeros.
PERSEUS_INLINE uint32_t lane_bits(Ints mask);
// The same for bytes.
PERSEUS_INLINE uint64_t byte_bits(Vector<uint8_t> mask);
// Stores around the cache, `to` aligned to the vector. Such stores are ordered by nothing but the fence: it comes
// before anything that tells others of them.
template <class V>
PERSEUS_INLINE void stream_vector(unsigned char* to, V value);
PERSEUS_INLINE void stream_fence();

}  // namespace
}  // namespace perseus::kernels
