// Gradients as 8-bit integers, a scale for each block of 256 elements. Thread-safe: no state.
//
//   chunk  = bytes:u32 0:u32 scale:f32[blocks] block*
//   block  = word:u32[ceil(n / 4)]                      n = 256, in the last block what is left
//   word w = the integers of elements w, q + w, 2q + w, 3q + w of the block, lowest byte first, q = ceil(n / 4)
//   or       bytes:u32 kDenseForm:u32 f32[count]         where an element is Inf or NaN
//
// An element is integer * scale; a scale is the block's largest magnitude / 127, cut to 16 bits. Blocks whose largest
// magnitude is below 2^-118 are sent as zero.
#pragma once

#include "collective/wire_format.h"
#include "kernels/codec_kernels.h"

namespace perseus {

class Int8Format : public WireFormat {
 public:
  size_t most_bytes(size_t count) const override;
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  void decode(const Byte* from, size_t bytes, size_t count, float* x) const override;
  void decode_streamed(const Byte* from, size_t bytes, size_t count, float* x) const override;
  void decode_add(const Byte* from, size_t bytes, size_t count, float* x) const override;
  bool keeps_residual() const override { return true; }
};

}  // namespace perseus
