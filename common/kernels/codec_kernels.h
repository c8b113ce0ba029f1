// What codecs do to the elements of a chunk: largest magnitudes, residuals, casts with a scale, blocks of integers, the
// search for the largest elements. Every SIMD variant gives the same bits, whatever the caller's floating-point mode.
// Thread-safe; pointers need only the alignment of their elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace perseus::kernels {

// A magnitude is a float's bits without the sign: as integers they order as the numbers do, and from here on they are
// Inf and NaN.
constexpr uint32_t kNotFinite = 0x7f800000;

// 0 for no elements.
uint32_t largest_magnitude(const float* x, size_t count);
uint32_t largest_finite_magnitude(const float* x, size_t count);

// residual = x + momentum * residual; gives the largest magnitude of what is there then.
uint32_t add_to_residual(const float* x, float momentum, float* residual, size_t count);

// How decoded elements get to x.
enum class Arrival : uint8_t {
  kStore,
  kStream,  // around the cache, where x is aligned for that; complete for whoever sees a release store made afterwards
  kAdd,     // a NaN result is the one quiet NaN without sign and payload
};

// to[i] = v[i] * scale rounded to f16 or bf16. `residual`, where not null, becomes v less what decode_halves gives
// back, and zero where that is not finite; it may equal v. `unscale` is 1 / scale.
void encode_halves(DType dtype, const float* v, float scale, float unscale, size_t count, unsigned char* to,
                   float* residual);
// x = from * unscale.
void decode_halves(DType dtype, const unsigned char* from, float unscale, size_t count, float* x, Arrival arrival);

// Blocks of kIntegerBlock elements (base/integer_blocks.h) have a scale each, or of each eighth with 2 bits: elements
// are its multiples by integers of 8, 4 or 2 bits, that is by -n to n with n = 127, 7 or 1, rounded to nearest even. A
// scale is the largest magnitude / n cut to 16 significant bits, or to a bf16 with 2 bits, and 0 where that magnitude
// is below 2^-118. False where an element is not finite: what was written means nothing then. `residual` as above, and
// exact; where it is given, v is finite.
bool encode_integers(size_t bits, const float* v, size_t count, unsigned char* scales, unsigned char* to,
                     float* residual);
void decode_integers(size_t bits, const unsigned char* scales, const unsigned char* from, size_t count, float* x,
                     Arrival arrival);

// Rows of so many elements, in blocks of eight rows and a last one of what is left: in each block the exponents travel
// as codes of few bits, and all else as it is, see codec/lossless.h. `narrow`: elements are rounded to bf16 first.
// Gives the bytes written, at most exponent_bytes(narrow, rows), or read, of `bytes` that lie there; kBadExponents,
// with x half written, where encode_exponents() writes no such thing.
constexpr size_t kBadExponents = SIZE_MAX;
constexpr size_t kExponentRow = 64, kExponentBlock = 512;
constexpr size_t exponent_bytes(bool narrow, size_t rows) {
  return (rows + 7) / 8 * 4 + rows * kExponentRow * (narrow ? 2 : 4);
}
size_t encode_exponents(bool narrow, const float* v, size_t rows, unsigned char* to);
size_t decode_exponents(bool narrow, const unsigned char* from, size_t bytes, size_t rows, float* x, Arrival arrival);

// How many elements have at least that magnitude, which is at least 1, and their indices, rising; count <= 2^16.
size_t count_at_least(const float* v, size_t count, uint32_t magnitude);
size_t find_at_least(const float* v, size_t count, uint32_t magnitude, uint16_t* indices);
// x[indices[i]] += values[i], NaN as for kAdd.
void add_at(float* x, const uint16_t* indices, const float* values, size_t n);

}  // namespace perseus::kernels
