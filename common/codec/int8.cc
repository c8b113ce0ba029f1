// int8 chunks. Thread-safe.
#include "codec/int8.h"

#include <algorithm>

#include "codec/chunk.h"

namespace perseus {
namespace {

using kernels::Arrival;

constexpr uint32_t kBlocksForm = 0;

size_t scales_bytes(size_t count) { return kernels::byte_blocks(count) * sizeof(float); }
size_t blocks_bytes(size_t count) {
  return sizeof(ChunkHeader) + scales_bytes(count) + kernels::byte_block_bytes(count);
}

bool all_scales(const Byte* from, size_t count) {
  uint32_t largest = 0;
  for (size_t at = 0; at < scales_bytes(count); at += sizeof(float)) {
    uint32_t bits;
    std::memcpy(&bits, from + at, sizeof bits);
    largest = std::max(largest, bits);
  }
  return largest < kernels::kNotFinite;  // a sign makes it larger too
}

void decode_as(Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) {
  const ChunkHeader header = read_header("int8", from, bytes, count);
  const Byte* body = from + sizeof header;
  if (header.form == kDenseForm) return decode_dense(body, count, x, arrival);
  if (header.form != kBlocksForm || bytes != blocks_bytes(count) || !all_scales(body, count))
    bad_chunk("int8", bytes, count);
  kernels::decode_bytes(body, body + scales_bytes(count), count, x, arrival);
}

}  // namespace

size_t Int8Format::most_bytes(size_t count) const { return std::max(blocks_bytes(count), dense_bytes(count)); }

size_t Int8Format::encode(const float* x, float* residual, size_t count, uint64_t, Byte* to) const {
  const float* v = x;
  if (residual != nullptr) {
    if (kernels::add_to_residual(x, 1.0f, residual, count) >= kernels::kNotFinite)
      return encode_dense(residual, residual, count, to);
    v = residual;
  }
  Byte* scales = to + sizeof(ChunkHeader);
  if (!kernels::encode_bytes(v, count, scales, scales + scales_bytes(count), residual))
    return encode_dense(v, nullptr, count, to);
  return put_header(to, blocks_bytes(count), kBlocksForm);
}

void Int8Format::decode(const Byte* from, size_t bytes, size_t count, float* x) const {
  decode_as(Arrival::kStore, from, bytes, count, x);
}
void Int8Format::decode_streamed(const Byte* from, size_t bytes, size_t count, float* x) const {
  decode_as(Arrival::kStream, from, bytes, count, x);
}
void Int8Format::decode_add(const Byte* from, size_t bytes, size_t count, float* x) const {
  decode_as(Arrival::kAdd, from, bytes, count, x);
}

}  // namespace perseus
