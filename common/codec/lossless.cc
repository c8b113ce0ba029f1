// Lossless chunks. Thread-safe.
#include "codec/lossless.h"

#include <algorithm>

#include "base/half.h"
#include "codec/chunk.h"

namespace perseus {
namespace {

using kernels::Arrival;
using kernels::kExponentRow;

constexpr uint32_t kWideForm = 0, kNarrowForm = 1;

// As rounded_to_narrow() of the kernels: what is a bf16 stays as it is, a NaN too.
uint16_t narrowed(float value) {
  const uint32_t bits = float_bits(value);
  return (bits & 0xffff) == 0 ? static_cast<uint16_t>(bits >> 16) : float_to_bfloat16(value);
}

}  // namespace

size_t LosslessFormat::most_bytes(size_t count) const {
  const size_t rows = count / kExponentRow, rest = count % kExponentRow * (narrow_ ? 2 : 4);
  const size_t most = sizeof(ChunkHeader) + padded(kernels::exponent_bytes(narrow_, rows) + rest);
  return narrow_ ? most : std::max(most, dense_bytes(count));
}

size_t LosslessFormat::encode(const float* x, float* residual, size_t count, uint64_t, Byte* to) const {
  const float* v = x;
  if (residual != nullptr) {
    kernels::add_to_residual(x, 1.0F, residual, count);
    v = residual;
  }
  const size_t rows = count / kExponentRow;
  Byte* at = to + sizeof(ChunkHeader);
  at += kernels::encode_exponents(narrow_, v, rows, at);
  const size_t rest = (count - rows * kExponentRow) * (narrow_ ? 2 : 4);
  const size_t bytes = padded(static_cast<size_t>(at - to) + rest);
  if (!narrow_ && bytes >= dense_bytes(count)) return encode_dense(v, residual, count, to);
  std::memset(at, 0, static_cast<size_t>(to + bytes - at));
  for (size_t i = rows * kExponentRow; i < count; ++i, at += narrow_ ? 2 : 4) {
    const uint16_t half = narrowed(v[i]);
    std::memcpy(at, narrow_ ? static_cast<const void*>(&half) : &v[i], narrow_ ? 2 : 4);
  }
  put_header(to, bytes, narrow_ ? kNarrowForm : kWideForm);
  // Nobody keeps what rounding to bf16 leaves, but the contract has it.
  if (residual != nullptr && narrow_) {
    std::vector<Byte> halves(2 * count);
    kernels::encode_halves(DType::kBFloat16, residual, 1.0F, 1.0F, count, halves.data(), residual);
  } else if (residual != nullptr) {
    std::memset(residual, 0, count * sizeof(float));
  }
  return bytes;
}

void LosslessFormat::decode_as(Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const {
  const ChunkHeader header = read_header("lossless", from, bytes, count);
  const Byte* const body = from + sizeof header;
  if (header.form == kDenseForm && !narrow_) return decode_dense(body, count, x, arrival);
  const size_t rows = count / kExponentRow, left = count % kExponentRow, rest = left * (narrow_ ? 2 : 4);
  const size_t room = bytes - sizeof header;
  if (header.form != (narrow_ ? kNarrowForm : kWideForm) || room < rest) bad_chunk("lossless", bytes, count);
  const size_t read = kernels::decode_exponents(narrow_, body, room - rest, rows, x, arrival);
  if (read == kernels::kBadExponents || padded(read + rest) != room) bad_chunk("lossless", bytes, count);
  if (left == 0) return;
  const Byte* end = body + read;
  float last[kExponentRow];
  for (size_t i = 0; i < left; ++i, end += narrow_ ? 2 : 4) {
    uint16_t half;
    std::memcpy(&half, end, sizeof half);
    if (narrow_) last[i] = float_from_bits(static_cast<uint32_t>(half) << 16);
    else std::memcpy(&last[i], end, sizeof(float));
  }
  decode_dense(reinterpret_cast<const Byte*>(last), left, x + rows * kExponentRow,
               arrival == Arrival::kAdd ? arrival : Arrival::kStore);
}

}  // namespace perseus
