// Dense chunks alone. Thread-safe.
#include "codec/whole.h"

#include "codec/chunk.h"

namespace perseus {

size_t WholeFormat::most_bytes(size_t count) const { return dense_bytes(count); }

size_t WholeFormat::encode(const float* x, float* residual, size_t count, uint64_t, Byte* to) const {
  if (residual != nullptr) kernels::add_to_residual(x, 1.0f, residual, count);
  return encode_dense(residual != nullptr ? residual : x, residual, count, to);
}

void WholeFormat::decode_as(kernels::Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const {
  const ChunkHeader header = read_header("whole", from, bytes, count);
  if (header.form != kDenseForm) bad_chunk("whole", bytes, count);
  decode_dense(from + sizeof header, count, x, arrival);
}

}  // namespace perseus
