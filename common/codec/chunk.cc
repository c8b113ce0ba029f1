// Headers and dense chunks. Thread-safe.
#include "codec/chunk.h"

#include <string>

#include "base/error.h"
#include "kernels/kernels.h"

namespace perseus {

void bad_chunk(const char* codec, size_t bytes, size_t count) {
  fail(ErrorKind::kIo, "[codec] " + std::to_string(bytes) + " bytes are no " + codec + " chunk of " +
                           std::to_string(count) + " elements: the data was damaged on its way");
}

ChunkHeader read_header(const char* codec, const Byte* from, size_t bytes, size_t count) {
  ChunkHeader header;
  if (bytes < sizeof header || bytes % 4 != 0) bad_chunk(codec, bytes, count);
  std::memcpy(&header, from, sizeof header);
  if (header.bytes != bytes) bad_chunk(codec, bytes, count);
  if (header.form == kDenseForm && bytes != dense_bytes(count)) bad_chunk(codec, bytes, count);
  return header;
}

size_t encode_dense(const float* v, float* residual, size_t count, Byte* to) {
  std::memcpy(to + sizeof(ChunkHeader), v, count * sizeof(float));
  if (residual != nullptr) std::memset(residual, 0, count * sizeof(float));
  return put_header(to, dense_bytes(count), kDenseForm);
}

void decode_dense(const Byte* from, size_t count, float* x, kernels::Arrival arrival) {
  if (arrival != kernels::Arrival::kAdd)
    return kernels::copy(x, from, count * sizeof(float), arrival == kernels::Arrival::kStream);
  const void* sources[] = {x, from};
  kernels::reduce(kernels::ReduceSpec{}, x, nullptr, sources, 2, count, false);
}

}  // namespace perseus
