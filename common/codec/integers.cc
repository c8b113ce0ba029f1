// Chunks of integers. Thread-safe.
#include "codec/integers.h"

#include <algorithm>

#include "codec/chunk.h"

namespace perseus {
namespace {

constexpr uint32_t kBlocksForm = 0;

using kernels::integer_scales_bytes;

size_t blocks_bytes(size_t bits, size_t count) {
  return sizeof(ChunkHeader) + integer_scales_bytes(bits, count) + kernels::integer_bytes(bits, count);
}

// Scale: the upper bits of a float.
template <class Scale>
bool all_finite(const Byte* scales, size_t bytes) {
  Scale largest = 0;
  for (size_t at = 0; at < bytes; at += sizeof(Scale)) {
    Scale bits;
    std::memcpy(&bits, scales + at, sizeof bits);
    largest = std::max(largest, bits);
  }
  return largest < kernels::kNotFinite >> (32 - 8 * sizeof(Scale));  // a sign makes it larger too
}

}  // namespace

size_t IntegerFormat::most_bytes(size_t count) const {
  return std::max(blocks_bytes(bits_, count), dense_bytes(count));
}

size_t IntegerFormat::encode(const float* x, float* residual, size_t count, uint64_t, Byte* to) const {
  const float* v = x;
  if (residual != nullptr) {
    if (kernels::add_to_residual(x, 1.0f, residual, count) >= kernels::kNotFinite)
      return encode_dense(residual, residual, count, to);
    v = residual;
  }
  Byte* scales = to + sizeof(ChunkHeader);
  if (!kernels::encode_integers(bits_, v, count, scales, scales + integer_scales_bytes(bits_, count), residual))
    return encode_dense(v, nullptr, count, to);
  return put_header(to, blocks_bytes(bits_, count), kBlocksForm);
}

void IntegerFormat::decode_as(kernels::Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const {
  const char* const name = bits_ == 8 ? "int8" : bits_ == 4 ? "int4" : "int2";
  const ChunkHeader header = read_header(name, from, bytes, count);
  const Byte* body = from + sizeof header;
  if (header.form == kDenseForm) return decode_dense(body, count, x, arrival);
  if (header.form != kBlocksForm || bytes != blocks_bytes(bits_, count)) bad_chunk(name, bytes, count);
  const size_t of_scales = integer_scales_bytes(bits_, count);
  if (bits_ == 2 ? !all_finite<uint16_t>(body, of_scales) : !all_finite<uint32_t>(body, of_scales))
    bad_chunk(name, bytes, count);
  kernels::decode_integers(bits_, body, body + of_scales, count, x, arrival);
}

}  // namespace perseus
