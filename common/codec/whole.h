// Gradients as they are, with all that was held back of them: the one step between two codecs. Thread-safe: no state.
//
//   chunk = bytes:u32 kDenseForm:u32 f32[count]
#pragma once

#include "codec/every_element.h"

namespace perseus {

class WholeFormat : public EveryElementFormat {
 public:
  size_t most_bytes(size_t count) const override;
  // x + residual as a float; nothing stays.
  size_t encode(const float* x, float* residual, size_t count, uint64_t step, Byte* to) const override;
  bool keeps_residual() const override { return true; }

 private:
  void decode_as(kernels::Arrival arrival, const Byte* from, size_t bytes, size_t count, float* x) const override;
};

}  // namespace perseus
