// The largest elements of a gradient; the others wait in the residual. Thread-safe: no state that changes.
//
//   chunk     = bytes:u32 n:u16 kind:u16 [unscale:f32] positions values      the last three only where n > 0
//   positions = index:u16[n] pad                            kind 0: rising
//             | bits:u32[ceil(count / 32)]                  kind 1: where that is shorter; n bits are set
//   values    = f32[n]  or, with f16 values, u16[n] pad     unscale stands in front of these alone; see half.h
//   or          bytes:u32 kDenseForm:u32 f32[count]         where that is no longer, or an element is Inf or NaN
//
// Of the chunk's `count` elements the k = ratio * count (at least 1) largest by magnitude are sent, or up to k / 4
// more, never a zero; of equal ones that are too many, those with the lowest indices. The threshold comes from a sample
// and is corrected by counting: nothing is sorted.
#pragma once

#include "collective/wire_format.h"
#include "kernels/codec_kernels.h"

namespace perseus {

class TopKFormat : public WireFormat {
 public:
  TopKFormat(double ratio, bool half_values) : ratio_(ratio), half_values_(half_values) {}

  size_t most_bytes(size_t count) const override;
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  void decode(const Byte* from, size_t bytes, size_t count, float* x) const override;
  void decode_add(const Byte* from, size_t bytes, size_t count, float* x) const override;
  bool keeps_residual() const override { return true; }

 private:
  struct Sparse;

  // Bytes of a sparse chunk, header included.
  size_t sparse_bytes(size_t n, size_t count) const;
  // What a chunk that is not dense holds.
  void parse(const Byte* from, size_t bytes, size_t count, uint32_t form, Sparse* sparse) const;

  const double ratio_;
  const bool half_values_;
};

}  // namespace perseus
