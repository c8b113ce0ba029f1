// f16 and bf16 chunks. Thread-safe.
#include "codec/half.h"

#include "base/half.h"
#include "codec/chunk.h"
#include "kernels/codec_kernels.h"

namespace perseus {

using kernels::Arrival;

float half_scale(uint32_t largest_magnitude) {
  // The largest value goes to [2^14, 2^15): rounding cannot carry it past f16's end at 2^16. Both the factor and its
  // inverse are to be normal floats.
  int exponent = static_cast<int>(largest_magnitude >> 23) - 127;
  int shift = largest_magnitude == 0 ? 0 : 14 - exponent;
  if (shift > 126) shift = 126;
  return float_from_bits(static_cast<uint32_t>(shift + 127) << 23);
}

bool is_half_unscale(float unscale) { return unscale >= kSmallestHalfScale && unscale <= kLargestHalfScale; }

HalfFormat::HalfFormat(DType dtype, double scale) : dtype_(dtype), scale_(static_cast<float>(scale)) {}

size_t HalfFormat::most_bytes(size_t count) const { return sizeof(ChunkHeader) + padded(2 * count); }

size_t HalfFormat::encode(const float* x, float* residual, size_t count, uint64_t, Byte* to) const {
  const bool own_scale = dtype_ == DType::kFloat16 && scale_ == 0.0f;
  const float* v = residual != nullptr ? residual : x;
  uint32_t largest = 0;
  if (residual != nullptr) largest = kernels::add_to_residual(x, 1.0f, residual, count);
  else if (own_scale) largest = kernels::largest_magnitude(x, count);
  float scale = dtype_ == DType::kFloat16 ? scale_ : 1.0f;
  if (own_scale) {
    if (largest >= kernels::kNotFinite) largest = kernels::largest_finite_magnitude(v, count);
    scale = half_scale(largest);
  }
  const size_t bytes = most_bytes(count);
  std::memset(to + bytes - 4, 0, 4);  // what pads
  kernels::encode_halves(dtype_, v, scale, 1.0f / scale, count, to + sizeof(ChunkHeader), residual);
  return put_header(to, bytes, float_bits(1.0f / scale));
}

void HalfFormat::decode_as(Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const {
  const char* name = dtype_name(dtype_);
  const float unscale = float_from_bits(read_header(name, from, bytes, count).form);
  const bool possible = dtype_ == DType::kFloat16 ? is_half_unscale(unscale) : unscale == 1.0f;
  if (bytes != most_bytes(count) || !possible) bad_chunk(name, bytes, count);
  kernels::decode_halves(dtype_, from + sizeof(ChunkHeader), unscale, count, x, arrival);
}

}  // namespace perseus
