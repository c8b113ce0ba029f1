// Guards the chosen variant's codec loops: the floating-point mode is the default one. Thread-safe.
#include "kernels/codec_kernels.h"

#include "kernels/float_mode.h"
#include "kernels/variant.h"

namespace perseus::kernels {
namespace {
const CodecKernels& codec() { return current_variant().codec; }
}  // namespace

uint32_t largest_magnitude(const float* x, size_t count) { return codec().largest_magnitude(x, count); }

uint32_t largest_finite_magnitude(const float* x, size_t count) { return codec().largest_finite_magnitude(x, count); }

uint32_t add_to_residual(const float* x, float momentum, float* residual, size_t count) {
  DefaultFloatMode mode;
  return codec().add_to_residual(x, momentum, residual, count);
}

void encode_halves(DType dtype, const float* v, float scale, float unscale, size_t count, unsigned char* to,
                   float* residual) {
  DefaultFloatMode mode;
  codec().encode_halves(HalfEncodeTask{dtype, v, scale, unscale, count, to, residual});
}

void decode_halves(DType dtype, const unsigned char* from, float unscale, size_t count, float* x, Arrival arrival) {
  DefaultFloatMode mode;
  codec().decode_halves(HalfDecodeTask{dtype, from, unscale, count, x, arrival});
}

bool encode_integers(size_t bits, const float* v, size_t count, unsigned char* scales, unsigned char* to,
                     float* residual) {
  DefaultFloatMode mode;
  return codec().encode_integers(IntegerEncodeTask{bits, v, count, scales, to, residual});
}

void decode_integers(size_t bits, const unsigned char* scales, const unsigned char* from, size_t count, float* x,
                     Arrival arrival) {
  DefaultFloatMode mode;
  codec().decode_integers(IntegerDecodeTask{bits, scales, from, count, x, arrival});
}

size_t encode_exponents(bool narrow, const float* v, size_t rows, unsigned char* to) {
  return codec().encode_exponents(ExponentEncodeTask{narrow, v, rows, to});
}

size_t decode_exponents(bool narrow, const unsigned char* from, size_t bytes, size_t rows, float* x, Arrival arrival) {
  DefaultFloatMode mode;
  return codec().decode_exponents(ExponentDecodeTask{narrow, from, bytes, rows, x, arrival});
}

size_t count_at_least(const float* v, size_t count, uint32_t magnitude) {
  return codec().count_at_least(v, count, magnitude);
}

size_t find_at_least(const float* v, size_t count, uint32_t magnitude, uint16_t* indices) {
  return codec().find_at_least(v, count, magnitude, indices);
}

void add_at(float* x, const uint16_t* indices, const float* values, size_t n) {
  DefaultFloatMode mode;
  codec().add_at(x, indices, values, n);
}

}  // namespace perseus::kernels
