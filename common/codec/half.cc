// f16 and bf16 chunks. Thread-safe.
#include "codec/half.h"

#include "base/half.h"
#include "codec/chunk.h"
#include "kernels/codec_kernels.h"

namespace perseus {

using kernels::Arrival;

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

void HalfFormat::check(const Byte* from, size_t bytes, size_t count) const {
  const char* name = dtype_name(dtype_);
  const float unscale = float_from_bits(read_header(name, from, bytes, count).form);
  const bool possible = dtype_ == DType::kFloat16 ? is_half_unscale(unscale) : unscale == 1.0f;
  if (bytes != most_bytes(count) || !possible) bad_chunk(name, bytes, count);
}

void HalfFormat::decode_as(Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const {
  check(from, bytes, count);
  ChunkHeader header;
  std::memcpy(&header, from, sizeof header);
  kernels::decode_halves(dtype_, from + sizeof header, float_from_bits(header.form), count, x, arrival);
}

}  // namespace perseus
