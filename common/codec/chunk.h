// What the chunks of all codecs have in common: eight bytes in front, and a form in which every element travels as it
// is. All numbers have the machine's order of bytes, which is little-endian wherever the core runs. Thread-safe: pure
// functions.
#pragma once

#include <cstring>

#include "base/span.h"
#include "kernels/codec_kernels.h"

namespace perseus {

struct ChunkHeader {
  uint32_t bytes;  // of the whole chunk, this header included
  uint32_t form;   // the codec's own, or kDenseForm
};
constexpr uint32_t kDenseForm = 0xffffffff;

inline size_t padded(size_t bytes) { return (bytes + 3) / 4 * 4; }
inline size_t dense_bytes(size_t count) { return sizeof(ChunkHeader) + count * sizeof(float); }

inline size_t put_header(Byte* to, size_t bytes, uint32_t form) {
  ChunkHeader header{static_cast<uint32_t>(bytes), form};
  std::memcpy(to, &header, sizeof header);
  return bytes;
}

// Throws Error(kIo): chunks of `codec` cannot look like that.
[[noreturn]] void bad_chunk(const char* codec, size_t bytes, size_t count);

// The header of a chunk of `bytes`; throws bad_chunk where it is cut off or says another size, or where the form is
// dense and the size is not.
ChunkHeader read_header(const char* codec, const Byte* from, size_t bytes, size_t count);

// All elements of v as they are; nothing stays in `residual`, which may be null or equal v.
size_t encode_dense(const float* v, float* residual, size_t count, Byte* to);
// From behind the header.
void decode_dense(const Byte* from, size_t count, float* x, kernels::Arrival arrival);

}  // namespace perseus
