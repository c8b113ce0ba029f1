// Gradients as integers of 8, 4 or 2 bits, a scale for each block of 256 elements. Thread-safe: no state.
//
//   chunk  = bytes:u32 0:u32 scale:f32[blocks] block*                with 2 bits scale:bf16[8 blocks]
//   block  = word:u32[q], q = ceil(n bits / 32)          n = 256, in the last block what is left
//   word w = the integers of elements w, q + w, 2q + w, … of the block, the first one in the lowest bits
//   or       bytes:u32 kDenseForm:u32 f32[count]         where an element is Inf or NaN
//
// An element is integer * scale; a scale is the largest magnitude / 127, / 7 with 4 bits and / 1 with 2, cut to 16
// significant bits, or to a bf16. With 2 bits, each eighth of a block's words' elements, 0 to 2q - 1, 2q to 4q - 1, …,
// has a scale of its own. Where the largest magnitude is below 2^-118, zeros are sent.
#pragma once

#include "codec/every_element.h"

namespace perseus {

class IntegerFormat : public EveryElementFormat {
 public:
  explicit IntegerFormat(int bits) : bits_(bits) {}
  size_t most_bytes(size_t count) const override;
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  size_t encode_whole(const float* x, size_t count, Byte* to) const override;
  size_t take_over(const Byte* encoded, float* residual, size_t count, Byte* to) const override;
  void check(const Byte* from, size_t bytes, size_t count) const override;
  bool keeps_residual() const override { return true; }

 private:
  bool scales_finite(const Byte* scales, size_t count) const;
  void decode_as(kernels::Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const override;

  const int bits_;
};

}  // namespace perseus
