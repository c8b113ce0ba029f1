// Gradients as f16 with a scale for each chunk, or as bf16. Thread-safe: no state that changes.
//
//   chunk  = bytes:u32 unscale:f32 value:u16[count] pad
//
// f16: a power of two brings the largest finite element of the chunk to [2^14, 2^15), so that finite input never
// overflows and small gradients keep their precision; a scale of the spec's own may overflow, which gives Inf. bf16:
// unscale is 1. Inf and NaN travel as themselves.
#pragma once

#include "base/dtype.h"
#include "codec/every_element.h"

namespace perseus {

// Factors before rounding to f16, and their inverses, lie between these.
constexpr float kSmallestHalfScale = 0x1p-126f, kLargestHalfScale = 0x1p126f;
bool is_half_unscale(float unscale);

class HalfFormat : public EveryElementFormat {
 public:
  // kFloat16 or kBFloat16. `scale`: 0 = of each chunk's own.
  explicit HalfFormat(DType dtype, double scale = 0.0);

  size_t most_bytes(size_t count) const override;
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  void check(const Byte* from, size_t bytes, size_t count) const override;
  bool keeps_residual() const override { return false; }

 private:
  void decode_as(kernels::Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const override;

  const DType dtype_;
  const float scale_;
};

}  // namespace perseus
