// Chunks of integers. Thread-safe.
#include "codec/integers.h"

#include <algorithm>

#include "base/integer_blocks.h"
#include "codec/chunk.h"

namespace perseus {
namespace {

constexpr uint32_t kBlocksForm = 0;

size_t blocks_bytes(size_t bits, size_t count) {
  return sizeof(ChunkHeader) + integer_scales_bytes(bits, count) + integer_bytes(bits, count);
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

size_t IntegerFormat::encode_whole(const float* x, size_t count, Byte* to) const {
  return encode_dense(x, nullptr, count, to);
}

bool IntegerFormat::scales_finite(const Byte* scales, size_t count) const {
  const size_t bytes = integer_scales_bytes(bits_, count);
  return bits_ == 2 ? all_finite<uint16_t>(scales, bytes) : all_finite<uint32_t>(scales, bytes);
}

// A GPU's warps know of a block what is not finite in it, and the chunk's others need to know. What they have encoded
// is exact together with the residual, so nothing is lost, and a block with scales that are not finite is in the
// residual as it was.
size_t IntegerFormat::take_over(const Byte* encoded, float* residual, size_t count, Byte* to) const {
  const Byte* const scales = encoded + sizeof(ChunkHeader);
  if (scales_finite(scales, count)) return WireFormat::take_over(encoded, residual, count, to);
  const size_t of_scales = integer_scales_bytes(bits_, kIntegerBlock), of_words = integer_bytes(bits_, kIntegerBlock);
  const Byte* const words = scales + integer_scales_bytes(bits_, count);
  for (size_t begin = 0; begin < count; begin += kIntegerBlock) {
    const size_t block = begin / kIntegerBlock, elements = std::min(kIntegerBlock, count - begin);
    const Byte* const of_block = scales + block * of_scales;
    if (!scales_finite(of_block, elements)) continue;
    float sent[kIntegerBlock];
    kernels::decode_integers(bits_, of_block, words + block * of_words, elements, sent, kernels::Arrival::kStore);
    for (size_t i = 0; i < elements; ++i)
      if (sent[i] != 0.0F) residual[begin + i] += sent[i];  // a zero's sign is in the residual
  }
  return encode_dense(residual, residual, count, to);
}

void IntegerFormat::check(const Byte* from, size_t bytes, size_t count) const {
  const char* const name = bits_ == 8 ? "int8" : bits_ == 4 ? "int4" : "int2";
  const ChunkHeader header = read_header(name, from, bytes, count);
  if (header.form == kDenseForm) return;
  if (header.form != kBlocksForm || bytes != blocks_bytes(bits_, count) || !scales_finite(from + sizeof header, count))
    bad_chunk(name, bytes, count);
}

void IntegerFormat::decode_as(kernels::Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const {
  check(from, bytes, count);
  ChunkHeader header;
  std::memcpy(&header, from, sizeof header);
  const Byte* const body = from + sizeof header;
  if (header.form == kDenseForm) return decode_dense(body, count, x, arrival);
  kernels::decode_integers(bits_, body, body + integer_scales_bytes(bits_, count), count, x, arrival);
}

}  // namespace perseus
