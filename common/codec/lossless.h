// Gradients bit for bit, with short codes in place of their exponents (patched frame of reference: Zukowski, Heman, Nes
// and Boncz 2006, "Super-scalar RAM-CPU cache compression"). Thread-safe: no state.
//
//   chunk  = bytes:u32 form:u32 block* rest pad          form 0: float32, 1: bf16
//   block  = base:u8 width:u8 escapes:u16 low:u16[64 r] middle:u8[64 r] code* exponent:u8[escapes]
//   rest   = the last count % 64 elements as they are    f32 | u16
//   or       bytes:u32 kDenseForm:u32 f32[count]         where that is not longer
//
// A block has r = 8 rows of 64 elements, the last one of what is left; bf16 has no `low`. `base` is the largest
// exponent byte of the block, and a code is base - exponent in `width` bits, 0 to 6; of width 8 it is the exponent. A
// code of all ones in 1 to 6 bits is an escape: the next of the exponents at the end is the element's. An element
// without its exponent is mantissa:23 sign:1, of which the highest byte lies in `middle` (bf16: mantissa:7 sign:1).
// Byte k of word w of a row, of 16 words, is element 16 k + w's; word w of a row's lows are elements w and 16 + w, word
// 16 + w elements 32 + w and 48 + w. Codes come as the first bits of 8 rows in one, the next 2 bits of 4 rows in one,
// the next 4 of 2 rows, as far as bits 0, 1 and 2 of the width are set.
#pragma once

#include "codec/every_element.h"

namespace perseus {

class LosslessFormat : public EveryElementFormat {
 public:
  // `narrow`: for bf16 tensors, to whose precision elements are rounded as their exact sum is.
  explicit LosslessFormat(bool narrow) : narrow_(narrow) {}

  size_t most_bytes(size_t count) const override;
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  bool keeps_residual() const override { return false; }

 private:
  void decode_as(kernels::Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const override;

  const bool narrow_;
};

}  // namespace perseus
